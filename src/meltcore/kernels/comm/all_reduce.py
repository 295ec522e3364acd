"""All-reduce in one launch, for messages whose latency exceeds their transfer time.

Words pass through symmetric memory (comm/symmetric_memory.py). In one shot, a rank writes its values to all others,
waits for their values, and sums them. This is one trip over the link. In two shots, every rank receives one slice of
each row from all others, sums it, and sends the sum to all. These are two trips, and with 8 ranks a quarter of the
words. Both methods give every rank the same bits, since all ranks sum in the same order (one shot), or one rank
computes a sum for all ranks (two shots).

The next operations of a layer are fused: a program adds the sum of a row to the residual stream and normalizes the row.
The previous operation is fused too: a token's partial sum may be the weighted sum over its experts.

The specification is `all_reduce_reference`, then `rms_norm`. Without symmetric memory torch.distributed does the same.
"""

from __future__ import annotations

import torch

from meltcore.kernels.comm.buffer_sizes import CHUNK, CHUNKS
from meltcore.kernels.comm.symmetric_memory import (
    ALL_PHASES,
    CHUNK_WARPS,
    POLLS,
    Phases,
    SymmetricMemory,
    avoid_empty,
    receive,
    send,
    send_to_all,
    slot_pointers,
    wait_for,
)
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
from meltcore.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait
from meltcore.kernels.norm import Norm, rms_norm

# Chunks of a normalized row, and chunks that its program waits for: more would not fit into its registers.
_MAX_ROW_CHUNKS, _MAX_AWAITED_CHUNKS = 8, 32
_MAX_WARPS = 16
_MAX_PROGRAMS = 256
# More programs than this poll with a pause. Where 256 and more polled without one, 1 MiB took 0.7 to 0.9 ms in some
# graphs and 8 us in others (two H200s): as long as it takes until all of them read the abort flag, when for a moment
# none polls. Data from the link seems to wait for that. With the pause: 8.2 and 8.8 us.
_MAX_PROGRAMS_WITHOUT_BACKOFF, _BACKOFF_NS = 128, 200
MAX_BYTES = CHUNKS * CHUNK * 4  # of a message to sum
MAX_INT64 = CHUNKS * CHUNK // 4  # numbers of a message to take the maximum of
# Bytes that two-shot must save a rank. On four H200s the second trip takes 2 us and more: 512 KiB, of which it would
# save 768, are faster in one shot, 1 MiB in two.
_TWO_SHOT_SAVES_BYTES = 1152 * 1024


def can_all_reduce(values: torch.Tensor) -> bool:
    """Return whether `all_reduce` supports a tensor of this size and layout."""
    message_bytes = values.numel() * values.element_size()
    return message_bytes <= MAX_BYTES and message_bytes % ALIGNMENT_BYTES == 0 and values.is_contiguous()


def can_fuse_norm(partial_sum: torch.Tensor, ranks: int) -> bool:
    """Return whether `all_reduce_rms_norm` supports partial sums [rows, size] of this size and layout."""
    num_chunks = _num_chunks(row_words(partial_sum))
    fits_registers = num_chunks <= _MAX_ROW_CHUNKS and num_chunks * ranks <= _MAX_AWAITED_CHUNKS
    is_aligned = partial_sum.shape[1] * partial_sum.element_size() % ALIGNMENT_BYTES == 0
    return fits_registers and is_aligned and len(partial_sum) * num_chunks <= CHUNKS and can_all_reduce(partial_sum)


