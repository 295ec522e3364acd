"""Choosing tokens from logits: the largest, or a draw by noise that is counted rather than stored.

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
# Of one program of a draw: rows share what a token id alone contributes to the noise, a third of all the arithmetic.
_DRAW_CHUNK, _DRAW_ROWS = 1024, 4


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest logit, the lowest of equals; the first NaN counts as larger than any number.

    logits: [rows, vocab] of any floating type, read as they are. Returns [rows] int64.
    """
    return _greedy_triton(logits) if use_triton(logits) else _greedy_torch(logits)


def _greedy_torch(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@triton.jit
def _first_largest(values, tokens, limit):
    """The largest of `values`, NaN above all, and the lowest of `tokens` where it stands; `limit` is above them all."""
    has_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    maximum = tl.max(values, axis=0)
    found = tl.where(has_nan, values != values, values == maximum)
    return tl.where(has_nan, float("nan"), maximum), tl.min(tl.where(found, tokens, limit), axis=0)


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
    _, chunk = _first_largest(maxima, each, CHUNKS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    _, best = _first_largest(values, token, vocab)
    tl.store(output_ptr + row, best.to(tl.int64))


def _greedy_triton(logits: torch.Tensor) -> torch.Tensor:
    (rows, vocab), device = logits.shape, logits.device
    output = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return output
    check_rows(logits)
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


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    last_kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token for each row from softmax(logits / temperature), or `greedy`'s where the temperature is 0.

    The largest of logits and Gumbel noise together has that distribution (Maddison et al. 2014, arXiv:1411.0030), so
    no probability is ever computed. logits: [rows, vocab] of any floating type; temperatures: [rows] float32; seeds,
    positions: [rows] int64, see `gumbel_noise`; last_kept: [rows] int64 from `kernels.likeliest`, None to keep all.
    Returns [rows] int64.
    """
    body = _draw_triton if use_triton(logits) else _draw_torch
    return body(logits, temperatures, seeds, positions, last_kept, 0)[0]


def draw_part(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` among some neighbouring tokens of the vocabulary, the first of which is `first_token`.

    Returns [rows] int64, counted from `first_token`, and the scores [rows] float32 that they won by: the best of all
    parts is what `draw` takes from the whole vocabulary.
    """
    body = _draw_triton if use_triton(logits) else _draw_torch
    return body(logits, temperatures, seeds, positions, None, first_token)


def _draw_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    last_kept: torch.Tensor | None,
    first_token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    values, hot = logits.float(), (temperatures > 0)[:, None]
    scores = values / torch.where(hot, temperatures[:, None], 1.0)
    scores += torch.where(hot, gumbel_noise(seeds, positions, logits.shape[1], first_token), 0.0)
    if last_kept is not None:
        last = last_kept[:, None]
        threshold = values.gather(1, last.clamp(min=0))
        tokens = torch.arange(logits.shape[1], device=logits.device)
        after = (values < threshold) | ((values == threshold) & (tokens > last))
        scores.masked_fill_(after & (last >= 0), float("-inf"))
    best = scores.argmax(-1)
    return best, scores.gather(1, best[:, None])[:, 0]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: int, first_token: int = 0) -> torch.Tensor:
    """Gumbel noise from a counter: one value for each (seed, position, token id), in any batch, on any device.

    seeds, positions: [rows] int64. Returns [rows, tokens] float32, for ids from `first_token` on. The specification of
    `draw`'s noise.
    """
    rows = _mix(_mix(seeds) + positions)
    ids = torch.arange(first_token, first_token + tokens, device=seeds.device)
    bits = _mix(rows[:, None] ^ _mix(ids)[None, :])
    # The 23 high bits, half a step off zero, make a float32 inside (0, 1) without rounding, so that both logarithms are
    # finite. With one bit more the largest would round to 1: infinite noise, in one of 100 draws from 150,000 tokens.
    uniform = (_shift_right(bits, 41).float() + 0.5) * 2.0**-23
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


@triton.jit
def _mixed(state):
    """`_mix` on uint64."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


# Settings start anywhere: without this, each new alignment would be compiled for anew.
@triton.jit(
    do_not_specialize=["temperatures_ptr", "seeds_ptr", "positions_ptr", "last_kept_ptr", "rows", "first_token"]
)
def _draw_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    last_kept_ptr,
    scores_ptr,
    tokens_ptr,
    rows,
    vocab,
    first_token,
    row_stride,
    FILTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: the best of CHUNK tokens, score and id, of each of ROWS rows."""
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    token_bits = _mixed((first_token + token).to(tl.uint64))
    for member in tl.static_range(ROWS):
        row = tl.program_id(1).to(tl.int64) * ROWS + member
        if row < rows:
            row_ptr = logits_ptr + row * row_stride
            values = tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
            scores = values
            temperature = tl.load(temperatures_ptr + row)
            if temperature > 0:
                seed = tl.load(seeds_ptr + row).to(tl.uint64)
                position = tl.load(positions_ptr + row).to(tl.uint64)
                bits = _mixed(_mixed(_mixed(seed) + position) ^ token_bits)
                uniform = ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
                scores = tl.div_rn(values, temperature) - tl.log(-tl.log(uniform))
            if FILTERED:
                last = tl.load(last_kept_ptr + row)
                threshold = tl.load(row_ptr + tl.maximum(last, 0)).to(tl.float32)
                after = (values < threshold) | ((values == threshold) & (token > last))
                scores = tl.where(after & (last >= 0), float("-inf"), scores)
            score, best = _first_largest(scores, token, vocab)
            place = row * tl.num_programs(0) + chunk
            tl.store(scores_ptr + place, score)
            tl.store(tokens_ptr + place, best)


@triton.jit
def _best_chunk_kernel(scores_ptr, tokens_ptr, output_ptr, best_ptr, chunks, CHUNKS: tl.constexpr):
    """One program: one row's best token and its score, from the best of each chunk. Ids rise with the chunks."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    scores = tl.load(scores_ptr + row * chunks + each, mask=each < chunks, other=float("-inf"))
    score, best = _first_largest(scores, each, CHUNKS)
    tl.store(output_ptr + row, tl.load(tokens_ptr + row * chunks + best).to(tl.int64))
    tl.store(best_ptr + row, score)


def _draw_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    last_kept: torch.Tensor | None,
    first_token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, vocab), device = logits.shape, logits.device
    output = torch.empty(rows, dtype=torch.int64, device=device)
    best = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return output, best
    check_rows(logits)
    chunks = triton.cdiv(vocab, _DRAW_CHUNK)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    _draw_kernel[(chunks, triton.cdiv(rows, _DRAW_ROWS))](
        logits,
        temperatures,
        seeds,
        positions,
        positions if last_kept is None else last_kept,
        scores,
        tokens,
        rows,
        vocab,
        first_token,
        logits.stride(0),
        FILTERED=last_kept is not None,
        ROWS=_DRAW_ROWS,
        CHUNK=_DRAW_CHUNK,
        num_warps=_WARPS,
    )
    _best_chunk_kernel[(rows,)](
        scores, tokens, output, best, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=_WARPS
    )
    return output, best


def check_rows(logits: torch.Tensor) -> None:
    """Raise ValueError where a kernel could not read [rows, vocab] as rows of neighbours."""
    if logits.stride(1) != 1:
        raise ValueError(f"logits of strides {logits.stride()}: the last dimension must be contiguous")


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    rows = 64
    logits = torch.empty(rows, 151936, dtype=dtype, device="meta")
    temperatures = torch.empty(rows, device="meta")
    indices = torch.empty(rows, dtype=torch.int64, device="meta")
    return [
        lambda: _greedy_triton(logits),
        lambda: _draw_triton(logits, temperatures, indices, indices, None, 0),
        lambda: _draw_triton(logits, temperatures, indices, indices, indices, 0),
    ]
