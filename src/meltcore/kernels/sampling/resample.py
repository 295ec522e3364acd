"""Samples the sequences of a decode step whose tokens are not the greedy ones, in a CUDA graph.

A graph has fixed arguments, so everything that differs between requests is in memory. What a request needs is constant
while it runs: `RowSettings` are sent only when other sequences decode.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton
from meltcore.kernels.sampling.argmax import first_largest, require_contiguous_rows
from meltcore.kernels.sampling.draw import gumbel_sample, mix_uint64, token_scores
from meltcore.kernels.sampling.token_mask import WORD_BITS, mask_logits, wait_for_masks

_CHUNK, _ROWS, _WARPS = 1024, 4, 4  # as in draw.py


class RowSettings(NamedTuple):
    """How the sequences of a decode step are sampled.

    Args:
        masks: [2] int64, the address of the masks of `mask_logits` and their words per row. They are read only for
            sequences with tickets.
        limits_ns: [2] int64 of `wait_for_masks`.
        tickets: [sequences] int64 of `wait_for_masks`.
        seeds: [sequences] int64.
        temperatures: [sequences] float32. A sequence of a negative temperature keeps its greedy token.
    """

    masks: torch.Tensor
    limits_ns: torch.Tensor
    tickets: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor


class StepTokens(NamedTuple):
    """Where the tokens of a decode step are, after `finish_step` has written the greedy ones (kernels/step_io.py).

    Args:
        token_ids: [sequences] int64.
        rows: [sequences] int64, of masks and of `last_tokens`.
        positions: [sequences] int64, of the sampled tokens.
        last_tokens: [table rows] int64.
        steps: [1] int64.
        ring: [slots, sequences or more] int64 in pinned host memory. The step's slot is `(steps - 1) % slots`.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    last_tokens: torch.Tensor
    steps: torch.Tensor
    ring: torch.Tensor


def resample(
    logits: torch.Tensor, settings: RowSettings, tokens: StepTokens, filled: torch.Tensor, outcomes: torch.Tensor
) -> None:
    """Replace the tokens of a step by tokens that are sampled with masks and temperatures, as `gumbel_sample` does.

    The noise of a token is counted by `positions + 1`, the length of its sequence.

    Args:
        logits: [sequences, vocab] of any floating type.
        settings: how each sequence is sampled.
        tokens: the step's tokens, which are overwritten.
        filled: [mask rows] int64 of `wait_for_masks`.
        outcomes: [2, mask rows] int64 of `wait_for_masks`.
    """
    mask_rows = wait_for_masks(tokens.rows, settings.tickets, tokens.positions, filled, outcomes, settings.limits_ns)
    if not use_triton(logits):
        _resample_reference(logits, settings, tokens, mask_rows)
        return
    require_contiguous_rows(logits)
    (rows, vocab), device = logits.shape, logits.device
    chunks = triton.cdiv(vocab, _CHUNK)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    _resample_kernel[(chunks, triton.cdiv(rows, _ROWS))](
        *(logits, settings.masks, mask_rows, settings.temperatures, settings.seeds, tokens.positions, scores, ids),
        *(rows, vocab, logits.stride(0)),
        ROWS=_ROWS,
        CHUNK=_CHUNK,
        WORD_BITS=WORD_BITS,
        num_warps=_WARPS,
    )
    slots, width = tokens.ring.shape
    _finish_resample_kernel[(rows,)](
        *(scores, ids, settings.temperatures, tokens.token_ids, tokens.rows, tokens.last_tokens),
        *(tokens.steps, tokens.ring, chunks),
        ring_stride=width,
        SLOTS=slots,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=_WARPS,
    )


