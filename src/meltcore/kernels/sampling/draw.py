"""Samples tokens by temperature, with noise that is computed from a counter and not stored.

Logits are [rows, vocab]; per-row settings are [rows] tensors. A row's token depends only on its own logits and noise.
So a seeded request samples the same tokens alone and in a batch, unless its logits differ by rounding.

Where the vocabulary is sharded over ranks, each rank packs its best token into one int64, a candidate. The all-reduce
maximum over ranks is the sampled token. A candidate has the score's bits in its upper half, mapped so that integers
have the order of the scores. The lower half has the inverted token id, so of equal scores the lowest id is the largest
candidate. NaN is above all numbers, as it is for `argmax`.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton
from meltcore.kernels.sampling.argmax import argmax, first_largest, require_contiguous_rows

# Logits of one program: rows share what a token id alone contributes to the noise, a third of all the arithmetic.
_CHUNK, _ROWS, _WARPS = 1024, 4, 4
_MAX_ID = 2**32 - 1
_MAGNITUDE = 2**31 - 1  # all bits of an int32 but the sign


def gumbel_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token per row from softmax(logits / temperature). At temperature 0 the token is that of `argmax`.

    The argmax of logits plus Gumbel noise has that distribution (Maddison et al. 2014, arXiv:1411.0030), so no
    probability is computed.

    Args:
        logits: [rows, vocab] of any floating type.
        temperatures: [rows] float32.
        seeds: [rows] int64, the first part of the noise's counter.
        positions: [rows] int64, the second part of the noise's counter.
        thresholds: [rows] int64 from `threshold_tokens`. None keeps all tokens.

    Returns [rows] int64.
    """
    return gumbel_sample_shard(logits, temperatures, seeds, positions, 0, thresholds)[0]


