"""Bounds the bytes that a decoder's step allocates beside weights and caches, from the model's configuration.

Layers run one after another, so the widest layer decides. The bounds count tensors that exist together, whatever kernel
runs.
"""

from __future__ import annotations

from typing import NamedTuple

from meltcore.models.decoders.decoder_config import DecoderConfig

_EXPERT_TILE_ROWS = 128  # rows that kernels of routed experts round each expert's up to
# Partial sums of GEMMs and attention that are split, in float32, with the tables of a step. Only steps of few tokens
# have some.
_PARTIAL_BYTES = 24 * 2**20
_DELTA_CHUNK = 64  # tokens whose pairs a recurrent layer computes together
_ROTARY_BYTES = 4
MIN_DEQUANTIZED_PAIRS = 256  # per expert, kernels/quant/ggml_experts.py
FUSED_ROWS = 32  # that kernels multiply with quantized blocks of any format without dequantizing a slice


class Slices(NamedTuple):
    """The largest numbers of values of quantized weights that a step dequantizes together, by kind of layer."""

    linear: int = 0
    head: int = 0
    experts: int = 0


class StepBytes(NamedTuple):
    """Bytes of a step: bytes per token, and bytes that do not depend on the number of tokens.

    Args:
        layers: number of the model's layers.
        mtp_layers: how many of them are for multi-token prediction.
        position_bytes: tables of positions.
        scratch_bytes: slices of quantized weights that a step dequantizes.
        head_scratch_bytes: slices of the head, which only steps with more than FUSED_ROWS rows of logits need.
        expert_bytes: padded rows and slices of quantized experts beyond `scratch_bytes`. Only steps of at least
            `expert_tokens` tokens need them.
    """

    token_bytes: int
    fixed_bytes: int
    layers: int
    position_bytes: int
    scratch_bytes: int = 0
    head_scratch_bytes: int = 0
    expert_bytes: int = 0
    expert_tokens: int = 0
    mtp_layers: int = 0


def decoder_step(
    config: DecoderConfig, element_size: int, slices: Slices | None = None, *, ranks: int = 1, mtp_layers: int = 0
) -> StepBytes:
    """Return the sizes of a step on one rank.

    Args:
        config: the model's configuration.
        element_size: bytes of a value of the model's type.
        slices: slices of the weights in blocks of ggml. None means that the model has no such weights.
        ranks: the number of ranks.
        mtp_layers: the number of layers for multi-token prediction, which run after the other layers.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers + mtp_layers
    # Residual stream, its norm, and the output of a block before it is added. MTP layers need the hidden states too.
    stream, widest, fixed = (4 if mtp_layers else 3) * hidden, 0, 0
    heads, kv_heads = config.num_attention_heads // ranks, max(1, config.num_key_value_heads // ranks)
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    # Projection, queries and keys with positions, the attended values, and a gated copy of them.
    widest = max(widest, (1 + config.output_gate) * queries + 2 * keys + queries + 2 * keys + (2 * queries))
    experts, recurrent = config.experts, config.recurrent
    expert_bytes = expert_tokens = 0
    if config.intermediate_size is not None:
        widest = max(widest, 3 * config.intermediate_size // ranks)
    if experts is not None:
        width, pairs = experts.moe_intermediate_size // ranks, experts.num_experts_per_tok + experts.shared_expert
        router = 2 * (experts.num_experts + pairs) * 4 // element_size
        count = experts.num_experts + experts.shared_expert
        rows = count * _EXPERT_TILE_ROWS
        widest = max(widest, pairs * (3 * width + hidden) + router + (0 if slices else pairs * hidden))
        fixed = 0 if slices else rows * (hidden + 3 * width)
        if slices is not None:
            expert_bytes = (rows * (hidden + width) + max(0, slices.experts - slices.linear)) * element_size
            expert_tokens = -(-MIN_DEQUANTIZED_PAIRS * count // pairs)
    if recurrent is not None:
        key_size = recurrent.linear_num_key_heads * recurrent.linear_key_head_dim // ranks
        value_heads = recurrent.linear_num_value_heads // ranks
        value_size = value_heads * recurrent.linear_value_head_dim
        pairs_of_chunk = value_heads * (2 * _DELTA_CHUNK + 4)
        widest = max(widest, 2 * (2 * key_size + 2 * value_size) + 2 * key_size + 3 * value_size + pairs_of_chunk)
    # Activations in 8 bits, of FP8 weights, and the integers that describe a token.
    token_bytes = (stream + widest) * element_size + max(hidden, widest // 3) + 64 + 3 * 8 * layers
    tables = 1 + (config.rope_local_theta is not None) + bool(config.nope_layers)
    return StepBytes(
        token_bytes=token_bytes,
        fixed_bytes=fixed * element_size + _PARTIAL_BYTES,
        layers=layers,
        position_bytes=tables * config.head_dim * _ROTARY_BYTES,
        scratch_bytes=slices.linear * element_size if slices else 0,
        head_scratch_bytes=slices.head * element_size if slices else 0,
        expert_bytes=expert_bytes,
        expert_tokens=expert_tokens,
        mtp_layers=mtp_layers,
    )
