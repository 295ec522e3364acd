"""Writes small GGUF files in the layout that llama.cpp's converter gives them, with the writer of the gguf package."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType, TokenType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from meltcore.kernels.quant.ggml import random_blocks
from meltcore.kernels.quant.ggml_types import HELD_TYPES, GgmlType
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.loader import build_model

Store = tuple[GGMLQuantizationType, Callable[[torch.Tensor], np.ndarray]]
TYPES: dict[str, Store] = {
    "F32": (GGMLQuantizationType.F32, lambda tensor: tensor.numpy()),
    "F16": (GGMLQuantizationType.F16, lambda tensor: tensor.half().numpy()),
    "BF16": (GGMLQuantizationType.BF16, lambda tensor: tensor.bfloat16().view(torch.uint8).numpy()),
}
TYPES |= {
    name: (
        GGMLQuantizationType[name],
        partial(lambda kind, tensor: quantize(tensor.numpy(), kind), GGMLQuantizationType[name]),
    )
    for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
}


def drawn_blocks(kind: GgmlType, tensor: torch.Tensor) -> np.ndarray:
    """Random blocks of the tensor's size, with values of about its deviation and a mean of zero."""
    generator, deviation = torch.Generator().manual_seed(tensor.numel()), float(tensor.std())
    if kind in HELD_TYPES:
        return random_blocks(kind, tensor.shape, deviation, generator).numpy()
    *rows, columns = tensor.shape
    blocks = torch.empty(*rows, kind.row_bytes(columns), dtype=torch.uint8).random_(generator=generator)
    first_byte, size = {"Q3_K": (108, 45.0), "IQ4_NL": (0, 70.0), "IQ4_XS": (0, 1300.0)}[kind.name]
    by_block = blocks.view(-1, kind.block_bytes)
    scales = torch.randn(len(by_block), 1, generator=generator) * (deviation / size)
    by_block[:, first_byte : first_byte + 2] = scales.half().view(torch.uint8)
    return blocks.numpy()