def gumbel_sample_shard(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token: int,
    thresholds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row from a shard of the vocabulary that begins with `first_token`.

    Returns tokens [rows] int64, counted from `first_token`, and their scores [rows] float32. The token with the best
    score of all shards is the result of `gumbel_sample` for the whole vocabulary.
    """
    if not use_triton(logits):
        return _gumbel_sample_reference(logits, temperatures, seeds, positions, first_token, thresholds)
    (rows, vocab), device = logits.shape, logits.device
    output = torch.empty(rows, dtype=torch.int64, device=device)
    best_scores = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return output, best_scores
    require_contiguous_rows(logits)
    chunks = triton.cdiv(vocab, _CHUNK)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    _gumbel_sample_kernel[(chunks, triton.cdiv(rows, _ROWS))](
        *(logits, temperatures, seeds, positions, positions if thresholds is None else thresholds, scores, tokens),
        *(rows, vocab, first_token, logits.stride(0)),
        FILTERED=thresholds is not None,
        ROWS=_ROWS,
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )
    _best_chunk_kernel[(rows,)](
        scores, tokens, output, best_scores, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=_WARPS
    )
    return output, best_scores


def _gumbel_sample_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token: int = 0,
    thresholds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_f32, is_sampled = logits.float(), (temperatures > 0)[:, None]
    scores = logits_f32 / torch.where(is_sampled, temperatures[:, None], 1.0)
    scores += torch.where(is_sampled, gumbel_noise(seeds, positions, logits.shape[1], first_token), 0.0)
    if thresholds is not None:
        last_token = thresholds[:, None]
        threshold = logits_f32.gather(1, last_token.clamp(min=0))
        tokens = torch.arange(logits.shape[1], device=logits.device)
        is_excluded = (logits_f32 < threshold) | ((logits_f32 == threshold) & (tokens > last_token))
        scores.masked_fill_(is_excluded & (last_token >= 0), float("-inf"))
    best = scores.argmax(-1)
    return best, scores.gather(1, best[:, None])[:, 0]


def argmax_candidates(logits: torch.Tensor, first_token: int) -> torch.Tensor:
    """Return argmax candidates [rows] int64.

    logits: [rows, tokens], a shard of the vocabulary from `first_token` on.
    """
    best = argmax(logits)
    if not use_triton(logits):
        return _pack_reference(logits.gather(1, best[:, None])[:, 0].float(), best + first_token)
    return _pack(logits, logits.stride(0), best, best, first_token)


def sampled_candidates(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_token: int
) -> torch.Tensor:
    """Return candidates [rows] int64 of `gumbel_sample` without thresholds, from a shard of the vocabulary."""
    best, scores = gumbel_sample_shard(logits, temperatures, seeds, positions, first_token)
    if not use_triton(logits):
        return _pack_reference(scores, best + first_token)
    return _pack(scores, 1, torch.zeros_like(best), best, first_token)


def candidate_tokens(candidates: torch.Tensor) -> torch.Tensor:
    """Return the token ids [rows] int64 of candidates."""
    return _MAX_ID - (candidates & _MAX_ID)


def _pack(
    scores: torch.Tensor, row_stride: int, columns: torch.Tensor, tokens: torch.Tensor, first_token: int
) -> torch.Tensor:
    output = torch.empty_like(tokens)
    if len(tokens):
        _pack_kernel[(len(tokens),)](scores, columns, tokens, output, row_stride, first_token, num_warps=1)
    return output


def _pack_reference(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    bits = (scores + 0.0).view(torch.int32)  # both zeros become +0
    # As integers the bits of negative floats decrease where the floats increase.
    ordered_bits = (bits ^ ((bits >> 31) & _MAGNITUDE)).masked_fill_(scores.isnan(), _MAGNITUDE)
    return (ordered_bits.long() << 32) | (_MAX_ID - tokens)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: int, first_token: int = 0) -> torch.Tensor:
    """Compute Gumbel noise from (seed, position, token id). It is the same in any batch and on any device.

    seeds, positions: [rows] int64. Returns [rows, tokens] float32, for ids from `first_token` on.
    """
    rows = mix_int64(mix_int64(seeds) + positions)
    ids = torch.arange(first_token, first_token + tokens, device=seeds.device)
    bits = mix_int64(rows[:, None] ^ mix_int64(ids)[None, :])
    # The 23 high bits, half a step off zero, make a float32 inside (0, 1) without rounding, so that both logarithms are
    # finite. With one bit more the largest would round to 1: infinite noise in 1 of 100 samples from 150,000 tokens.
    uniform = (_shift_right(bits, 41).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def mix_int64(state: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's output function (Steele, Lea and Flood 2014) to int64 with wrap-around."""
    state = state + _GOLDEN
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right and fill in zeros, where torch's >> copies the sign bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


@triton.jit
def mix_uint64(state):
    """Apply SplitMix64's output function, as `mix_int64`, to uint64."""
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def token_scores(values, temperature, seed, position, token_bits):
    """Return the scores of float32 logits. Those of a positive temperature get noise.

    token_bits: what the ids of the tokens contribute to the noise.
    """
    scores = values
    if temperature > 0:
        bits = mix_uint64(mix_uint64(mix_uint64(seed.to(tl.uint64)) + position.to(tl.uint64)) ^ token_bits)
        uniform = ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
        scores = tl.div_rn(values, temperature) - tl.log(-tl.log(uniform))
    return scores


# Settings are slices at any alignment: specialized on it, each would be compiled anew.
@triton.jit(
    do_not_specialize=["temperatures_ptr", "seeds_ptr", "positions_ptr", "thresholds_ptr", "rows", "first_token"]
)
def _gumbel_sample_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    thresholds_ptr,
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
    """Each program finds score and id of the best of CHUNK tokens, for each of ROWS rows."""
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    in_vocab = token < vocab
    token_bits = mix_uint64((first_token + token).to(tl.uint64))
    for row_index in tl.static_range(ROWS):
        row = tl.program_id(1).to(tl.int64) * ROWS + row_index
        if row < rows:
            row_ptr = logits_ptr + row * row_stride
            values = tl.load(row_ptr + token, mask=in_vocab, other=float("-inf")).to(tl.float32)
            temperature = tl.load(temperatures_ptr + row)
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            scores = token_scores(values, temperature, seed, position, token_bits)
            if FILTERED:
                last_token = tl.load(thresholds_ptr + row)
                threshold = tl.load(row_ptr + tl.maximum(last_token, 0)).to(tl.float32)
                is_excluded = (values < threshold) | ((values == threshold) & (token > last_token))
                scores = tl.where(is_excluded & (last_token >= 0), float("-inf"), scores)
            score, best = first_largest(scores, token, vocab)
            offset = row * tl.num_programs(0) + chunk
            tl.store(scores_ptr + offset, score)
            tl.store(tokens_ptr + offset, best)


@triton.jit
def _best_chunk_kernel(scores_ptr, tokens_ptr, output_ptr, best_scores_ptr, chunks, CHUNKS: tl.constexpr):
    """Each program finds one row's best token and its score, among the best tokens of the row's chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    scores = tl.load(scores_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    score, best_chunk = first_largest(scores, chunk, CHUNKS)
    tl.store(output_ptr + row, tl.load(tokens_ptr + row * chunks + best_chunk).to(tl.int64))
    tl.store(best_scores_ptr + row, score)


@triton.jit(do_not_specialize=["first_token", "row_stride"])
def _pack_kernel(scores_ptr, columns_ptr, tokens_ptr, output_ptr, row_stride, first_token):
    """Each program packs one row's token and score. The score is at the row's entry of `columns` in `scores`."""
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(scores_ptr + row * row_stride + tl.load(columns_ptr + row)).to(tl.float32)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered_bits = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    token = tl.load(tokens_ptr + row) + first_token
    tl.store(output_ptr + row, (ordered_bits.to(tl.int64) << 32) | (0xFFFFFFFF - token))
