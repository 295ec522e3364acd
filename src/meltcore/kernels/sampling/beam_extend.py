"""Extends the beams of sentences by their best candidates, and keeps the best finished sequences.

The rules are those of `generate` in transformers. In torch they are about 80 kernels, of which each takes 1 to 7 us for
one sentence: a tenth of a decoding step of IndicTrans2 1B (H200).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

IMPOSSIBLE_SCORE = -1e9  # the score of a beam that does not exist
_BLOCK, _WARPS = 64, 4


class BeamTables(NamedTuple):
    """The state of sentences by slot. The last slot is a spare one.

    Args:
        positions: [slots] int64, the positions of the next tokens.
        is_done: [slots] bool.
        scores: [slots, beams] float32, the log-probabilities of the running beams.
        tokens: [slots, beams, length] int64, the tokens of the running beams.
        last_tokens: [slots, beams] int64.
        writers: [slots, beams, length] int8, the beam that wrote each position of a beam's prefix.
        finished_tokens: [slots, beams, length] int64.
        finished_lengths: [slots, beams] int64.
        finished_scores: [slots, beams] float32, with length penalty.
        is_finished: [slots, beams] bool, whether the finished sequence exists.
    """

    positions: torch.Tensor
    is_done: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    last_tokens: torch.Tensor
    writers: torch.Tensor
    finished_tokens: torch.Tensor
    finished_lengths: torch.Tensor
    finished_scores: torch.Tensor
    is_finished: torch.Tensor


class BeamCandidates(NamedTuple):
    """The candidates of a step, and what ends a sentence.

    Args:
        log_probs: [rows, beams, candidates] float32, the highest log-probabilities of each beam.
        tokens: [rows, beams, candidates] int64, the tokens with these log-probabilities.
        lengths: [rows] int64, lengths of the sequences with the new tokens.
        is_last: [rows] bool, True for rows that end in this step.
        factors: [rows] float32, by which the score of a sequence that ends now is divided.
        limit_factors: [rows] float32, the same of the running sequence that may still become better.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    is_last: torch.Tensor
    factors: torch.Tensor
    limit_factors: torch.Tensor


def extend_beams(
    tables: BeamTables, slots: torch.Tensor, candidates: BeamCandidates, end_token: int, *, is_early: bool
) -> torch.Tensor:
    """Select the best extensions of all beams, and finish beams that end.

    Rows that are done write to the spare slot. The kernel copies no token behind a sequence.

    Args:
        tables: the tables, changed in column, each contiguous.
        slots: [rows] int64. Only the spare slot may occur several times.
        candidates: the candidates of the rows, each tensor contiguous.
        end_token: the token that ends a sequence.
        is_early: whether a sentence ends with as many finished sequences as beams, however good its running beams are.

    Returns [rows] bool: True for rows that are done, in this step or before.
    """
    if not use_triton(tables.scores):
        return extend_beams_reference(tables, slots, candidates, end_token, is_early=is_early)
    if not all(each.is_contiguous() for each in (*tables, slots, *candidates)):
        raise ValueError("tables and candidates of beams must be contiguous")
    rows, beams, count = candidates.log_probs.shape
    is_done = torch.empty(rows, dtype=torch.bool, device=slots.device)
    if rows:
        arguments = [
            each.view(torch.uint8) if each.dtype == torch.bool else each
            for each in (slots, *tables, *candidates, is_done)
        ]
        _extend_beams_kernel[(rows,)](
            *arguments,
            *(len(tables.scores) - 1, tables.tokens.shape[2], end_token),
            BEAMS=beams,
            COUNT=count,
            BEAM_TILE=triton.next_power_of_2(beams),
            COUNT_TILE=triton.next_power_of_2(count),
            ALL_TILE=triton.next_power_of_2(beams * count),
            FINISHED_TILE=triton.next_power_of_2(beams + count),
            BLOCK=_BLOCK,
            IS_EARLY=is_early,
            IMPOSSIBLE=IMPOSSIBLE_SCORE,
            num_warps=_WARPS,
            **pdl_options(slots.device),
        )
    return is_done


