"""The two ends of a decode step that a CUDA graph replays: what the host changed, and what it reads.

Copies between host and device are commands of their own, each with several microseconds of nothing around it, as long
as a small model's whole layer. Here kernels read and write pinned host memory themselves, and a step whose sequences
are those of the step before is told nothing at all: its positions were counted up by that step.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

_BLOCK = 1024


def take_changes(changes: torch.Tensor, inputs: torch.Tensor, page_table: torch.Tensor, new_pages: int) -> None:
    """Bring a step's inputs and new pages onto the device.

    changes: int64 in pinned host memory: the new content of `inputs`, then the rows, the columns and the page numbers
    of `new_pages` entries of `page_table` [rows, columns] int64. inputs: [n] int64. The host must leave `changes` as
    they are until the device has passed this point.
    """
    body = _take_changes_triton if use_triton(inputs) else _take_changes_torch
    body(changes, inputs, page_table, new_pages)


def _take_changes_torch(changes: torch.Tensor, inputs: torch.Tensor, page_table: torch.Tensor, new_pages: int) -> None:
    sent, pages = changes.split([inputs.shape[0], 3 * new_pages])
    inputs.copy_(sent)
    rows, columns, numbers = pages.to(inputs.device).view(3, new_pages)
    page_table[rows, columns] = numbers


# The counts start anywhere: without this, each of 1, of 16 and of others would be compiled for anew.
@triton.jit(do_not_specialize=["count", "new_pages"])
def _take_changes_kernel(
    changes_ptr, inputs_ptr, table_ptr, count, new_pages, table_stride: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sent = tl.load(changes_ptr + index, mask=index < count)
    tl.store(inputs_ptr + index, sent, mask=index < count)
    some = index < new_pages
    row = tl.load(changes_ptr + count + index, mask=some)
    column = tl.load(changes_ptr + count + new_pages + index, mask=some)
    page = tl.load(changes_ptr + count + 2 * new_pages + index, mask=some)
    tl.store(table_ptr + row * table_stride + column, page, mask=some)


def _take_changes_triton(changes: torch.Tensor, inputs: torch.Tensor, page_table: torch.Tensor, new_pages: int) -> None:
    count = inputs.shape[0]
    _take_changes_kernel[(triton.cdiv(max(count, new_pages), _BLOCK),)](
        changes, inputs, page_table, count, new_pages, page_table.stride(0), BLOCK=_BLOCK
    )


def end_step(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    steps: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """Leave a step's tokens where the next step and the host find them.

    token_ids, rows, positions: [sequences] int64; positions are counted up, but those of padding (-1). last_tokens:
    [table rows] int64, the tokens go to their sequence's row. steps: [1] int64, counted up. ring: [slots, sequences or
    more] int64 in pinned host memory; the tokens go to the beginning of slot `steps % slots`.
    """
    body = _end_step_triton if use_triton(token_ids) else _end_step_torch
    body(token_ids, rows, positions, last_tokens, steps, ring)


def _end_step_torch(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    steps: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    ring[int(steps) % ring.shape[0], : len(token_ids)] = token_ids.to(ring.device)
    last_tokens[rows] = token_ids
    positions += positions >= 0
    steps += 1


@triton.jit(do_not_specialize=["sequences"])
def _end_step_kernel(
    token_ids_ptr,
    rows_ptr,
    positions_ptr,
    last_tokens_ptr,
    steps_ptr,
    ring_ptr,
    sequences,
    ring_stride: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all, so that one count of steps serves them."""
    steps = tl.load(steps_ptr)
    tl.debug_barrier()  # every thread has read it before one writes it
    tl.store(steps_ptr, steps + 1)
    slot_ptr = ring_ptr + steps % SLOTS * ring_stride
    for block in tl.static_range(BLOCKS):
        index = block * BLOCK + tl.arange(0, BLOCK)
        inside = index < sequences
        token = tl.load(token_ids_ptr + index, mask=inside)
        row = tl.load(rows_ptr + index, mask=inside)
        position = tl.load(positions_ptr + index, mask=inside, other=-1)
        tl.store(slot_ptr + index, token, mask=inside)
        tl.store(last_tokens_ptr + row, token, mask=inside)
        tl.store(positions_ptr + index, position + 1, mask=position >= 0)


def _end_step_triton(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    steps: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    slots, width = ring.shape
    _end_step_kernel[(1,)](
        *(token_ids, rows, positions, last_tokens, steps, ring, token_ids.shape[0]),
        ring_stride=width,
        SLOTS=slots,
        BLOCKS=triton.cdiv(token_ids.shape[0], _BLOCK),
        BLOCK=_BLOCK,
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    some = numbers(64)
    return [
        lambda: _take_changes_triton(numbers(128 + 3 * 5), numbers(128), numbers(1025, 64), 5),
        lambda: _end_step_triton(some, some, some, numbers(1025), numbers(1), numbers(4, 1024)),
    ]
