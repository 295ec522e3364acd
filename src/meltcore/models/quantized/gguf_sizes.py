"""Counts the bytes of a GGUF file's weights on one rank, as an engine holds them. No torch, no weights.

Rows of blocks are padded to chunks, and rows that a CPU packs to 16. What a rank keeps is therefore cut first, and
then counted: a share of the bytes of the whole would be too little.
"""

from __future__ import annotations

from collections.abc import Mapping

from meltcore.kernels.gemm.half_sizes import converted_bytes, describe_host_weights, stores_half
from meltcore.models.checkpoints.gguf.gguf_file import GGUFTensor
from meltcore.models.checkpoints.gguf.gguf_formats import (
    DENSE_TYPES,
    EMBEDDING,
    EXPERTS,
    HEAD,
    ROUTER,
    held_bytes,
    held_formats,
)
from meltcore.models.decoders.decoder_config import DecoderConfig

_SHARDED_INPUTS = ("attn_output", "ffn_down", EXPERTS[-1])
_SHARDED_OUTPUTS = ("ffn_gate", "ffn_up", *EXPERTS[:-1])
# Matrices with the same inputs, which an engine merges into one weight.
_MERGED = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}


def device_weight_bytes(
    tensors: Mapping[str, GGUFTensor], config: DecoderConfig, element_size: int, ranks: int = 1
) -> int:
    """Return the bytes of a file's weights on one rank as they are loaded.

    Values of the model's type take `element_size`.
    """
    held, total = held_formats(tensors), 0
    for name, tensor in _of_one_rank(tensors, config, ranks).items():
        is_float32 = config.norms_are_float32 and name.endswith("norm.weight")
        total += held_bytes(tensor, held[name], 4 if is_float32 else element_size)
    return total


def host_weight_bytes(
    tensors: Mapping[str, GGUFTensor], config: DecoderConfig, *, packs_half: bool, ranks: int = 1
) -> tuple[int, str]:
    """Return the bytes of a file's weights on a CPU that computes in float32 (host_weights.py), and their form.

    The form describes the weights that the CPU converts. It is empty if it converts none.

    Args:
        tensors: the tensors of the file.
        config: the configuration of the network with these weights.
        packs_half: whether the processor multiplies by float16. False holds converted weights in float32.
        ranks: how many ranks share the weights. The bytes are one rank's.
    """
    weights, held = _of_one_rank(tensors, config, ranks), held_formats(tensors)
    dense = {tensor.type.name for tensor in weights.values() if len(tensor.shape) > 1 and tensor.type in DENSE_TYPES}
    dense_in_half = packs_half and stores_half(dense)
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault(_layer(name, weights[name]), []).append(name)
    total, converted = 0, []  # of each converted layer, whether it has blocks
    for names in layers.values():
        first, has_blocks = names[0], [held[name] is not None for name in names]
        is_embedding = first == EMBEDDING
        loaded = sum(held_bytes(weights[name], held[name], 4) for name in names)
        is_linear = len(weights[first].shape) == 2 and ROUTER not in first and (not is_embedding or HEAD not in weights)
        if not is_linear or not all(in_blocks or dense_in_half for in_blocks in has_blocks):
            total += loaded
            continue
        converted.append(any(has_blocks))
        rows, columns = sum(weights[name].shape[0] for name in names), weights[first].shape[1]
        form = {"in_half": packs_half, "in_blocks": any(has_blocks), "is_embedding": is_embedding}
        total += converted_bytes(rows, columns, **form, loaded_bytes=loaded)
    return total, describe_host_weights(in_half=packs_half, in_two_parts=any(converted)) if converted else ""


def _layer(name: str, tensor: GGUFTensor) -> str:
    """Return a name that the tensors of one layer of an engine share."""
    block, _, part = name.rpartition(".")[0].rpartition(".")
    return f"{block}.{_MERGED[part]}" if part in _MERGED and len(tensor.shape) == 2 else name


def _of_one_rank(tensors: Mapping[str, GGUFTensor], config: DecoderConfig, ranks: int) -> dict[str, GGUFTensor]:
    """Return the tensors that are weights, each with the shape that one of `ranks` keeps."""
    shapes = ((name, _local_shape(name, tensor.shape, config, ranks)) for name, tensor in tensors.items())
    return {name: tensors[name]._replace(shape=shape) for name, shape in shapes if shape is not None}


def _local_shape(name: str, shape: tuple[int, ...], config: DecoderConfig, ranks: int) -> tuple[int, ...] | None:
    """Return the shape that one of `ranks` keeps of a tensor. None means that the tensor is no weight.

    The model refuses a number of ranks that does not divide a size.
    """
    part = name.rpartition(".")[0].rpartition(".")[2]
    queries = config.num_attention_heads // ranks * config.head_dim
    keys = max(1, config.num_key_value_heads // ranks) * config.head_dim
    heads = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_qkv": queries + 2 * keys}
    if config.wide_qk_norm:
        heads |= {"attn_q_norm": queries, "attn_k_norm": keys}
    *leading, rows, columns = (1, *shape) if len(shape) == 1 else shape
    if name in (EMBEDDING, HEAD):
        rows = -(-rows // ranks)
    elif part in heads and len(shape) == 1:
        columns = heads[part]
    elif part in heads:
        rows = heads[part]
    elif part in _SHARDED_OUTPUTS:
        rows //= ranks
    elif part in _SHARDED_INPUTS:
        columns //= ranks
    elif not part.endswith("norm") and part != ROUTER:
        return None
    return (columns,) if len(shape) == 1 else (*leading, rows, columns)
