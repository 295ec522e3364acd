"""All-reduce in stages of one launch each, for messages of prompt steps, whose transfer time exceeds their latency.

Tiles of rows belong to the ranks in turn. A rank sends its tiles to their owners. An owner sums a tile over all ranks,
adds the residual and sends the rounded sum to all ranks. Every rank stores all sums and their norms. Between two
stages, a launch of one program tells the other ranks that this rank's data has arrived, and waits for their data. No
other program waits. With hundreds of polling programs, some graphs took 10 ms instead of 0.1 ms
(docs/decisions/all-reduce.md, row 8).

A buffer (buffer_sizes.py) holds one message of rows and one of sums. Both parts are free when they are written. A rank
that sends rows has received all sums of the previous message, so all rows of that message have been read. A rank that
sends sums has received rows from all ranks, which had read all sums of the previous message. Longer messages are cut
into several.

The previous operation is fused as in all_reduce.py: a row may be the weighted sum over a token's experts. The
specification is the same, `all_reduce_rms_norm_reference`.
"""

from __future__ import annotations

import torch

from meltcore.kernels.comm.buffer_sizes import COUNTER_WORDS, MESSAGE_WORDS, chunk_words
from meltcore.kernels.comm.symmetric_memory import POLLS, SymmetricMemory
from meltcore.kernels.comm.words import (
    ALIGNMENT_BYTES,
    as_words,
    norm_weights,
    normalize,
    pack,
    partial_sum_words,
    row_words,
    triton_dtype,
    unpack,
)
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync
from meltcore.kernels.norm import Norm

_TILE_WORDS, _WORDS_PER_THREAD = 2048, 8  # 16 bytes twice per thread
_MAX_ROW_WORDS, _MAX_WARPS = 8192, 16  # a program has a whole row in its registers


def can_stage(partial_sum: torch.Tensor) -> bool:
    """Return whether `staged_all_reduce_rms_norm` supports partial sums [rows, size] of this size and layout."""
    is_aligned = partial_sum.shape[1] * partial_sum.element_size() % ALIGNMENT_BYTES == 0
    return is_aligned and row_words(partial_sum) <= _MAX_ROW_WORDS and partial_sum.is_contiguous()


