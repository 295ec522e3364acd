"""Shapes, references and device functions that Gated DeltaNet's decode and prefill share.

Per value head a recurrent state S [key_dim, value_dim] maps keys to values. A token first decays it by exp(g), then
changes S so that its key maps closer to its value, and reads S with its query:

    S <- exp(g) S;    S <- S + k (beta (v - k S))^T;    out = q S

Queries, keys and values have passed a causal convolution over their last few inputs, channel by channel, and SiLU.

A sequence has a slot in two tensors: recurrent_states [slots, heads, key_dim, value_dim] float32, and conv_states
[slots, entries, columns]. The latter is a ring of the convolution's last inputs: the input of position p is in entry
p % entries. Slots may be any distance apart. A sequence at position 0 starts from zeros, whatever its slot holds.
Entries and columns are `kernel` and `conv_channels`, and more in an engine that speculates (gated_delta/window.py).

Prefill cuts prompts into chunks of CHUNK tokens. Its intermediate tensors have one row per chunk, [chunk_rows, ...],
with space for CHUNK tokens even if the chunk is shorter. So a kernel loads whole tiles, without a mask or an address
computation for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from meltcore.kernels.jit import tl, triton

_L2_EPS = 1e-6
# Tokens of a prompt whose updates of the state are computed together.
CHUNK = 64


class GatedDeltaShape(NamedTuple):
    """The sizes of a layer. A row of its projection holds queries | keys | values | output gates z | b | a.

    `heads` counts value heads, a multiple of `key_heads`, and `kernel` the taps of the convolution.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def conv_channels(self) -> int:
        """Number of channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def width(self) -> int:
        """Number of columns of the projection."""
        return self.conv_channels + self.heads * (self.value_dim + 2)


@cache
def constants(shape: GatedDeltaShape) -> dict[str, int]:
    """Return the sizes as the constexpr arguments of the kernels."""
    return {name.upper(): size for name, size in shape._asdict().items()}


class GatedDeltaParams(NamedTuple):
    """The parameters and states of a layer. They are the same tensors at every step.

    Args:
        conv: weight [conv_channels, kernel], the tap of the newest input last.
        a_log: [heads] float32.
        dt_bias: [heads] float32.
        norm: [value_dim].
        conv_states: the slots of all sequences, changed in place.
        recurrent_states: the slots of all sequences, changed in place.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    key_heads: int
    conv_states: torch.Tensor
    recurrent_states: torch.Tensor

    @property
    def shape(self) -> GatedDeltaShape:
        """The sizes of the layer."""
        _, heads, key_dim, value_dim = self.recurrent_states.shape
        return GatedDeltaShape(self.key_heads, heads, key_dim, value_dim, self.conv.shape[1])


def require_layout(projected: torch.Tensor, params: GatedDeltaParams, shape: GatedDeltaShape) -> None:
    """Raise ValueError for sizes, types and strides that the kernels do not support.

    Slots and tokens may be strided.
    """
    conv_states, states = params.conv_states, params.recurrent_states
    if projected.shape[1] != shape.width or shape.heads % shape.key_heads:
        raise ValueError(f"a token of {projected.shape[1]} numbers; {shape} has {shape.width}")
    entries, columns = conv_states.shape[1:]
    has_windows = entries > shape.kernel
    if entries < shape.kernel or columns != shape.conv_channels + 2 * shape.heads * has_windows:
        raise ValueError(
            f"a slot of conv_states is {[entries, columns]}; it must hold {shape.kernel} inputs of "
            f"{shape.conv_channels} channels, or more inputs with b and a of {shape.heads} heads"
        )
    if not (states.dtype == params.a_log.dtype == params.dt_bias.dtype == torch.float32):
        raise ValueError("recurrent_states, a_log and dt_bias must be float32")
    if not (conv_states[0].is_contiguous() and states[0].is_contiguous() and params.conv.is_contiguous()):
        raise ValueError("a slot's states and the convolution's weights must be contiguous")
    if projected.stride(1) != 1:
        raise ValueError("a token's numbers must be contiguous")