def extend_beams_reference(
    tables: BeamTables, slots: torch.Tensor, candidates: BeamCandidates, end_token: int, *, is_early: bool
) -> torch.Tensor:
    """Compute `extend_beams` in PyTorch, as its specification except for the order of equal scores."""
    beams, count = candidates.log_probs.shape[1:]
    lengths, is_last = candidates.lengths, candidates.is_last
    was_done = tables.is_done[slots]
    targets = torch.where(was_done, len(tables.scores) - 1, slots)
    totals = candidates.log_probs + tables.scores[slots][..., None]
    scores, best_indices = totals.flatten(1).topk(count)
    parents = best_indices // count
    new_tokens = candidates.tokens.flatten(1).gather(1, best_indices)
    positions = (lengths - 1)[:, None, None]
    sequences = _take_beams(tables.tokens[slots], parents)
    sequences.scatter_(2, positions.expand(-1, count, 1), new_tokens[..., None])
    ends = (new_tokens == end_token) | is_last[:, None]

    kept_scores, keep = (scores + ends * IMPOSSIBLE_SCORE).topk(beams)
    finished_scores, is_finished = _finish(tables, slots, targets, candidates, scores, sequences, ends)
    tables.scores[targets] = kept_scores
    tables.tokens[targets] = _take_beams(sequences, keep)
    tables.last_tokens[targets] = new_tokens.gather(1, keep)
    beam_ids = torch.arange(beams, dtype=torch.int8, device=slots.device)[:, None]
    writers = tables.writers[slots].scatter_(2, positions.expand(-1, beams, 1), beam_ids.expand(len(slots), -1, 1))
    tables.writers[targets] = _take_beams(writers, parents.gather(1, keep))
    # Running beams are not expected to beat a finished one.
    all_finished = is_finished.all(dim=1)
    is_done = all_finished & (kept_scores[:, 0] / candidates.limit_factors <= finished_scores.amin(dim=1))
    if is_early:
        is_done |= all_finished
    is_done |= is_last
    # Not beyond the last position, which the spare slot would reach.
    tables.positions[targets] = lengths.clamp(max=tables.tokens.shape[2] - 1)
    tables.is_done[targets] = is_done
    return is_done | was_done


def _finish(
    tables: BeamTables,
    slots: torch.Tensor,
    targets: torch.Tensor,
    candidates: BeamCandidates,
    scores: torch.Tensor,
    sequences: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the best finished sequences of each row, among the earlier ones and the first candidates that end.

    Returns their scores and whether they exist, [rows, beams] each.
    """
    beams = tables.scores.shape[1]
    is_new = ends & (torch.arange(scores.shape[1], device=slots.device) < beams)
    new_scores = scores / candidates.factors[:, None] + ~is_new * IMPOSSIBLE_SCORE
    best, index = torch.cat([tables.finished_scores[slots], new_scores], dim=1).topk(beams)
    tables.finished_scores[targets] = best
    is_finished = torch.cat([tables.is_finished[slots], is_new], dim=1).gather(1, index)
    tables.is_finished[targets] = is_finished
    new_lengths = candidates.lengths[:, None].expand(-1, scores.shape[1])
    for table, new in ((tables.finished_lengths, new_lengths), (tables.finished_tokens, sequences)):
        table[targets] = _take_beams(torch.cat([table[slots], new], dim=1), index)
    return best, is_finished


def _take_beams(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select beams of `values` [rows, beams, ...] by `index` [rows, new beams]."""
    expanded = index.view(*index.shape, *[1] * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])
    return values.gather(1, expanded)


@triton.jit
def _take_best(values, ids, limit):
    """Return the largest value, the lowest of its ids, at most `limit` - 1, and the values without it."""
    best = tl.max(values, axis=0)
    chosen = tl.min(tl.where(values == best, ids, limit - 1), axis=0)
    return best, chosen, tl.where(ids == chosen, -float("inf"), values)


@triton.jit
def _pick(values, ids, index):
    """Return values[index] of `values` with these ids, for a tile of indices. Ids that do not occur give 0."""
    return tl.sum(tl.where(ids[:, None] == index[None, :], values[:, None], 0), axis=0)