# The gguf package does not quantize to these: what the blocks hold is read back.
TYPES |= {
    name: (GGMLQuantizationType[name], partial(drawn_blocks, GgmlType[name]))
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "phi3": "phi3",
}
PERMUTED = ("granite", "llama", "mistral3", "smollm3")  # whose converter reorders rows of queries and keys
# Formats that take turns, so that those of a layer differ. Experts of a layer are of one mix too.
MIXES = {
    "blocks of 32": ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q8_0", "BF16"),
    "blocks of 256": ("Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "Q4_K", "Q6_K", "IQ4_NL", "Q4_1"),
}
# What the package calls the tensors of a published model, layer by layer.
_NAMES = {
    name: gguf.get_tensor_name_map(architecture, 8)
    for architecture, name in gguf.MODEL_ARCH_NAMES.items()
    if name in ARCHITECTURES.values()
}


def write_model(path: Path, model: PreTrainedModel, store: str = "F32", split_tensors: int = 0) -> Path:
    """Write a network with a vocabulary of bytes. store: the type of matrices; split_tensors: tensors per part."""
    writer = new_writer(path, model.config, split_tensors=split_tensors)
    add_tokenizer(writer, tokens=[f"t{index}" for index in range(model.config.vocab_size)])
    add_tensors(writer, model, store)
    return finish(writer, path)


def new_writer(path: Path, config: Any, *, split_tensors: int = 0) -> gguf.GGUFWriter:
    """Return a writer with the metadata of a network's configuration."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type], split_max_tensors=split_tensors)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        ratio = np.log(config.max_position_embeddings / rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(
            float(np.sqrt(1 + ratio / np.log(rope["original_max_position_embeddings"])))
        )
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
    if config.model_type == "phi3":
        rotated = rope.get("partial_rotary_factor", 1.0) * config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rotated))
    if config.model_type == "phi3" or getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    return writer


def add_tokenizer(
    writer: gguf.GGUFWriter,
    *,
    tokens: list[str],
    types: list[int] | None = None,
    model: str = "gpt2",
    pre: str = "qwen2",
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    eos: int = 1,
) -> None:
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [TokenType.NORMAL] * len(tokens))
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    writer.add_eos_token_id(eos)


def add_tensors(writer: gguf.GGUFWriter, model: PreTrainedModel, store: str = "F32") -> None:
    """Add the weights in the published GGUF layout: norms are always F32, llama's rows of q and k permuted."""
    config = model.config
    is_gemma = config.model_type == "gemma3_text"
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensor.detach().float().contiguous()
        if is_gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        if writer.arch in PERMUTED and ".q_proj." in name:
            tensor = permute(tensor, config.num_attention_heads)
        if writer.arch in PERMUTED and ".k_proj." in name:
            tensor = permute(tensor, config.num_key_value_heads)
        for stored_name, part in gguf_tensors(name, tensor, config.model_type):
            raw_type, convert = TYPES[stored_kind(stored_name, part, store)]
            writer.add_tensor(stored_name, convert(part.contiguous()), raw_dtype=raw_type)


def stored_kind(name: str, tensor: torch.Tensor, store: str) -> str:
    """Return the type of a tensor in a file of type `store`: all matrices alike, or a mix as llama.cpp makes it."""
    if tensor.dim() == 1 or "_inp" in name:
        return "F32"
    if store == "Q4_0 and Q8_0":
        return "Q8_0" if any(each in name for each in ("attn_v", "ffn_down", "token_embd")) else "Q4_0"
    if store == "Q4_K_M":  # every second layer stands for those that it finds important
        important = any(each in name for each in ("attn_v", "ffn_down")) and int(name.split(".")[1]) % 2 == 0
        return "Q6_K" if important or name == "output.weight" else "Q4_K"
    if " and " in store:  # of the experts of a layer
        kinds = store.replace(" and ", ", ").split(", ")
        return kinds[("ffn_gate" in name) + 2 * ("ffn_down" in name) if len(kinds) > 2 else "ffn_down" in name]
    if store in MIXES:
        kinds = MIXES[store]
        return kinds[sum(map(ord, name)) % len(kinds)] if tensor.dim() == 2 else kinds[tensor.shape[1] % len(kinds)]
    return store


def load_dequantized(reference: PreTrainedModel, path: Path) -> int:
    """Give a network the values of a file's rounded tensors by the gguf package. Returns how many there are."""
    model, config = GGUFModel(path), reference.config
    stored = {
        name: torch.from_numpy(dequantize(model.file_by_tensor[name].blocks(name), tensor.type)).view(tensor.shape)
        for name, tensor in model.tensors.items()
        if tensor.type.name in GgmlType.__members__ or tensor.type.name in ("BF16", "F16")
    }
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            parts = gguf_tensors(name, weight, config.model_type)
            if parts[0][0] not in stored:
                continue
            values = torch.cat([stored[part_name] for part_name, _ in parts], dim=weight.dim() - 2)
            for part, count in heads.items():
                if ARCHITECTURES[config.model_type] in PERMUTED and part in name:
                    values = unpermute(values, count)
            weight.copy_(values)
    return len(stored)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(name: str, tensor: torch.Tensor, model_type: str) -> list[tuple[str, torch.Tensor]]:
    """Return the GGUF names and parts of a tensor of transformers 5, which stacks the experts of a layer."""
    parts = [(name, tensor)]
    if name.endswith(".gate_up_proj"):
        base = name.removesuffix("gate_up_proj")
        parts = [
            (f"{base}{half}.weight", part)
            for half, part in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
        ]
    elif name.endswith(".experts.down_proj"):
        parts = [(f"{name}.weight", tensor)]
    names = _NAMES[ARCHITECTURES[model_type]]
    return [(_known(names.get_name(part_name, (".weight", ".bias"))), part) for part_name, part in parts]


def _known(name: str | None) -> str:
    assert name is not None
    return name


def permute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Put dimension i of a head next to i + head_dim / 2, as llama.cpp rotates them."""
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo `permute`."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return rope_freqs.weight by the formula of llama.cpp's converter."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    length, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def export_tokenizer(folder: Path, path: Path, *, pre: str = "qwen2", rows: int = 0) -> Path:
    """Write the byte-level tokenizer.json of a folder as a GGUF file with one tensor, padded to `rows` tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    texts = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    texts |= {index: each["content"] for index, each in added.items()}
    rows = max(rows, max(texts) + 1)
    types = [
        (TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED)
        if index in added
        else (TokenType.NORMAL if index in texts else TokenType.UNUSED)
        for index in range(rows)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "qwen3")
    tokens = [texts.get(index, f"[PAD{index}]") for index in range(rows)]
    add_tokenizer(writer, tokens=tokens, types=types, pre=pre, merges=merges)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 1), dtype=np.float32))
    return finish(writer, path)


def config_of(path: Path) -> DecoderConfig:
    """What a GGUF file or a folder says of its model."""
    return build_model(open_checkpoint(str(path), files="text"), torch.float32, torch.device("meta")).config
