"""Choosing tokens from logits: argmax, penalties, filters and counter-based noise, row by row and without the host.

Logits are [rows, vocab]; per-row settings are [rows] tensors. Nothing here depends on which other rows share the batch,
so a seeded request draws the same tokens alone and in company.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

# Logits of one program of the argmax: enough programs for a single row, and few enough maxima for one program to read.
_CHUNK, _WARPS = 4096, 4


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest logit, the lowest of equals; the first NaN counts as larger than any number.

    logits: [rows, vocab] of any floating type, read as they are. Returns [rows] int64.
    """
    return _greedy_triton(logits) if use_triton(logits) else _greedy_torch(logits)


def _greedy_torch(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@triton.jit
def _chunk_maximum_kernel(logits_ptr, maxima_ptr, vocab, row_stride, CHUNK: tl.constexpr):
    """One program: the largest of CHUNK logits of one row, or NaN if there is one. Where it stands is found later,
    in one chunk a row, so that the pass over all logits spends two instructions on each."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    maximum = tl.where(has_nan, float("nan"), tl.max(values, axis=0))
    tl.store(maxima_ptr + row * tl.num_programs(1) + chunk, maximum)


@triton.jit
def _first_maximum_kernel(
    logits_ptr, maxima_ptr, output_ptr, vocab, row_stride, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    """One program: one row's first chunk with the largest maximum, and in it the first logit that equals it."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    maxima = tl.load(maxima_ptr + row * chunks + each, mask=each < chunks, other=float("-inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
    maximum = tl.max(maxima, axis=0)
    found = tl.where(has_nan, maxima != maxima, maxima == maximum)
    token = tl.min(tl.where(found, each, CHUNKS), axis=0) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    found = tl.where(has_nan, values != values, values == maximum)
    tl.store(output_ptr + row, tl.min(tl.where(found, token, vocab), axis=0).to(tl.int64))


def _greedy_triton(logits: torch.Tensor) -> torch.Tensor:
    (rows, vocab), device = logits.shape, logits.device
    output = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return output
    if logits.stride(1) != 1:
        raise ValueError(f"logits of strides {logits.stride()}: the last dimension must be contiguous")
    chunks = triton.cdiv(vocab, _CHUNK)
    maxima = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    _chunk_maximum_kernel[(rows, chunks)](logits, maxima, vocab, logits.stride(0), CHUNK=_CHUNK, num_warps=_WARPS)
    _first_maximum_kernel[(rows,)](
        logits,
        maxima,
        output,
        vocab,
        logits.stride(0),
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )
    return output


def penalise(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """OpenAI's presence and frequency penalties on generated tokens, and the repetition penalty (Keskar et al. 2019,
    arXiv:1909.05858) on prompt and generated tokens.

    output_counts: [rows, vocab] int32; in_prompt: [rows, vocab] bool; the penalties: [rows] float32.
    """
    generated = output_counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(generated | in_prompt, repeated, logits)
    return logits - frequency[:, None] * output_counts - presence[:, None] * generated


def keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, top-p (nucleus) and min-p leave out, in that order, each on what the last one kept.

    top_k: [rows] int64, 0 for off; top_p, min_p: [rows] float32, 1 and 0 for off. Logits are scaled by temperature
    already. The likeliest token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    drop = ranks >= limit[:, None]
    probabilities = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    # The mass before a token decides: the token that crosses top_p is kept.
    before = probabilities.cumsum(-1) - probabilities
    drop |= before >= top_p[:, None]
    # Against the likeliest of what is left, whose share of the whole does not matter to the ratio.
    drop |= probabilities < min_p[:, None] * probabilities[:, :1]
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(drop, float("-inf")))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise from a counter: one value for each (seed, position, token id), in any batch, on any device.

    seeds, positions: [rows] int64. Returns [rows, vocab_size] float32. Adding it to log-probabilities and taking the
    argmax draws from their softmax (Maddison et al. 2014, arXiv:1411.0030).
    """
    rows = _mix(_mix(seeds) + positions)
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = _mix(rows[:, None] ^ _mix(tokens)[None, :])
    # The 24 high bits make a float32 in (0, 1): half a step off zero, so that both logarithms stay finite.
    uniform = (((bits >> 40) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function (Steele, Lea and Flood 2014) on int64 with wrap-around."""
    state = state + _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch's >> on int64 copies the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    logits = torch.empty(64, 151936, dtype=dtype, device="meta")
    return [lambda: _greedy_triton(logits)]