def make_chunk_indices(query_lens: Sequence[int], num_decodes: int) -> np.ndarray:
    """Return (sequence index, chunk index) of every prefill chunk of a step: [chunks, 2] int32.

    `query_lens` has the number of tokens of each sequence in this step. The first `num_decodes` sequences decode and
    have no chunk. Chunks are counted from the sequence's first token in this step.
    """
    if num_decodes == len(query_lens):
        return np.zeros((0, 2), np.int32)
    chunk_counts = -(-np.asarray(query_lens[num_decodes:], dtype=np.int32) // CHUNK)
    sequences = np.arange(num_decodes, len(query_lens), dtype=np.int32).repeat(chunk_counts)
    chunk_numbers = np.arange(len(sequences), dtype=np.int32) - (chunk_counts.cumsum() - chunk_counts).repeat(
        chunk_counts
    )
    return np.stack([sequences, chunk_numbers.astype(np.int32)], 1)


def chunk_rows(tokens: int, sequences: int) -> int:
    """Return an upper bound of the chunk rows of `sequences` sequences with `tokens` tokens in total."""
    return tokens // CHUNK + sequences


def conv_reference(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the causal convolution followed by SiLU, as the specification of the kernels.

    inputs: [..., kernel - 1 + tokens, channels] -> [..., tokens, channels] in the type of the inputs.
    """
    windows = inputs.float().unfold(-2, weight.shape[1], 1)
    return torch.nn.functional.silu((windows * weight.float()).sum(-1)).to(inputs.dtype)


def heads_reference(convolved: torch.Tensor, shape: GatedDeltaShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split convolved channels into normalized queries and keys, and values.

    [tokens, conv_channels] -> queries and keys [tokens, heads, key_dim], values [tokens, heads, value_dim], float32.

    Keys are scaled to length 1 and queries to 1 / sqrt(key_dim). Neighboring value heads share a key head.
    """
    key_channels = shape.key_heads * shape.key_dim
    query, key, value = convolved.float().split([key_channels, key_channels, shape.heads * shape.value_dim], -1)
    query_and_key = torch.stack([query, key]).unflatten(-1, (shape.key_heads, shape.key_dim))
    query_and_key = query_and_key * torch.rsqrt(query_and_key.pow(2).sum(-1, keepdim=True) + _L2_EPS)
    query, key = query_and_key.repeat_interleave(shape.heads // shape.key_heads, dim=2)
    return query * shape.key_dim**-0.5, key, value.unflatten(-1, (shape.heads, shape.value_dim))


def gates_reference(
    projected: torch.Tensor, params: GatedDeltaParams, shape: GatedDeltaShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g, the logarithm of the state's decay, and beta, the step size: [tokens, heads] float32 each."""
    b, a = projected[:, -2 * shape.heads :].float().split(shape.heads, -1)
    return -params.a_log.exp() * torch.nn.functional.softplus(a + params.dt_bias), b.sigmoid()


def gated_norm_reference(
    output: torch.Tensor, projected: torch.Tensor, params: GatedDeltaParams, shape: GatedDeltaShape
) -> torch.Tensor:
    """Compute the gated norm of a step's tokens, as the specification of `gated_norm`.

    output: [tokens, heads, value_dim] float32 -> [tokens, heads * value_dim] in the type of `projected`.
    """
    gate = projected[:, shape.conv_channels : -2 * shape.heads].float().unflatten(-1, (shape.heads, shape.value_dim))
    normalized = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + params.eps)
    return (normalized * params.norm.float() * torch.nn.functional.silu(gate)).flatten(1).to(projected.dtype)


def delta_rule_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply one token to the state. Returns the output [..., value_dim] and the new state.

    Args:
        query: [..., key_dim].
        key: [..., key_dim].
        value: [..., value_dim].
        g: [...], the logarithm of the decay.
        beta: [...], the step size.
        state: [..., key_dim, value_dim].
    """
    state = state * g.exp()[..., None, None]
    update = beta[..., None] * (value - (key[..., None, :] @ state)[..., 0, :])
    state = state + key[..., :, None] * update[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


@triton.jit
def chunk_row(query_start_loc, sequence, chunk_number, num_decodes, CHUNK: tl.constexpr):
    """Return the row of chunk `chunk_number` of a sequence in the tensors of chunks.

    No two chunks share a row: n tokens from t on are at most (t + n) // CHUNK - t // CHUNK + 1 chunks.
    """
    return tl.load(query_start_loc + sequence) // CHUNK + sequence - num_decodes + chunk_number


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def fast_silu(x, NATIVE: tl.constexpr):
    """Compute `silu` in 5 instructions instead of 12, without handling of denormals and of quotients near overflow."""
    if not NATIVE:
        return silu(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;  // 1
        rcp.approx.ftz.f32 t, t;
        mul.f32 $0, $1, t;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def fast_exp2(x, NATIVE: tl.constexpr):
    """Compute 2^x in one instruction instead of 4. Denormal results become 0."""
    if not NATIVE:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def decay_and_beta(a, b, a_log, dt_bias):
    """Return g, the logarithm of the state's decay, and beta, the step size, in float32."""
    shifted = a + dt_bias
    softplus = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
    return -tl.exp(a_log) * softplus, 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def l2_normalize_rows(heads):
    """Scale each row of `heads` [ROWS, DIM] float32 to length 1."""
    return heads * tl.rsqrt(tl.sum(heads * heads, 1) + 1e-6)[:, None]  # _L2_EPS


@triton.jit
def gated_norm(output, gate, weight, eps, VALUE_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """Return the RMS norm of the rows of `output`, multiplied by silu(gate): [ROWS, VALUE_DIM] float32.

    weight: [1, VALUE_DIM], the scale of the norm; gate: [ROWS, VALUE_DIM].
    """
    scale = tl.rsqrt(tl.sum(output * output, 1) / VALUE_DIM + eps)[:, None]
    return output * scale * weight * fast_silu(gate, NATIVE)