def _resample_reference(
    logits: torch.Tensor, settings: RowSettings, tokens: StepTokens, mask_rows: torch.Tensor
) -> None:
    at = torch.nonzero(settings.temperatures >= 0)[:, 0]
    logits = logits[at]
    if bool((mask_rows[at] > 0).any()):
        mask_logits(logits, _masks_at(settings.masks, int(mask_rows.max()) + 1), mask_rows[at])
    sampled = gumbel_sample(logits, settings.temperatures[at], settings.seeds[at], tokens.positions[at] + 1)
    tokens.token_ids[at] = tokens.last_tokens[tokens.rows[at]] = sampled
    tokens.ring[(int(tokens.steps) - 1) % tokens.ring.shape[0], at.to(tokens.ring.device)] = sampled.to(
        tokens.ring.device
    )


def _masks_at(masks: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows of the masks in host memory, [rows, words] int32."""
    address, words = masks.tolist()
    return torch.frombuffer((ctypes.c_int32 * (rows * words)).from_address(address), dtype=torch.int32).view(rows, -1)


@triton.jit(do_not_specialize=["mask_rows_ptr", "temperatures_ptr", "seeds_ptr", "positions_ptr", "rows"])
def _resample_kernel(
    logits_ptr,
    masks_ptr,
    mask_rows_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    scores_ptr,
    ids_ptr,
    rows,
    vocab,
    row_stride,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WORD_BITS: tl.constexpr,
):
    """Each program finds score and id of the best allowed token of CHUNK tokens, for each of ROWS rows."""
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    token_bits = mix_uint64(token.to(tl.uint64))
    for row_index in tl.static_range(ROWS):
        row = tl.program_id(1).to(tl.int64) * ROWS + row_index
        if row < rows:
            temperature = tl.load(temperatures_ptr + row)
            if temperature >= 0:
                is_allowed = token < vocab
                mask_row = tl.load(mask_rows_ptr + row)
                if mask_row > 0:
                    words = tl.load(masks_ptr + 1)
                    mask_ptr = tl.load(masks_ptr).to(tl.pointer_type(tl.int32)) + mask_row * words
                    # Each word is read once, since PCIe carries a limited number of reads.
                    word_index = chunk * (CHUNK // WORD_BITS) + tl.arange(0, CHUNK // WORD_BITS)
                    word = tl.load(mask_ptr + word_index, mask=word_index < words, other=0)
                    bits = (word[:, None] >> tl.arange(0, WORD_BITS)[None, :]) & 1
                    is_allowed = is_allowed & (tl.reshape(bits, (CHUNK,)) != 0)
                values = tl.load(logits_ptr + row * row_stride + token, mask=is_allowed, other=float("-inf"))
                scores = token_scores(
                    values.to(tl.float32),
                    temperature,
                    tl.load(seeds_ptr + row),
                    tl.load(positions_ptr + row) + 1,
                    token_bits,
                )
                score, best = first_largest(scores, token, vocab)
                offset = row * tl.num_programs(0) + chunk
                tl.store(scores_ptr + offset, score)
                tl.store(ids_ptr + offset, best)


@triton.jit(do_not_specialize=["temperatures_ptr", "rows_ptr"])
def _finish_resample_kernel(
    scores_ptr,
    ids_ptr,
    temperatures_ptr,
    token_ids_ptr,
    rows_ptr,
    last_tokens_ptr,
    steps_ptr,
    ring_ptr,
    chunks,
    ring_stride: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Each program finds one sequence's best token among the best tokens of its chunks, and writes it."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(temperatures_ptr + index) >= 0:
        chunk = tl.arange(0, CHUNKS)
        scores = tl.load(scores_ptr + index * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        _, best_chunk = first_largest(scores, chunk, CHUNKS)
        token_id = tl.load(ids_ptr + index * chunks + best_chunk).to(tl.int64)
        tl.store(token_ids_ptr + index, token_id)
        tl.store(last_tokens_ptr + tl.load(rows_ptr + index), token_id)
        tl.store(ring_ptr + (tl.load(steps_ptr) - 1) % SLOTS * ring_stride + index, token_id)
