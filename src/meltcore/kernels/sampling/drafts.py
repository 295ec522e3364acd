"""Accepts the drafts of a speculating decode step, and proposes the next ones by n-gram lookup (prompt lookup).

A decoding sequence computes a window in a step: its newest known token, then at most k drafts. The sampler draws a
token at every position of the window. Drafts are accepted from the left as long as the drawn token equals the draft.
The drawn token after the accepted drafts is valid too, so a window yields 1 to 1 + k tokens. Such drafts have no
distribution of their own, so this is rejection sampling with exactly the distribution of the sampler (Leviathan et al.
2023, arXiv:2211.17192).

All tokens, drafts and counts are in tables on the device, so a CUDA graph can run the step without the host, and the
next step can be launched before the host has read this one (`follow_windows`).

Floor of a lookup: it reads each token of a history once. 64 histories of 32,768 tokens are 8.4 MB, which the HBM of an
H100 delivers in 2.5 us. One program reads 128 KiB in 8 blocks, and waits about 1 us for each. So about 10 us are
expected, as long as no SM has several sequences. This is not measured yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton
from meltcore.kernels.sampling.draw import mix_int64, mix_uint64

# Positions of a history that a program compares together: each thread waits for 16 tokens and not for one.
_BLOCK, _WARPS = 4096, 8
_FOLLOWING_BLOCK = 256


class DraftTables(NamedTuple):
    """The tokens and drafts of each sequence, by row. Row 0 is padding: no step changes it.

    Args:
        histories: [rows, columns] int32, all known tokens of the prompt and the answer. A row has a column for the
            token after the last position of the model.
        lengths: [rows] int64, the number of known tokens.
        drafts: [rows, k] int64, the drafts of the next window. Entries that are no draft are -1.
        num_drafts: [rows] int64.
        last_tokens: [rows] int64, the last known token.
    """

    histories: torch.Tensor
    lengths: torch.Tensor
    drafts: torch.Tensor
    num_drafts: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, max_model_len: int, num_speculative_tokens: int, device: torch.device) -> DraftTables:
        """Allocate tables of empty sequences. A history is not written before a sequence starts in its row."""
        return cls(
            torch.empty(rows, max_model_len + 1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows, num_speculative_tokens), -1, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )


class NgramSizes(NamedTuple):
    """The most and the fewest tokens of an n-gram that is looked up: `prompt_lookup_max` and `prompt_lookup_min`."""

    longest: int
    shortest: int


class SyntheticAcceptance(NamedTuple):
    """Accepts drafts at random, for measurements with dummy weights, whose drafts would always be rejected.

    Args:
        probabilities: [k] float32. Each is the probability that a draft is accepted if all before it are.
        seed: the first part of the counter of the random numbers.
    """

    probabilities: torch.Tensor
    seed: int

    @classmethod
    def of_length(
        cls, acceptance_length: float, num_speculative_tokens: int, seed: int, device: torch.device
    ) -> SyntheticAcceptance:
        """Return the acceptance with which a window of k drafts yields `acceptance_length` tokens on average."""
        probability = acceptance_probability(acceptance_length, num_speculative_tokens)
        return cls(torch.full((num_speculative_tokens,), probability, dtype=torch.float32, device=device), seed)


def acceptance_probability(acceptance_length: float, num_speculative_tokens: int) -> float:
    """Return the probability a of each draft with 1 + a + a^2 + ... + a^k = `acceptance_length`, where k drafts run.

    Raises ValueError for a length that k drafts cannot yield.
    """
    most = 1 + num_speculative_tokens
    if not 1 <= acceptance_length <= most:
        raise ValueError(
            f"synthetic_acceptance_length {acceptance_length}: a step with {num_speculative_tokens} drafts yields 1 to "
            f"{most} tokens"
        )
    low, high = 0.0, 1.0
    for _ in range(53):  # the bits of a float's fraction
        middle = (low + high) / 2
        is_low = sum(middle**power for power in range(most)) < acceptance_length
        low, high = (middle, high) if is_low else (low, middle)
    return low


def start_histories(
    tables: DraftTables, rows: torch.Tensor, first_tokens: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """Write all known tokens of sequences that start or restart. Their rows have no drafts then.

    Args:
        tables: which get the tokens.
        rows: [sequences] int64.
        first_tokens: [sequences + 1] int64, the index of each sequence's first token, then the number of tokens.
        token_ids: [tokens] int64.
    """
    lengths, device = first_tokens.diff(), token_ids.device
    token_rows, starts = (
        # Without its size torch would wait for the device.
        torch.repeat_interleave(values, lengths, output_size=len(token_ids))
        for values in (rows, first_tokens[:-1])
    )
    columns = torch.arange(len(token_ids), device=device) - starts
    tables.histories[token_rows, columns] = token_ids.to(torch.int32)
    start_lengths(tables, rows, lengths)


def start_lengths(tables: DraftTables, rows: torch.Tensor, lengths: torch.Tensor) -> None:
    """Set the number of known tokens of sequences that start or restart. Their rows have no drafts then.

    That suffices for drafts that are not looked up. rows, lengths: [sequences] int64.
    """
    tables.lengths[rows] = lengths
    tables.drafts.index_fill_(0, rows, -1)
    tables.num_drafts.index_fill_(0, rows, 0)


def accept_and_propose(
    tables: DraftTables,
    rows: torch.Tensor,
    first_tokens: torch.Tensor,
    sampled_ids: torch.Tensor,
    max_drafts: torch.Tensor,
    lookup: NgramSizes | None,
    synthetic: SyntheticAcceptance | None = None,
) -> torch.Tensor:
    """Accept drafts of a step's windows, append the accepted tokens to their histories, and propose the next drafts.

    A window of d + 1 tokens has verified the first d drafts of its row, or all if it has fewer. The drafts that are
    proposed followed an earlier occurrence of the n-gram at the end of the history. Of the longest n-gram that occurs,
    the latest occurrence counts: text repeats what is near, such as the last version of a line that is being edited.
    When the tokens up to the end are fewer than the drafts, they repeat, so a text of period p is continued with the
    same period.

    Args:
        tables: updated. Each row but row 0 occurs in at most one window.
        rows: [sequences] int64. A sequence of row 0 is padding.
        first_tokens: [sequences + 1] int64, the index of each window's first sampled token, then the number of tokens.
            A window has 1 to 1 + k tokens.
        sampled_ids: [tokens] int64, the tokens drawn at the positions of all windows.
        max_drafts: [sequences] int64, the most drafts that each sequence may get. Drafts whose window would not fit
            into the history are left out anyway.
        lookup: None proposes no drafts.
        synthetic: None accepts drafts by comparison. Otherwise drafts are accepted at random, and the tokens drawn at
            their positions are appended. A lookup without a result then proposes the last token.

    Returns [sequences, 2 + k] int64: the number of tokens that each window yields, the number of its next drafts, and
    these drafts, with -1 after the last one. Of padding both numbers are 0.
    """
    if not use_triton(sampled_ids):
        return accept_and_propose_reference(tables, rows, first_tokens, sampled_ids, max_drafts, lookup, synthetic)
    (sequences,), k = rows.shape, tables.drafts.shape[1]
    outcomes = torch.empty(sequences, 2 + k, dtype=torch.int64, device=rows.device)
    if sequences == 0:
        return outcomes
    longest, shortest = (0, 0) if lookup is None else lookup
    probabilities, seed = (tables.lengths, 0) if synthetic is None else synthetic
    _accept_and_propose_kernel[(sequences,)](
        *(*tables, rows, first_tokens, sampled_ids, max_drafts, probabilities, outcomes),
        *(tables.histories.shape[1], seed),
        K=k,
        WINDOW=triton.next_power_of_2(1 + k),
        SYNTHETIC=synthetic is not None,
        LONGEST=longest,
        SHORTEST=shortest,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return outcomes


def follow_windows(
    tables: DraftTables,
    is_following: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """Write to the inputs of a step of windows what the host does not know, if it follows a step in flight.

    Each window computes the last known token of its row and then its drafts. A missing draft is replaced by the token
    0, and is not accepted. Row 0 is padding, whose inputs do not change. All arguments are int64.

    Args:
        tables: what the step in flight leaves.
        is_following: [1]. If it is 0, nothing changes.
        token_ids: [tokens]. They become drafts, and -1 for the last known token of a row (`DraftTables.last_tokens`).
        positions: [tokens], in windows. They become positions in sequences.
        token_rows: [tokens].
        rows: [sequences].
        context_lens: [sequences]. 0 becomes the position of the window's first token.
        tiles: [2 * tiles], query tiles of four int32 each. The last one is treated as `context_lens`.
    """
    if not use_triton(token_ids):
        follow_windows_reference(tables, is_following, token_ids, positions, token_rows, rows, context_lens, tiles)
        return
    counts = len(token_ids), len(rows), len(tiles) // 2
    _follow_windows_kernel[(triton.cdiv(max(counts), _FOLLOWING_BLOCK),)](
        *(is_following, token_ids, positions, token_rows, rows, context_lens, tiles, tables.lengths, tables.drafts),
        *counts,
        K=tables.drafts.shape[1],
        BLOCK=_FOLLOWING_BLOCK,
    )


def follow_windows_reference(
    tables: DraftTables,
    is_following: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
) -> None:
    """Compute `follow_windows` in PyTorch, as its specification."""
    if not int(is_following):
        return
    starts, is_token = tables.lengths - 1, token_rows > 0
    used_rows, offsets = token_rows[is_token], positions[is_token]
    drafts = tables.drafts[used_rows, (offsets - 1).clamp(min=0)].clamp(min=0)
    token_ids[is_token] = torch.where(offsets == 0, -1, drafts)
    positions[is_token] = offsets + starts[used_rows]
    context_lens[rows > 0] = starts[rows[rows > 0]]
    tile_fields = tiles.view(torch.int32).view(-1, 4)
    tile_rows = tile_fields[:, 0].long()
    tile_fields[tile_rows > 0, 3] += starts[tile_rows[tile_rows > 0]].to(torch.int32)


def accept_and_propose_reference(
    tables: DraftTables,
    rows: torch.Tensor,
    first_tokens: torch.Tensor,
    sampled_ids: torch.Tensor,
    max_drafts: torch.Tensor,
    lookup: NgramSizes | None,
    synthetic: SyntheticAcceptance | None = None,
) -> torch.Tensor:
    """Compute `accept_and_propose` in PyTorch, as its specification."""
    (_, columns), k = tables.histories.shape, tables.drafts.shape[1]
    chances = None if synthetic is None else _random_acceptance(tables.lengths[rows], rows, synthetic).tolist()
    bounds, sampled, outcomes = first_tokens.tolist(), sampled_ids.tolist(), []
    drafts = [
        each[:count] for each, count in zip(tables.drafts[rows].tolist(), tables.num_drafts[rows].tolist(), strict=True)
    ]
    for index, (row, most) in enumerate(zip(rows.tolist(), max_drafts.tolist(), strict=True)):
        window = sampled[bounds[index] : bounds[index + 1]] if row else []
        is_equal = [token == draft for token, draft in zip(window[:-1], drafts[index], strict=False)]
        is_accepted = [*(is_equal if chances is None else chances[index][: len(is_equal)]), False]
        tokens = window[: is_accepted.index(False) + 1]
        start = int(tables.lengths[row])
        length = start + len(tokens)
        fitting = torch.tensor(tokens[: max(0, columns - start)], dtype=torch.int32)
        tables.histories[row, start : start + len(fitting)] = fitting.to(rows.device)
        tables.lengths[row] = length
        if tokens:
            tables.last_tokens[row] = tokens[-1]
        limit = max(0, min(most, k, columns - 1 - length)) if window else 0
        proposal: list[int] = []
        if lookup is not None and limit:
            proposal = _propose(tables.histories[row, :length], limit, lookup, is_forced=synthetic is not None)
        outcomes.append([len(tokens), len(proposal), *proposal, *[-1] * (k - len(proposal))])
    result = torch.tensor(outcomes, dtype=torch.int64, device=rows.device).view(len(rows), 2 + k)
    tables.num_drafts[rows], tables.drafts[rows] = result[:, 1], result[:, 2:]
    return result


def _propose(history: torch.Tensor, limit: int, lookup: NgramSizes, *, is_forced: bool) -> list[int]:
    """Return `limit` drafts, or none if the lookup finds nothing and drafts are not forced."""
    length = len(history)
    # Entry j is about the tokens that end with token j: whether they equal the end of the history, and how many do.
    is_match = torch.ones(length - 1, dtype=torch.bool, device=history.device)
    num_equal = torch.zeros(length - 1, dtype=torch.int64, device=history.device)
    for back in range(min(lookup.longest, length - 1)):
        is_match[:back] = False
        is_match[back:] &= history[: length - 1 - back] == history[length - 1 - back]
        num_equal += is_match
    longest = int(num_equal.max()) if length > 1 else 0
    if longest < lookup.shortest and not is_forced:
        return []
    is_found = longest >= lookup.shortest
    end = int(torch.nonzero(num_equal == longest)[-1]) + 1 if is_found else length - 1
    followers = history[end : end + limit].tolist()
    return [followers[index % len(followers)] for index in range(limit)]


def _random_acceptance(lengths: torch.Tensor, rows: torch.Tensor, synthetic: SyntheticAcceptance) -> torch.Tensor:
    """Return whether each draft after sequences of these lengths is accepted, [sequences, k] bool."""
    positions = lengths[:, None] + torch.arange(len(synthetic.probabilities), device=rows.device)
    bits = mix_int64(mix_int64(mix_int64(rows.new_tensor(synthetic.seed)) + rows)[:, None] + positions)
    uniform = ((bits >> 41) & (2**23 - 1)).float() * 2.0**-23
    return uniform < synthetic.probabilities


@triton.jit
def _latest_ngram_end(history_ptr, length, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of the token after the latest longest n-gram that equals the end of a history, or 0.

    length: the number of tokens. At 0 nothing is read.
    """
    best = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in tl.range(1, length, BLOCK):
        end = start + tl.arange(0, BLOCK)
        is_match = end < length
        num_equal = tl.zeros((BLOCK,), dtype=tl.int32)
        for back in tl.static_range(LONGEST):
            # Few positions match the last token, so the others load nothing more.
            is_match = is_match & (end > back)
            last_token = tl.load(history_ptr + length - 1 - back, mask=length > back, other=-1)
            is_match = is_match & (tl.load(history_ptr + end - 1 - back, mask=is_match, other=-2) == last_token)
            num_equal += is_match.to(tl.int32)
        best = tl.maximum(best, tl.where(num_equal >= SHORTEST, (num_equal.to(tl.int64) << 32) + end, 0))
    return tl.max(best, axis=0) & 0xFFFFFFFF