def staged_all_reduce_rms_norm(
    partial_sum: torch.Tensor,
    memory: SymmetricMemory,
    norm: Norm,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return total = the sum of all ranks' partial sums, plus `residual` if it is given, and norm(total).

    All ranks must call this together. The total replaces `residual` if it is given, else `partial_sum`.

    Args:
        partial_sum: [rows, size], see `can_stage`.
        memory: the group's symmetric memory.
        norm: the norm that is applied to the total.
        residual: [rows, size] of the same dtype.
    """
    output = partial_sum if residual is None else residual
    normalized = _reduce(partial_sum, None, memory, output, norm, has_residual=residual is not None)
    return output, normalized


def staged_combine_all_reduce_rms_norm(
    outputs: torch.Tensor,
    memory: SymmetricMemory,
    topk_weights: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `staged_all_reduce_rms_norm` of the rounded weighted sum of each token's expert outputs.

    Args:
        outputs: [tokens * top_k, size], contiguous.
        memory: the group's symmetric memory.
        topk_weights: [tokens, top_k] float32.
        norm: the norm of the result.
        residual: [tokens, size] of the dtype of `outputs`, see `can_stage`.
    """
    return residual, _reduce(outputs, topk_weights, memory, residual, norm, has_residual=True)


@triton.jit
def _rows(
    pointers_ptr,
    owner,
    sender,
    index,
    rows,
    FIRST_ROW: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return a pointer to the slot for the tile number `index` of those that `sender` sends to `owner`.

    rows: of the whole message. FIRST_ROW: the first word of rows in a buffer. TILE: words per tile. ROWS: rows per
    tile.
    """
    buffer = tl.multiple_of(tl.load(pointers_ptr + owner).to(tl.pointer_type(tl.int32)), 16)
    tiles = tl.cdiv(tl.cdiv(rows, ROWS), RANKS)  # per rank
    return buffer + FIRST_ROW + (sender * tiles + index) * TILE


@triton.jit
def _sums(pointers_ptr, owner, tile, FIRST_SUM: tl.constexpr, TILE: tl.constexpr):
    """Return a pointer to the slot for the sum of a tile in a rank's buffer. FIRST_SUM: the first word of sums."""
    buffer = tl.multiple_of(tl.load(pointers_ptr + owner).to(tl.pointer_type(tl.int32)), 16)
    return buffer + FIRST_SUM + tile * TILE


@triton.jit
def _tile(tile, ROW: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows of a tile [ROWS, 1], its columns, its words within a slot, and which are words of a row."""
    row = (tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    return row, column, tl.arange(0, ROWS)[:, None] * ROW + column, column < ROW


@triton.jit(do_not_specialize=["rows"])
def _all_reduce_send_kernel(
    values_ptr,
    topk_weights_ptr,
    pointers_ptr,
    rows,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program sends one tile of ROWS rows, each of ROW words, to the rank that owns it.

    TOP_K: experts whose weighted sum is a row, or 0.
    """
    pdl_sync(PDL)
    program = tl.program_id(0)
    owner = (RANK + 1 + program % (RANKS - 1)) % RANKS  # no two ranks begin with the same
    tile = program // (RANKS - 1) * RANKS + owner
    if tile * ROWS < rows:
        row, column, word, in_row = _tile(tile, ROW, BLOCK, ROWS)
        row = tl.minimum(row, rows - 1)
        words = partial_sum_words(values_ptr, topk_weights_ptr, row, column, in_row, DTYPE, TOP_K, ROW)
        slot = _rows(pointers_ptr, owner, RANK, tile // RANKS, rows, FIRST_ROW, ROW * ROWS, ROWS, RANKS)
        tl.store(slot + word, words, mask=in_row)


@triton.jit(do_not_specialize=["rows"])
def _all_reduce_sum_kernel(
    values_ptr,
    topk_weights_ptr,
    residual_ptr,
    pointers_ptr,
    rows,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    FIRST_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program sums one of this rank's tiles over all ranks, adds the residual and sends the sum to all ranks."""
    pdl_sync(PDL)
    tile = tl.program_id(0) * RANKS + RANK
    row, column, word, in_row = _tile(tile, ROW, BLOCK, ROWS)
    row = tl.minimum(row, rows - 1)
    low, high = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            words = partial_sum_words(values_ptr, topk_weights_ptr, row, column, in_row, DTYPE, TOP_K, ROW)
        else:
            slot = _rows(pointers_ptr, RANK, rank, tl.program_id(0), rows, FIRST_ROW, ROW * ROWS, ROWS, RANKS)
            words = tl.load(slot + word, mask=in_row, other=0, cache_modifier=".cg")
        low_values, high_values = unpack(words, DTYPE)
        low += low_values
        high += high_values
    if HAS_RESIDUAL:
        low_values, high_values = unpack(tl.load(residual_ptr + row * ROW + column, mask=in_row, other=0), DTYPE)
        low += low_values
        high += high_values
    total = pack(low, high, DTYPE)
    for step in tl.static_range(RANKS):
        slot = _sums(pointers_ptr, (RANK + step) % RANKS, tile, FIRST_SUM, ROW * ROWS)
        tl.store(slot + word, total, mask=in_row)


@triton.jit(do_not_specialize=["rows"])
def _all_reduce_store_kernel(
    output_ptr,
    normalized_ptr,
    weight_ptr,
    pointers_ptr,
    rows,
    eps,
    DTYPE: tl.constexpr,
    PER_WORD: tl.constexpr,
    RANK: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program stores the sums of a tile and their norms, this rank's own tiles too: all ranks have the same bits.

    PER_WORD: floats per word.
    """
    pdl_sync(PDL)
    tile = tl.program_id(0)
    row, column, word, in_row = _tile(tile, ROW, BLOCK, ROWS)
    low_weight, high_weight = norm_weights(weight_ptr, column, PER_WORD, ROW)
    total = tl.load(
        _sums(pointers_ptr, RANK, tile, FIRST_SUM, ROW * ROWS) + word,
        mask=in_row,
        other=0,
        cache_modifier=".cg",
    )
    offset, mask = row * ROW + column, in_row & (row < rows)
    tl.store(output_ptr + offset, total, mask=mask)
    normalized = normalize(total, low_weight, high_weight, weight_ptr, eps, DTYPE, PER_WORD, ROW)
    tl.store(normalized_ptr + offset, normalized, mask=mask)


@triton.jit
def _all_reduce_exchange_kernel(
    pointers_ptr,
    messages_ptr,
    STAGE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    COUNTERS: tl.constexpr,
    POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add 1 to a counter of every other rank, after what earlier kernels stored, and wait for theirs. For one program.

    STAGE: 0 after rows, or 1 after sums. COUNTERS: the first word of the counters.
    """
    pdl_sync(PDL)
    counter: tl.constexpr = COUNTERS // 2 + 2 * STAGE  # in int64
    rank = tl.arange(0, RANKS)
    buffers = tl.load(pointers_ptr + rank).to(tl.pointer_type(tl.int64))
    tl.atomic_add(buffers + counter, tl.full((RANKS,), 1, tl.int64), mask=rank != RANK, sem="release", scope="sys")
    abort_flag = tl.load(pointers_ptr + RANKS).to(tl.pointer_type(tl.int32))
    buffer = tl.load(pointers_ptr + RANK).to(tl.pointer_type(tl.int64))
    message = tl.load(messages_ptr + STAGE) + 1
    expected = (RANKS - 1) * message - 1  # every byte of a buffer is EMPTY_BYTE at start: -1
    count = tl.atomic_add(buffer + counter, 0, sem="acquire", scope="sys")
    aborted = tl.full((), 0, tl.int32)
    polls = 0
    while (count < expected) & (aborted == 0):
        count = tl.atomic_add(buffer + counter, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS == 0:
            aborted = tl.load(abort_flag, volatile=True)
    tl.store(messages_ptr + STAGE, message)


def _reduce(
    values: torch.Tensor,
    topk_weights: torch.Tensor | None,
    memory: SymmetricMemory,
    output: torch.Tensor,
    norm: Norm,
    *,
    has_residual: bool,
) -> torch.Tensor:
    """Reduce messages that fit into the buffers, one after another. Returns the norm of `output`."""
    normalized = torch.empty_like(output)
    top_k = 0 if topk_weights is None else topk_weights.shape[1]
    num_rows = rows_per_message(row_words(output), memory.ranks)
    for first in range(0, len(output), num_rows):
        part = slice(first, min(first + num_rows, len(output)))
        part_values = values[part] if topk_weights is None else values[part.start * top_k : part.stop * top_k]
        part_weights = None if topk_weights is None else topk_weights[part]
        _launch(part_values, part_weights, memory, output[part], normalized[part], norm, has_residual=has_residual)
    return normalized


def rows_per_message(row: int, ranks: int) -> int:
    """Return the number of rows of `row` words that one message may have."""
    _, tile_rows = _tile_size(row)
    tiles = MESSAGE_WORDS // (row * tile_rows) // ranks * ranks
    return tiles * tile_rows


def _tile_size(row: int) -> tuple[int, int]:
    """Return the columns and rows of a tile. A row has `row` words."""
    block = int(triton.next_power_of_2(row))
    return block, max(1, _TILE_WORDS // block)


def _launch(
    values: torch.Tensor,
    topk_weights: torch.Tensor | None,
    memory: SymmetricMemory,
    output: torch.Tensor,
    normalized: torch.Tensor,
    norm: Norm,
    *,
    has_residual: bool,
) -> None:
    rows, row, ranks = len(output), row_words(output), memory.ranks
    block, tile_rows = _tile_size(row)
    tiles = triton.cdiv(rows, tile_rows) if memory.has_messages else 0  # a launch of no programs only compiles
    tiles_per_rank, owned_tiles = triton.cdiv(tiles, ranks), max(0, triton.cdiv(tiles - memory.rank, ranks))
    words = as_words(output)
    inputs = (as_words(values), words if topk_weights is None else topk_weights)
    top_k = 0 if topk_weights is None else topk_weights.shape[1]
    tile = {"ROW": row, "BLOCK": block, "ROWS": tile_rows, "DTYPE": triton_dtype(output), "RANK": memory.rank}
    tile["num_warps"] = min(_MAX_WARPS, max(1, tile_rows * block // (32 * _WORDS_PER_THREAD)))
    tile |= pdl_options(output.device)
    group = {"RANKS": ranks, "FIRST_ROW": chunk_words(ranks) + COUNTER_WORDS}
    first_sum = group["FIRST_ROW"] + MESSAGE_WORDS
    _all_reduce_send_kernel[(tiles_per_rank * (ranks - 1),)](
        *inputs, memory.pointers, rows, TOP_K=top_k, **group, **tile
    )
    _exchange(0, memory)
    _all_reduce_sum_kernel[(owned_tiles,)](
        *inputs,
        words,
        memory.pointers,
        rows,
        TOP_K=top_k,
        HAS_RESIDUAL=has_residual,
        FIRST_SUM=first_sum,
        **group,
        **tile,
    )
    _exchange(1, memory)
    _all_reduce_store_kernel[(tiles,)](
        words,
        as_words(normalized),
        norm.weight,
        memory.pointers,
        rows,
        norm.eps,
        PER_WORD=4 // output.element_size(),
        FIRST_SUM=first_sum,
        **tile,
    )


def _exchange(stage: int, memory: SymmetricMemory) -> None:
    """Report that this rank's rows (stage 0) or sums (stage 1) have arrived. Wait for the other ranks' reports."""
    _all_reduce_exchange_kernel[(int(memory.has_messages),)](
        memory.pointers,
        memory.messages,
        STAGE=stage,
        RANK=memory.rank,
        RANKS=memory.ranks,
        COUNTERS=chunk_words(memory.ranks),
        POLLS=POLLS,
        num_warps=1,
        **pdl_options(memory.pointers.device),
    )
