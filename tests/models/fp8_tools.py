"""Writes small FP8 checkpoints by the published formula, and computes their logits in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_tools as tools
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

FP8, LARGEST, SIDE = torch.float8_e4m3fn, 448.0, 128
# Several blocks per matrix, and whole ones per rank of two; a quarter of the hybrid's heads turns, as published.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "qwen3_moe": {
        "hidden_size": 256,
        "head_dim": 64,
        "moe_intermediate_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    },
    "qwen3_5_moe_text": {
        "hidden_size": 256,
        "head_dim": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_num_value_heads": 4,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_z")
QUANTIZED += ("out_proj",)
BLOCK_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [SIDE, SIDE],
    "modules_to_not_convert": ["lm_head", "mlp.gate", "mlp.shared_expert_gate", "in_proj_a", "in_proj_b"],
}


def compressed_config(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    inputs = weights | {"dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_[ab]$"]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def spread(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scale of every value of a matrix, from one per block, per row or for all."""
    if scales.numel() == 1 or scales.shape == (len(weight), 1):
        return scales.expand_as(weight)
    return scales.repeat_interleave(SIDE, 0)[: len(weight)].repeat_interleave(SIDE, 1)[:, : weight.shape[1]]


def quantize(weight: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a matrix."""
    if strategy == "block":
        blocks = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % SIDE, 0, -len(weight) % SIDE))
        amax = blocks.unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE)).amax((1, 3))
    else:
        amax = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max().reshape(1)
    scales = amax / LARGEST
    return (weight / spread(weight, scales)).to(FP8), scales


def quantize_inputs(hidden: torch.Tensor, strategy: str) -> torch.Tensor:
    """Inputs after quantization, per token and block of columns or per token."""
    size = SIDE if strategy == "block" else hidden.shape[-1]
    blocks = torch.nn.functional.pad(hidden, (0, -hidden.shape[-1] % size)).unflatten(-1, (-1, size))
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-20) / LARGEST
    return ((blocks / scales).to(FP8).float() * scales).flatten(-2)[..., : hidden.shape[-1]]


def published(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter of transformers by its published names: a matrix for each expert. Views of the parameter."""
    module, _, fused = name.rpartition(".")
    if not module.endswith(".experts"):
        return {name: weight}
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused]
    return {
        f"{module}.{expert}.{part}.weight": matrix
        for expert, stacked in enumerate(weight)
        for part, matrix in zip(parts, stacked.chunk(len(parts)), strict=True)
    }


@torch.no_grad()
def write_fp8(
    folder: Path,
    family: str,
    strategy: str = "block",
    change: Callable[[dict[str, torch.Tensor]], object] | None = None,
    **sizes: Any,
) -> PreTrainedModel:
    """Write a quantized checkpoint, and return the network of its dequantized weights, which are written beside it.

    Blocks differ in size, so that a wrong scale shows. change: of the tensors that are written.
    """
    reference = tools.make_reference(4, family, **(SIZES[family] | sizes))
    for name, parameter in reference.named_parameters():
        if name.endswith("q_norm.weight"):  # attention to many keys: a peak would follow the rounding of one input
            parameter.fill_(-0.8 if family == "qwen3_5_moe_text" else 0.2)
    stored: dict[str, torch.Tensor] = {}
    end = "weight_scale_inv" if strategy == "block" else "weight_scale"
    for parameter_name, parameter in reference.named_parameters():
        for name, matrix in published(parameter_name, parameter.data).items():
            if not name.removesuffix(".weight").endswith(QUANTIZED):
                stored[name] = matrix.clone()
                continue
            factors = torch.randint(-2, 2, (-(-len(matrix) // SIDE), -(-matrix.shape[1] // SIDE))).float().exp2()
            values, scales = quantize(matrix * spread(matrix, factors), strategy)
            stored |= {name: values, name.removesuffix("weight") + end: scales}
            matrix.copy_(values.float() * spread(matrix, scales))
    if change is not None:
        change(stored)
    reference.save_pretrained(folder / "dequantized")
    for path in (folder / "dequantized").glob("*config.json"):
        shutil.copy(path, folder)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = BLOCK_CONFIG if strategy == "block" else compressed_config(strategy)
    (folder / "config.json").write_text(json.dumps(config))
    return reference


@contextmanager
def quantized_inputs(reference: PreTrainedModel, strategy: str) -> Iterator[None]:
    """Quantizes the inputs of every quantized matrix of a network, as the published format asks for."""
    storages = {
        parameter.untyped_storage().data_ptr()
        for parameter_name, parameter in reference.named_parameters()
        for name in list(published(parameter_name, parameter.data))[:1]
        if name.removesuffix(".weight").endswith(QUANTIZED)
    }
    linear = torch.nn.functional.linear

    def with_quantized_inputs(hidden: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        is_quantized = weight.untyped_storage().data_ptr() in storages
        return linear(quantize_inputs(hidden, strategy) if is_quantized else hidden, weight, *bias)

    torch.nn.functional.linear = with_quantized_inputs
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def logits_error(reference: PreTrainedModel, folder: Path, strategy: str = "block", **settings: Any) -> float:
    """The relative error of an engine's logits against the network of the dequantized weights."""
    seen = tools.open_engine(folder, max_model_len=512, **settings)
    prompt = tools.random_prompt(150, 1)
    seen.add("one", prompt, max_tokens=4)
    generated = seen.run()["one"]
    with quantized_inputs(reference, strategy):
        expected = tools.reference_logits(reference, prompt, generated)
    return tools.relative_error(torch.stack(seen.logits["one"]), expected)
