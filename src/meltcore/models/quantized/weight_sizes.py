"""Counts the bytes of a model's weights from its configuration, as an engine allocates them. No torch, no weights.

tests/models/test_weight_sizes.py compares each count with the model that the engine builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.kernels.gemm.half_sizes import converted_bytes
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)

WeightFormat = Literal["dense", "fp8", "q4_0", "q8_0"]
MatrixKind = Literal["linear", "expert", "embedding", "head", "gate", "router", "vector", "norm", "float32"]
# Bytes per value of ggml's blocks: 32 values of 4 or 8 bits and a scale in 16 bits; Q6_K: 256 values in 210 bytes.
_BLOCK_BYTES = {"q4_0": 18 / 32, "q8_0": 34 / 32}
_Q6_K_BYTES = 210 / 256
_SCALE_BYTES = 4  # of FP8: float32 per output channel
# Of the slice of a weight that a step dequantizes, kernels/quant/ggml_linear.py.
_SLICE_VALUES, _SLICE_TILE_ROWS = 2**26, 256


class Matrix(NamedTuple):
    """A weight of a decoder on one rank: its kind, rows and columns. A vector has one row."""

    kind: MatrixKind
    rows: int
    columns: int

    @property
    def values(self) -> int:
        """The number of values."""
        return self.rows * self.columns


def decoder_matrices(config: DecoderConfig, ranks: int = 1) -> Iterator[Matrix]:
    """Yield the weights of a decoder that one of `ranks` keeps. Raises ConfigError where they cannot divide a size."""
    hidden, norms = config.hidden_size, 2 * config.pre_norms + 2 * config.post_norms

    def shard(size: int, name: str) -> int:
        if size % ranks:
            raise ConfigError(f"{name} is {size}, which {ranks} ranks cannot divide evenly")
        return size // ranks

    vocabulary = -(-config.vocab_size // ranks)
    yield Matrix("embedding", vocabulary, hidden)
    if not config.tie_word_embeddings:
        yield Matrix("head", vocabulary, hidden)
    yield Matrix("norm", 1, hidden)
    heads = shard(config.num_attention_heads, "num_attention_heads")
    kv_heads = max(1, config.num_key_value_heads // ranks)
    recurrent, experts = config.recurrent, config.experts
    for layer in range(config.num_hidden_layers):
        yield Matrix("norm", norms, hidden)
        if recurrent is not None and layer in recurrent.layers:
            keys = shard(recurrent.linear_num_key_heads, "linear_num_key_heads") * recurrent.linear_key_head_dim
            value_heads = shard(recurrent.linear_num_value_heads, "linear_num_value_heads")
            values = value_heads * recurrent.linear_value_head_dim
            yield Matrix("linear", 2 * keys + 2 * values, hidden)
            yield Matrix("gate", 2 * value_heads, hidden)
            yield Matrix("linear", hidden, values)
            yield Matrix("vector", 2 * keys + values, recurrent.linear_conv_kernel_dim)
            yield Matrix("vector", 1, recurrent.linear_value_head_dim)
            yield Matrix("float32", 2, value_heads)
        else:
            queries, keys = heads * config.head_dim, kv_heads * config.head_dim
            rows = (1 + config.output_gate) * queries + 2 * keys
            yield Matrix("linear", rows, hidden)
            yield Matrix("linear", hidden, queries)
            if config.qkv_bias:
                yield Matrix("vector", 1, rows)
            if config.qk_norm:
                yield Matrix("norm", 2, config.head_dim)
            if config.wide_qk_norm:
                yield Matrix("norm", 1, queries + keys)
        if experts is not None and layer not in experts.dense_layers:
            count = experts.num_experts + experts.shared_expert
            yield Matrix("router", count, hidden)
            yield Matrix("expert", count * 3 * shard(experts.moe_intermediate_size, "moe_intermediate_size"), hidden)
        else:
            assert config.intermediate_size is not None
            width = shard(config.intermediate_size, "intermediate_size")
            yield Matrix("linear", 2 * width, hidden)
            yield Matrix("linear", hidden, width)


def decoder_weight_bytes(
    config: DecoderConfig, *, element_size: int, weight_format: WeightFormat = "dense", ranks: int = 1
) -> int:
    """Return the bytes of a decoder's weights on one rank.

    Values of the model's type take `element_size` bytes. The format fp8 is as `--quantization fp8` makes it. q4_0 and
    q8_0 are as llama.cpp's quantizer makes them, with a head in Q6_K beside Q4_0, and for Gemma 3 an embedding in 16
    bits.
    """
    total = 0.0
    for matrix in decoder_matrices(config, ranks):
        kind = matrix.kind
        is_float32 = kind == "float32" or (kind == "norm" and config.norms_are_float32)
        per_value = 4.0 if is_float32 else float(element_size)
        if weight_format == "fp8" and kind in ("linear", "expert"):
            # An expert's rows are its gate and up projections, and the columns of its down projection.
            scales = matrix.rows if kind == "linear" else matrix.rows * 2 // 3 + _experts(config) * matrix.columns
            total += scales * _SCALE_BYTES
            per_value = 1.0
        elif weight_format in _BLOCK_BYTES and kind in ("linear", "expert", "embedding", "head", "gate"):
            per_value = _BLOCK_BYTES[weight_format]
            if weight_format == "q4_0" and kind == "head":
                per_value = _Q6_K_BYTES
            if weight_format == "q4_0" and kind == "embedding" and config.tie_word_embeddings:
                per_value = element_size if config.rounds_embedding_scale else _Q6_K_BYTES  # Gemma 3
        total += matrix.values * per_value
    return round(total)


def decoder_host_bytes(
    config: DecoderConfig, *, weight_format: WeightFormat = "dense", packs_half: bool = True, ranks: int = 1
) -> int:
    """Return the bytes of a decoder's weights on a CPU, which computes in float32 (host_weights.py).

    The checkpoint stores 16 bits per value, or blocks of `weight_format`. With `packs_half` the processor multiplies by
    float16; otherwise weights are float32.
    """
    total, in_blocks = 0.0, weight_format in _BLOCK_BYTES
    for matrix in decoder_matrices(config, ranks):
        loaded = matrix.values * (_BLOCK_BYTES[weight_format] if in_blocks else 4)
        is_embedding = matrix.kind == "embedding"
        if matrix.kind in ("linear", "gate", "head") or (is_embedding and config.tie_word_embeddings):
            form = {"in_half": packs_half, "in_blocks": in_blocks, "is_embedding": is_embedding}
            total += converted_bytes(matrix.rows, matrix.columns, **form, loaded_bytes=round(loaded))
        elif matrix.kind in ("embedding", "expert"):
            total += loaded
        else:
            total += matrix.values * 4
    return round(total)


def _experts(config: DecoderConfig) -> int:
    assert config.experts is not None
    return config.experts.num_experts + config.experts.shared_expert


def largest_slice(
    config: DecoderConfig, ranks: int = 1, kinds: Sequence[MatrixKind] = ("linear", "embedding", "head", "gate")
) -> int:
    """Return the values of a block-quantized weight of these kinds that a step dequantizes together at most."""
    return max(_slice_values(matrix) for matrix in decoder_matrices(config, ranks) if matrix.kind in kinds)


def largest_expert_slice(config: DecoderConfig, ranks: int = 1) -> int:
    """Return the values of block-quantized experts that a step dequantizes together at most, or 0 without experts."""
    if config.experts is None:
        return 0
    values, count = config.experts.moe_intermediate_size // ranks * config.hidden_size, _experts(config)

    def of_matrix(each: int) -> int:
        slices = -(-count // max(1, _SLICE_VALUES // each))
        return -(-count // slices) * each

    return max(of_matrix(2 * values), of_matrix(values))


def _slice_values(matrix: Matrix) -> int:
    slices = -(-matrix.values // _SLICE_VALUES)
    rows = -(-matrix.rows // (slices * _SLICE_TILE_ROWS)) * _SLICE_TILE_ROWS
    return min(matrix.rows, rows) * matrix.columns


def decoder_cache_specs(config: DecoderConfig, ranks: int = 1) -> Sequence[KVCacheSpec]:
    """Return what each layer caches per sequence on one rank."""
    kv_heads, specs = max(1, config.num_key_value_heads // ranks), list[KVCacheSpec]()
    recurrent = config.recurrent
    for layer in range(config.num_hidden_layers):
        if recurrent is not None and layer in recurrent.layers:
            key_heads, heads = recurrent.linear_num_key_heads // ranks, recurrent.linear_num_value_heads // ranks
            key_dim, value_dim = recurrent.linear_key_head_dim, recurrent.linear_value_head_dim
            channels = 2 * key_heads * key_dim + heads * value_dim
            specs.append(RecurrentStateSpec(channels, recurrent.linear_conv_kernel_dim, heads, key_dim, value_dim))
        elif layer in config.sliding_layers and config.sliding_window is not None:
            specs.append(SlidingWindowSpec(kv_heads, config.head_dim, config.sliding_window))
        else:
            specs.append(FullAttentionSpec(kv_heads, config.head_dim))
    return specs


def linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    """Return the number of values of a linear layer."""
    return (inputs + bias) * outputs