@triton.jit(do_not_specialize=["spare", "length", "end_token"])
def _extend_beams_kernel(
    slots_ptr,
    positions_ptr,
    is_done_ptr,
    scores_ptr,
    tokens_ptr,
    last_tokens_ptr,
    writers_ptr,
    finished_tokens_ptr,
    finished_lengths_ptr,
    finished_scores_ptr,
    is_finished_ptr,
    log_probs_ptr,
    new_tokens_ptr,
    lengths_ptr,
    is_last_ptr,
    factors_ptr,
    limit_factors_ptr,
    output_ptr,
    spare,
    length,
    end_token,
    BEAMS: tl.constexpr,
    COUNT: tl.constexpr,
    BEAM_TILE: tl.constexpr,
    COUNT_TILE: tl.constexpr,
    ALL_TILE: tl.constexpr,
    FINISHED_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
    IMPOSSIBLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles one row."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    was_done = tl.load(is_done_ptr + slot) != 0
    target = tl.where(was_done, spare, slot)
    new_length = tl.load(lengths_ptr + row).to(tl.int32)
    is_last = tl.load(is_last_ptr + row) != 0
    beam, rank = tl.arange(0, BEAM_TILE), tl.arange(0, COUNT_TILE)

    # The best candidates of all beams
    candidate = tl.arange(0, ALL_TILE)
    is_candidate = candidate < BEAMS * COUNT
    totals = tl.load(log_probs_ptr + row * BEAMS * COUNT + candidate, mask=is_candidate, other=-float("inf"))
    totals += tl.load(scores_ptr + slot * BEAMS + candidate // COUNT, mask=is_candidate, other=0.0)
    scores = tl.full((COUNT_TILE,), -float("inf"), tl.float32)
    chosen = tl.zeros((COUNT_TILE,), tl.int32)
    for i in tl.static_range(COUNT):
        best, index, totals = _take_best(totals, candidate, BEAMS * COUNT)
        scores = tl.where(rank == i, best, scores)
        chosen = tl.where(rank == i, index, chosen)
    parents = chosen // COUNT
    new_tokens = tl.load(new_tokens_ptr + row * BEAMS * COUNT + chosen)
    ends = (new_tokens == end_token) | is_last

    # The best of them that do not end
    running = tl.where(ends, scores + IMPOSSIBLE, scores)
    kept_scores = tl.zeros((BEAM_TILE,), tl.float32)
    keep = tl.zeros((BEAM_TILE,), tl.int32)
    for i in tl.static_range(BEAMS):
        best, index, running = _take_best(running, rank, COUNT)
        kept_scores = tl.where(beam == i, best, kept_scores)
        keep = tl.where(beam == i, index, keep)
    kept_parents, kept_tokens = _pick(parents, rank, keep), _pick(new_tokens, rank, keep)

    # The best finished sequences, among the earlier ones and the first candidates that end
    is_new = ends & (rank < BEAMS)
    new_scores = scores / tl.load(factors_ptr + row) + tl.where(is_new, 0.0, IMPOSSIBLE)
    each = tl.arange(0, FINISHED_TILE)
    is_old = each < BEAMS
    old_scores = tl.load(finished_scores_ptr + slot * BEAMS + each, mask=is_old, other=-float("inf"))
    all_scores = tl.where(is_old, old_scores, _pick(tl.where(rank < COUNT, new_scores, 0.0), rank, each - BEAMS))
    all_scores = tl.where(each < BEAMS + COUNT, all_scores, -float("inf"))
    best_scores = tl.zeros((BEAM_TILE,), tl.float32)
    best_ids = tl.zeros((BEAM_TILE,), tl.int32)
    for i in tl.static_range(BEAMS):
        best, index, all_scores = _take_best(all_scores, each, BEAMS + COUNT)
        best_scores = tl.where(beam == i, best, best_scores)
        best_ids = tl.where(beam == i, index, best_ids)
    is_beam, is_old = beam < BEAMS, best_ids < BEAMS
    old = slot * BEAMS + tl.where(is_old, best_ids, 0)
    finished = tl.where(
        is_old, tl.load(is_finished_ptr + old).to(tl.int32), _pick(is_new.to(tl.int32), rank, best_ids - BEAMS)
    )
    finished_lengths = tl.where(is_old, tl.load(finished_lengths_ptr + old), new_length)
    finished_parents = _pick(parents, rank, best_ids - BEAMS)
    finished_tokens = _pick(new_tokens, rank, best_ids - BEAMS)

    # Each sequence is copied from that of its parent. Other threads read what one writes, so all of them read first.
    table = (slot * BEAMS * length).to(tl.int64)
    into = (target * BEAMS + beam[:, None]) * length
    for start in range(0, new_length, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        is_read = is_beam[:, None] & (column < new_length)
        is_end = column == new_length - 1
        from_parent = table + kept_parents[:, None] * length + column
        running_block = tl.load(tokens_ptr + from_parent, mask=is_read, other=0)
        writers_block = tl.load(writers_ptr + from_parent, mask=is_read, other=0)
        from_old = table + best_ids[:, None] * length + column
        old_block = tl.load(finished_tokens_ptr + from_old, mask=is_read & is_old[:, None], other=0)
        from_new = table + finished_parents[:, None] * length + column
        new_block = tl.load(tokens_ptr + from_new, mask=is_read & ~is_old[:, None], other=0)
        running_block = tl.where(is_end, kept_tokens[:, None], running_block)
        writers_block = tl.where(is_end, kept_parents[:, None].to(tl.int8), writers_block)
        new_block = tl.where(is_end, finished_tokens[:, None], new_block)
        tl.debug_barrier()
        tl.store(tokens_ptr + into + column, running_block, mask=is_read)
        tl.store(writers_ptr + into + column, writers_block, mask=is_read)
        tl.store(finished_tokens_ptr + into + column, tl.where(is_old[:, None], old_block, new_block), mask=is_read)
    tl.debug_barrier()
    out = target * BEAMS + beam
    tl.store(scores_ptr + out, kept_scores, mask=is_beam)
    tl.store(last_tokens_ptr + out, kept_tokens, mask=is_beam)
    tl.store(finished_scores_ptr + out, best_scores, mask=is_beam)
    tl.store(finished_lengths_ptr + out, finished_lengths, mask=is_beam)
    tl.store(is_finished_ptr + out, finished.to(tl.uint8), mask=is_beam)

    # Whether running beams are expected to beat a finished one
    all_finished = tl.min(tl.where(is_beam, finished, 1), axis=0) != 0
    worst = tl.min(tl.where(is_beam, best_scores, float("inf")), axis=0)
    top = tl.sum(tl.where(beam == 0, kept_scores, 0.0), axis=0)
    is_done = all_finished
    if not IS_EARLY:
        is_done = is_done & (top / tl.load(limit_factors_ptr + row) <= worst)
    is_done = is_done | is_last
    tl.store(is_done_ptr + target, is_done.to(tl.uint8))
    # Not beyond the last position, which the spare slot would reach
    tl.store(positions_ptr + target, tl.minimum(new_length, length - 1))
    tl.store(output_ptr + row, (is_done | was_done).to(tl.uint8))