def all_reduce_reference(partial_sums: list[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `all_reduce`, as its specification: sum in float32 in rank order, add `residual`, round once."""
    total = torch.stack([partial_sum.float() for partial_sum in partial_sums]).sum(0)
    return (total if residual is None else residual.float() + total).to(partial_sums[0].dtype)


def all_reduce_rms_norm_reference(
    partial_sums: list[torch.Tensor], norm: Norm, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded sum and its `rms_norm`, as the specification of `all_reduce_rms_norm`."""
    total = all_reduce_reference(partial_sums, residual)
    return total, rms_norm(total, *norm)


@triton.jit
def _reduce(received, residual, DTYPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Sum the words over their first dimension and add `residual` if HAS_RESIDUAL."""
    low_values, high_values = unpack(received, DTYPE)
    low, high = tl.sum(low_values, axis=0), tl.sum(high_values, axis=0)
    if HAS_RESIDUAL:
        low_residual, high_residual = unpack(residual, DTYPE)
        low += low_residual
        high += high_residual
    return pack(low, high, DTYPE)


@triton.jit(do_not_specialize=["words"])
def _all_reduce_kernel(
    values_ptr,
    topk_weights_ptr,
    output_ptr,
    normalized_ptr,
    weight_ptr,
    pointers_ptr,
    steps_ptr,
    words,
    eps,
    DTYPE: tl.constexpr,
    PER_WORD: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    POLLS: tl.constexpr,
    SEND: tl.constexpr,
    REDUCE: tl.constexpr,
    RECEIVE: tl.constexpr,
    BACKOFF_NS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program reduces ROW words of PER_WORD floats. Values and outputs are passed as int32.

    HAS_RESIDUAL: the output holds the residual, to which the sum is added. TOP_K: experts whose weighted sum is a row,
    or 0. SEND, REDUCE, RECEIVE: see `Phases`.
    """
    pdl_launch_dependents(PDL)
    column = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if HAS_NORM:
        low_weight, high_weight = norm_weights(weight_ptr, column, PER_WORD, ROW)
    pdl_wait(PDL)
    chunk = program * (BLOCK // CHUNK) + column // CHUNK
    steps = tl.load(steps_ptr + chunk) + 1
    word = program * ROW + column
    mask = (column < ROW) & (word < words // 4 * 4)  # tells the compiler that no mask splits 16 bytes
    local_words = partial_sum_words(values_ptr, topk_weights_ptr, program, column, mask, DTYPE, TOP_K, ROW)
    SLICE: tl.constexpr = BLOCK // RANKS
    if SEND:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                send_mask = mask & (column // SLICE == rank) if TWO_SHOT else mask
                send(local_words, send_mask, pointers_ptr, rank, column, chunk, steps, RANK, RANKS, CHUNK)
    if REDUCE and TWO_SHOT:
        _reduce_slice(
            values_ptr, topk_weights_ptr, output_ptr, pointers_ptr, steps_ptr, words, program,
            DTYPE, TOP_K, HAS_RESIDUAL, RANK, RANKS, ROW, SLICE, CHUNK, POLLS, BACKOFF_NS,
        )  # fmt: skip
    if RECEIVE:
        if TWO_SHOT:
            slot = slot_pointers(pointers_ptr, RANK, column // SLICE, column, chunk, steps, RANKS, CHUNK)
            total = wait_for(slot, mask, pointers_ptr, RANKS, POLLS, BACKOFF_NS)
        else:
            residual = tl.load(output_ptr + word, mask=mask, other=0) if HAS_RESIDUAL else local_words
            received = receive(
                local_words, mask, pointers_ptr, column, chunk, steps, RANK, RANKS, CHUNK, POLLS, BACKOFF_NS
            )
            total = _reduce(received, residual, DTYPE, HAS_RESIDUAL)
        tl.store(output_ptr + word, total, mask=mask)
        if HAS_NORM:
            normalized = normalize(total, low_weight, high_weight, weight_ptr, eps, DTYPE, PER_WORD, ROW)
            tl.store(normalized_ptr + word, normalized, mask=mask)
        tl.store(steps_ptr + chunk, steps, mask=column % CHUNK == 0)


@triton.jit
def _reduce_slice(
    values_ptr,
    topk_weights_ptr,
    output_ptr,
    pointers_ptr,
    steps_ptr,
    words,
    program,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    SLICE: tl.constexpr,
    CHUNK: tl.constexpr,
    POLLS: tl.constexpr,
    BACKOFF_NS: tl.constexpr,
):
    """Sum this rank's slice of a row and send the sum to all ranks, so that every rank then receives all slices."""
    column = RANK * SLICE + tl.arange(0, SLICE)
    chunk = program * (ROW // CHUNK) + column // CHUNK
    steps = tl.load(steps_ptr + chunk) + 1
    word = program * ROW + column
    mask = word < words // 4 * 4
    local_words = partial_sum_words(values_ptr, topk_weights_ptr, program, column, mask, DTYPE, TOP_K, ROW)
    residual = tl.load(output_ptr + word, mask=mask, other=0) if HAS_RESIDUAL else local_words
    received = receive(local_words, mask, pointers_ptr, column, chunk, steps, RANK, RANKS, CHUNK, POLLS, BACKOFF_NS)
    total = _reduce(received, residual, DTYPE, HAS_RESIDUAL)
    send_to_all(avoid_empty(total), mask, pointers_ptr, column, chunk, steps, RANK, RANKS, CHUNK)


@triton.jit(do_not_specialize=["count"])
def _all_reduce_max_kernel(
    values_ptr,
    pointers_ptr,
    steps_ptr,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    POLLS: tl.constexpr,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
):
    """Each program reduces CHUNK / 4 int64. Each number is sent as four words of 16 bits, lowest first, none EMPTY."""
    QUARTER: tl.constexpr = CHUNK // 4
    program = tl.program_id(0)
    column = tl.arange(0, CHUNK)
    chunk = program + tl.zeros_like(column)
    steps = tl.load(steps_ptr + chunk) + 1
    index = program * QUARTER + column % QUARTER
    bit = (16 * (column // QUARTER)).to(tl.int64)
    mask = index < count
    local_values = tl.load(values_ptr + index, mask=mask, other=0)
    words = ((local_values >> bit) & 0xFFFF).to(tl.int32)
    if SEND:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                send(words, mask, pointers_ptr, rank, column, chunk, steps, RANK, RANKS, CHUNK)
    if RECEIVE:
        received = receive(words, mask, pointers_ptr, column, chunk, steps, RANK, RANKS, CHUNK, POLLS).to(tl.int64)
        maximum = tl.max(tl.sum(tl.reshape(received << bit[None, :], (RANKS, 4, QUARTER)), axis=1), axis=0)
        index = program * QUARTER + tl.arange(0, QUARTER)
        tl.store(values_ptr + index, maximum, mask=index < count)
        tl.store(steps_ptr + chunk, steps, mask=column == 0)


def all_reduce(
    partial_sum: torch.Tensor,
    memory: SymmetricMemory,
    residual: torch.Tensor | None = None,
    *,
    phases: Phases = ALL_PHASES,
) -> torch.Tensor:
    """Replace `partial_sum` by the sum of all ranks' partial sums, or add that sum to `residual` if it is given.

    All ranks must call this together. Both tensors are contiguous and have the same shape and floating type.
    `can_all_reduce` returns whether they are supported.
    """
    output = partial_sum if residual is None else residual
    chunks = triton.cdiv(partial_sum.numel() * partial_sum.element_size() // 4, CHUNK)
    row = triton.cdiv(chunks, _MAX_PROGRAMS) * CHUNK
    _launch(partial_sum, None, memory, output, None, None, row, phases, has_residual=residual is not None)
    return output


def all_reduce_rms_norm(
    partial_sum: torch.Tensor,
    memory: SymmetricMemory,
    norm: Norm,
    residual: torch.Tensor | None = None,
    *,
    phases: Phases = ALL_PHASES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `all_reduce` and its norm. partial_sum: [rows, size].

    `can_fuse_norm` tells whether its size and layout are supported.
    """
    output = partial_sum if residual is None else residual
    normalized, row, has_residual = torch.empty_like(partial_sum), row_words(partial_sum), residual is not None
    _launch(partial_sum, None, memory, output, normalized, norm, row, phases, has_residual=has_residual)
    return output, normalized


def combine_all_reduce_rms_norm(
    outputs: torch.Tensor,
    memory: SymmetricMemory,
    topk_weights: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor,
    *,
    phases: Phases = ALL_PHASES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `all_reduce_rms_norm` of the rounded weighted sum of each token's expert outputs.

    Args:
        outputs: [tokens * top_k, size], contiguous.
        memory: the group's symmetric memory.
        topk_weights: [tokens, top_k] float32.
        norm: the norm of the result.
        residual: [tokens, size] of the dtype of `outputs`, see `can_fuse_norm`.
        phases: the phases to launch.
    """
    normalized, row = torch.empty_like(residual), row_words(residual)
    _launch(outputs, topk_weights, memory, residual, normalized, norm, row, phases, has_residual=True)
    return residual, normalized


def _launch(
    values: torch.Tensor,
    topk_weights: torch.Tensor | None,
    memory: SymmetricMemory,
    output: torch.Tensor,
    normalized: torch.Tensor | None,
    norm: Norm | None,
    row: int,
    phases: Phases,
    *,
    has_residual: bool,
) -> None:
    """Launch an all-reduce kernel. A program has `row` words."""
    if output.numel() == 0:
        return
    words = as_words(output)
    block = _num_chunks(row) * CHUNK
    programs = triton.cdiv(words.numel(), row)
    _all_reduce_kernel[(programs,)](
        as_words(values),
        words if topk_weights is None else topk_weights,
        words,
        words if normalized is None else as_words(normalized),
        words if norm is None else norm.weight,
        memory.pointers,
        memory.steps,
        words.numel(),
        0.0 if norm is None else norm.eps,
        DTYPE=triton_dtype(output),
        PER_WORD=4 // output.element_size(),
        TOP_K=0 if topk_weights is None else topk_weights.shape[1],
        HAS_RESIDUAL=has_residual,
        HAS_NORM=norm is not None,
        TWO_SHOT=row == block and _two_shot_is_faster(words.numel() * 4, memory.ranks),  # else a slice may be empty
        RANK=memory.rank,
        RANKS=memory.ranks,
        ROW=row,
        BLOCK=block,
        CHUNK=CHUNK,
        POLLS=POLLS,
        SEND=phases.send,
        REDUCE=phases.reduce,
        RECEIVE=phases.receive,
        BACKOFF_NS=_BACKOFF_NS if programs > _MAX_PROGRAMS_WITHOUT_BACKOFF else 0,
        num_warps=min(_MAX_WARPS, block // CHUNK * CHUNK_WARPS),
        **pdl_options(output.device),
    )


def _two_shot_is_faster(message_bytes: int, ranks: int) -> bool:
    """Return whether two-shot is faster than one-shot for a message of `message_bytes`."""
    saved_bytes = message_bytes * (ranks - 1) - message_bytes * 2 * (ranks - 1) // ranks
    return saved_bytes >= _TWO_SHOT_SAVES_BYTES


def all_reduce_max(values: torch.Tensor, memory: SymmetricMemory, *, phases: Phases = ALL_PHASES) -> torch.Tensor:
    """Replace `values` by their elementwise maximum over all ranks. values: [count] int64, at most MAX_INT64."""
    if values.numel():
        _all_reduce_max_kernel[(triton.cdiv(values.numel(), CHUNK // 4),)](
            values,
            memory.pointers,
            memory.steps,
            values.numel(),
            RANK=memory.rank,
            RANKS=memory.ranks,
            CHUNK=CHUNK,
            POLLS=POLLS,
            SEND=phases.send,
            RECEIVE=phases.receive,
            num_warps=CHUNK_WARPS,
        )
    return values


def _num_chunks(row: int) -> int:
    """Return the number of chunks for `row` words, rounded up to a power of two as Triton blocks require."""
    return int(triton.next_power_of_2(triton.cdiv(row, CHUNK)))
