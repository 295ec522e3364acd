"""Counts the bytes of weights that a published checkpoint stores quantized, from its config.json alone.

AWQ and GPTQ in groups of 4 bits, and FP8 with scales per channel, tensor or block, as engines keep them.
tests/models/test_weight_sizes.py compares the counts with the models that engines build.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.kernels.gemm.half_sizes import converted_bytes
from meltcore.models.configs.quantization_config import (
    FP8_BLOCK,
    AwqConfig,
    BlockFp8Config,
    CompressedFp8Config,
    GptqConfig,
    QuantizationConfig,
)
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.quantized.weight_sizes import decoder_matrices, decoder_weight_bytes

_SCALE_BYTES = 4  # float32
_CHUNK = 256  # columns of packed 4-bit values, kernels/quant/int4.py
_BLOCK = FP8_BLOCK[0]


class _Layer(NamedTuple):
    """Matrices with the same inputs that an engine merges: their modules and rows.

    Experts are `copies` equal layers.
    """

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    copies: int = 1


def quantized_weight_bytes(
    config: DecoderConfig, values: Mapping[str, Any], stored: QuantizationConfig, *, element_size: int, ranks: int = 1
) -> int:
    """Return the bytes of a quantized checkpoint's weights on one rank.

    `values` is the parsed config.json. Other weights have `element_size` bytes per value of the model's type.
    """
    total = decoder_weight_bytes(config, element_size=element_size, ranks=ranks)
    for layer in _layers(config, "text_config" in values, ranks):
        dense_bytes = layer.copies * sum(layer.rows) * layer.columns * element_size
        total += _loaded_bytes(stored, layer, config, element_size) - dense_bytes
    return total


def int4_host_bytes(
    config: DecoderConfig,
    values: Mapping[str, Any],
    stored: AwqConfig | GptqConfig,
    *,
    packs_half: bool,
    dense_in_half: bool,
    ranks: int = 1,
) -> int:
    """Return the bytes of a 4-bit checkpoint's weights on a CPU that computes in float32 (host_weights.py).

    Args:
        config: the network's configuration.
        values: the parsed config.json.
        stored: its quantization_config.
        packs_half: whether the processor multiplies by float16. False holds converted weights in float32.
        dense_in_half: whether weights that are not quantized are converted too, which have 16 bits then.
        ranks: how many ranks share the weights. The bytes count one rank.
    """
    total = 0
    for matrix in decoder_matrices(config, ranks):
        if matrix.kind == "embedding" and config.tie_word_embeddings and dense_in_half:
            form = {"in_half": True, "in_blocks": False, "is_embedding": True}
            total += converted_bytes(matrix.rows, matrix.columns, **form)
        elif matrix.kind not in ("linear", "gate", "expert", "head"):
            total += 4 * matrix.values
    for layer in _layers(config, "text_config" in values, ranks):
        is_stored = [_kind(stored, module) is not None for module in layer.modules]
        is_expert = ".experts." in layer.modules[0]
        if is_expert or not all(each or dense_in_half for each in is_stored):
            total += _loaded_bytes(stored, layer, config, 4)
        else:
            total += converted_bytes(sum(layer.rows), layer.columns, in_half=packs_half, in_blocks=any(is_stored))
    return total


def _loaded_bytes(stored: QuantizationConfig, layer: _Layer, config: DecoderConfig, element_size: int) -> int:
    """Return the bytes of a layer as it is loaded, with all its copies."""
    total = 0
    for kind, group in groupby(zip(layer.modules, layer.rows, strict=True), key=lambda each: _kind(stored, each[0])):
        rows = [size for _, size in group]
        if kind is None:
            total += sum(rows) * layer.columns * element_size
        else:
            total += _packed_bytes(stored, kind, rows, layer, config)
    return layer.copies * total


def _kind(stored: QuantizationConfig, module: str) -> str | None:
    """Return what a module's weight is stored as, None in the model's type."""
    if isinstance(stored, BlockFp8Config | CompressedFp8Config):
        return None if module == "lm_head" else stored.strategy(module)
    if module == "lm_head":
        return "int4" if isinstance(stored, GptqConfig) and stored.lm_head else None
    return "int4" if stored.quantizes(module) else None


def _packed_bytes(
    stored: QuantizationConfig, kind: str, rows: Sequence[int], layer: _Layer, config: DecoderConfig
) -> int:
    """Return the bytes of neighboring matrices of one format, of which each has its number of rows."""
    total = sum(rows)
    if isinstance(stored, AwqConfig | GptqConfig):
        chunks, groups = -(-layer.columns // _CHUNK), _CHUNK // stored.group_size
        return total * chunks * (_CHUNK // 2 + 2 * groups + max(4, groups))
    if kind != "block":
        return total * layer.columns + total * _SCALE_BYTES
    multiple = _row_multiple(config) if layer.modules[0].endswith(".q_proj") else _BLOCK
    group_rows = math.gcd(_BLOCK, multiple, *rows)
    return total * layer.columns + total // group_rows * -(-layer.columns // _BLOCK) * _SCALE_BYTES


def _row_multiple(config: DecoderConfig) -> int:
    """Return how many rows of queries, keys and values stay together, as an engine orders them."""
    head_dim, rotary_dim = config.head_dim, config.rotary_dim
    return head_dim if rotary_dim == head_dim else math.gcd(head_dim // 2, rotary_dim // 2)


def _layers(config: DecoderConfig, is_nested: bool, ranks: int) -> Iterator[_Layer]:
    """Yield the layers of linear maps and experts on one rank.

    With `is_nested` they are a larger model's language part.
    """
    hidden, recurrent, experts = config.hidden_size, config.recurrent, config.experts
    heads, kv_heads = config.num_attention_heads // ranks, max(1, config.num_key_value_heads // ranks)
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    if not config.tie_word_embeddings:
        yield _Layer(("lm_head",), (-(-config.vocab_size // ranks),), hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.{'language_model.' * is_nested}layers.{index}"
        if recurrent is not None and index in recurrent.layers:
            key_size = recurrent.linear_num_key_heads * recurrent.linear_key_head_dim // ranks
            value_heads = recurrent.linear_num_value_heads // ranks
            value_size = value_heads * recurrent.linear_value_head_dim
            names = tuple(f"{layer}.linear_attn.in_proj_{name}" for name in ("qkv", "qkv", "qkv", "z", "b", "a"))
            yield _Layer(names, (key_size, key_size, value_size, value_size, value_heads, value_heads), hidden)
            yield _Layer((f"{layer}.linear_attn.out_proj",), (hidden,), value_size)
        else:
            names = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
            yield _Layer(names, ((1 + config.output_gate) * queries, keys, keys), hidden)
            yield _Layer((f"{layer}.self_attn.o_proj",), (hidden,), queries)
        if experts is not None and index not in experts.dense_layers:
            width, count = experts.moe_intermediate_size // ranks, experts.num_experts + experts.shared_expert
            first = f"{layer}.mlp.experts.0"
            # Kernels of experts read each projection by itself: blocks do not reach from one into the other.
            for name in ("gate", "up"):
                yield _Layer((f"{first}.{name}_proj",), (width,), hidden, count)
            yield _Layer((f"{first}.down_proj",), (hidden,), width, count)
        else:
            if config.intermediate_size is None:
                raise ConfigError(f"layer {index} has no intermediate_size")
            width = config.intermediate_size // ranks
            yield _Layer((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), (width, width), hidden)
            yield _Layer((f"{layer}.mlp.down_proj",), (hidden,), width)
