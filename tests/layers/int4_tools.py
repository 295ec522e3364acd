"""AWQ and GPTQ tensors of a matrix, written number by number from the published layouts, and its exact values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack neighbors of the last dimension in words of eight, the value at order[i] of eight in bits 4 i to 4 i + 3."""
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), dtype=np.uint32)
    for i, place in enumerate(order):
        words |= values[..., place::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


class Int4Numbers(NamedTuple):
    """What a matrix of 4-bit values is made of.

    values: [outputs, inputs]; zeros, scales: [outputs, groups]; group_of: the group of each input.
    """

    values: np.ndarray
    zeros: np.ndarray
    scales: torch.Tensor
    group_of: np.ndarray

    def dense(self) -> torch.Tensor:
        """The values of the matrix, [outputs, inputs] float32."""
        scales = self.scales.double().numpy()[:, self.group_of]
        return torch.from_numpy((self.values - self.zeros[:, self.group_of]) * scales).float()


def random_numbers(
    layout: str,
    outputs: int,
    inputs: int,
    group_size: int,
    *,
    seed: int = 0,
    order_seed: int | None = None,
    sym: bool = False,
    dtype: torch.dtype = torch.float16,
    std: float = 0.05,
) -> Int4Numbers:
    """Draw a matrix that a layout can hold: awq, gptq or gptq_v2.

    order_seed: of the activation order; None keeps the inputs of a group together.
    """
    draw = np.random.default_rng(seed)
    groups = inputs // group_size
    values = draw.integers(0, 16, (outputs, inputs))
    lowest = 1 if layout == "gptq" else 0
    zeros = np.full((outputs, groups), 8) if sym else draw.integers(lowest, lowest + 16, (outputs, groups))
    scales = torch.from_numpy(draw.uniform(0.5, 1.5, (outputs, groups)) * std / 6.5).to(dtype)
    group_of = np.repeat(np.arange(groups), group_size)
    if order_seed is not None:
        np.random.default_rng(order_seed).shuffle(group_of)
    return Int4Numbers(values, zeros, scales, group_of)


def packed(layout: str, numbers: Int4Numbers) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix by the last part of their names."""
    values, zeros, scales, group_of = numbers
    tensors = {"scales": scales.T.contiguous()}
    if layout == "awq":
        tensors["qweight"] = torch.from_numpy(words_of(values.T, AWQ_ORDER))
        tensors["qzeros"] = torch.from_numpy(words_of(zeros.T, AWQ_ORDER))
    else:
        tensors["qweight"] = torch.from_numpy(words_of(values).T.copy())
        tensors["qzeros"] = torch.from_numpy(words_of(zeros.T - (1 if layout == "gptq" else 0)))
        tensors["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return tensors


def int4_matrix(
    layout: str, outputs: int, inputs: int, group_size: int, **options: Any
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a random matrix by the last part of their names, and its values [outputs, inputs] float32.

    options: those of `random_numbers`.
    """
    numbers = random_numbers(layout, outputs, inputs, group_size, **options)
    return packed(layout, numbers), numbers.dense()


# Parts of the names of tensors that keep their type.
_KEPT = ("embed", "lm_head", "mlp.gate.", "shared_expert_gate", "conv1d", "in_proj_a", "in_proj_b")


def write_int4(
    folder: Path,
    reference: PreTrainedModel,
    layout: str,
    settings: dict[str, Any],
    *,
    same_order: bool = True,
    kept: tuple[str, ...] = (),
) -> None:
    """Write a network in 4-bit weights with a quantization_config, and give it the values that they have.

    settings: group_size, and of GPTQ desc_act and sym. same_order: of q, k and v, in activation order. kept: parts of
    the names of further tensors that keep their type.
    """
    desc_act, sym = settings.get("desc_act", False), settings.get("sym", False)
    tensors: dict[str, torch.Tensor] = {}
    for index, (name, weight) in enumerate(reference.named_parameters()):
        if weight.dim() < 2 or any(part in name for part in (*_KEPT, *kept)):
            tensors[name] = weight.detach().clone()
            continue
        for part_name, part in matrices_of(name, weight.detach()):
            module = part_name.removesuffix(".weight")
            seed = index + len(tensors)
            order_seed = (0 if same_order else len(name) + index) if desc_act else None
            stored, dense = int4_matrix(
                *(layout, *part.shape, settings["group_size"]),
                seed=seed,
                order_seed=order_seed,
                sym=sym,
                std=float(part.std()),
            )
            part.copy_(dense)
            tensors |= {f"{module}.{end}": tensor for end, tensor in stored.items()}
    stated = {"quant_method": "awq", "version": "gemm", "zero_point": True, "modules_to_not_convert": _KEPT[-2:]}
    if layout != "awq":
        stated = {"quant_method": "gptq", "checkpoint_format": layout}
    reference.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(reference).__name__], "quantization_config": stated | {"bits": 4} | settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def matrices_of(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the published names of a parameter's matrices, and views of them: a tensor of experts has several."""
    if ".experts." not in name or weight.dim() == 2:
        return [(name, weight)]
    prefix, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return [
        (f"{prefix}.{expert}.{part}.weight", matrix)
        for expert in range(len(weight))
        for part, matrix in zip(parts, weight[expert].chunk(len(parts)), strict=True)
    ]