# Inputs of a step are slices at any alignment: specialized on it, each would be compiled anew.
@triton.jit(do_not_specialize=["rows_ptr", "first_tokens_ptr", "sampled_ids_ptr", "max_drafts_ptr", "seed"])
def _accept_and_propose_kernel(
    histories_ptr,
    lengths_ptr,
    drafts_ptr,
    num_drafts_ptr,
    last_tokens_ptr,
    rows_ptr,
    first_tokens_ptr,
    sampled_ids_ptr,
    max_drafts_ptr,
    probabilities_ptr,
    outcomes_ptr,
    columns,
    seed,
    K: tl.constexpr,
    WINDOW: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one sequence. Padding has a window without tokens, and writes what its row has already."""
    sequence, entry = tl.program_id(0).to(tl.int64), tl.arange(0, WINDOW)
    row = tl.load(rows_ptr + sequence)
    first = tl.load(first_tokens_ptr + sequence)
    size = tl.where(row > 0, tl.load(first_tokens_ptr + sequence + 1) - first, 0)
    sampled = tl.load(sampled_ids_ptr + first + entry, mask=entry < size, other=0)
    old_length = tl.load(lengths_ptr + row)
    is_accepted = entry < tl.minimum(size - 1, tl.load(num_drafts_ptr + row))
    draft_ptrs = drafts_ptr + row * K + entry
    if SYNTHETIC:
        row_bits = mix_uint64(mix_uint64(seed.to(tl.uint64)) + row.to(tl.uint64))
        bits = mix_uint64(row_bits + (old_length + entry).to(tl.uint64))
        uniform = (bits >> 41).to(tl.int32).to(tl.float32) * (1.0 / (1 << 23))
        is_accepted = is_accepted & (uniform < tl.load(probabilities_ptr + entry, mask=entry < K, other=0.0))
    else:
        is_accepted = is_accepted & (tl.load(draft_ptrs, mask=is_accepted, other=-1) == sampled)
    num_accepted = tl.min(tl.where(is_accepted, WINDOW, entry), axis=0)
    num_tokens = tl.minimum(num_accepted + 1, size)
    tl.store(last_tokens_ptr + row + 0 * entry, sampled, mask=entry == num_tokens - 1)
    history_ptr, column = histories_ptr + row * columns, old_length + entry
    tl.store(history_ptr + column, sampled.to(tl.int32), mask=(entry < num_tokens) & (column < columns))
    tl.debug_barrier()  # every thread has read the tables, and sees the tokens that others have appended

    length = old_length + num_tokens
    limit = tl.minimum(tl.minimum(tl.load(max_drafts_ptr + sequence), K), columns - 1 - length)
    limit = tl.where(size > 0, tl.maximum(limit, 0), 0)
    if LONGEST > 0:
        searched = tl.where(limit > 0, length, 0).to(tl.int32)
        end = _latest_ngram_end(history_ptr, searched, LONGEST, SHORTEST, BLOCK)
        if SYNTHETIC:
            num_drafts = limit
            end = tl.where(end > 0, end, length - 1)
        else:
            num_drafts = tl.where(end > 0, limit, 0)
        source = end + entry % tl.maximum(length - end, 1)
    else:
        num_drafts, source = limit * 0, column
    drafts = tl.load(history_ptr + source, mask=entry < num_drafts, other=-1).to(tl.int64)
    tl.store(lengths_ptr + row, length)
    tl.store(num_drafts_ptr + row, num_drafts)
    tl.store(draft_ptrs, drafts, mask=entry < K)
    outcome_ptr = outcomes_ptr + sequence * (2 + K)
    tl.store(outcome_ptr, num_tokens)
    tl.store(outcome_ptr + 1, num_drafts)
    tl.store(outcome_ptr + 2 + entry, drafts, mask=entry < K)


@triton.jit(
    do_not_specialize=[
        *("is_following_ptr", "token_ids_ptr", "positions_ptr", "token_rows_ptr", "rows_ptr", "context_lens_ptr"),
        *("tiles_ptr", "tokens", "sequences", "tiles"),
    ]
)
def _follow_windows_kernel(
    is_following_ptr,
    token_ids_ptr,
    positions_ptr,
    token_rows_ptr,
    rows_ptr,
    context_lens_ptr,
    tiles_ptr,
    lengths_ptr,
    drafts_ptr,
    tokens,
    sequences,
    tiles,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a block of tokens, sequences and tiles."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_following = tl.load(is_following_ptr) != 0
    row = tl.load(token_rows_ptr + index, mask=is_following & (index < tokens), other=0)
    is_used = row > 0
    offset = tl.load(positions_ptr + index, mask=is_used, other=0)
    draft = tl.load(drafts_ptr + row * K + offset - 1, mask=is_used & (offset > 0), other=0)
    tl.store(token_ids_ptr + index, tl.where(offset == 0, -1, tl.maximum(draft, 0)), mask=is_used)
    tl.store(positions_ptr + index, offset + tl.load(lengths_ptr + row, mask=is_used) - 1, mask=is_used)

    row = tl.load(rows_ptr + index, mask=is_following & (index < sequences), other=0)
    tl.store(context_lens_ptr + index, tl.load(lengths_ptr + row, mask=row > 0) - 1, mask=row > 0)

    # A tile is four int32: row, first token, number of tokens, and start.
    tile_ptr = tiles_ptr.to(tl.pointer_type(tl.int32)) + 4 * index
    row = tl.load(tile_ptr, mask=is_following & (index < tiles), other=0).to(tl.int64)
    start = tl.load(tile_ptr + 3, mask=row > 0, other=0)
    tl.store(tile_ptr + 3, start + tl.load(lengths_ptr + row, mask=row > 0).to(tl.int32) - 1, mask=row > 0)
