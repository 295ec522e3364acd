"""Updates the input of a decode step in a CUDA graph from the host, and returns its tokens to the host.

Copies between host and device are separate commands with several microseconds of idle time around each, as long as a
whole layer of a small model. Here kernels access pinned host memory directly. A step with the same sequences as the
previous step needs no input: the previous step has incremented the positions.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton

_BLOCK = 1024


def apply_updates(updates: torch.Tensor, inputs: torch.Tensor, page_table: torch.Tensor, new_pages: int) -> None:
    """Copy a step's inputs and new pages to the device.

    `updates` is int64 in pinned host memory. It has the new content of `inputs` [n] int64, then the rows, the columns
    and the page numbers of `new_pages` entries of `page_table` [rows, columns] int64. The host must not change
    `updates` before the device has passed this kernel.
    """
    if not use_triton(inputs):
        new_inputs, pages = updates.split([inputs.shape[0], 3 * new_pages])
        inputs.copy_(new_inputs)
        rows, columns, page_numbers = pages.to(inputs.device).view(3, new_pages)
        page_table[rows, columns] = page_numbers
        return
    count = inputs.shape[0]
    _apply_updates_kernel[(triton.cdiv(max(count, new_pages), _BLOCK),)](
        updates, inputs, page_table, count, new_pages, page_table.stride(0), BLOCK=_BLOCK
    )


def finish_step(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    steps: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """Write a step's tokens to the tensors that the next step and the host read.

    Args:
        token_ids: [sequences] int64.
        rows: [sequences] int64.
        positions: [sequences] int64, incremented, except for padding (-1).
        last_tokens: [table rows] int64. Each token is written to its sequence's row.
        steps: [1] int64, incremented.
        ring: [slots, sequences or more] int64 in pinned host memory. The tokens go to the start of slot `steps %
            slots`.
    """
    if not use_triton(token_ids):
        ring[int(steps) % ring.shape[0], : len(token_ids)] = token_ids.to(ring.device)
        last_tokens[rows] = token_ids
        positions += positions >= 0
        steps += 1
        return
    slots, width = ring.shape
    _finish_step_kernel[(1,)](
        *(token_ids, rows, positions, last_tokens, steps, ring, token_ids.shape[0]),
        ring_stride=width,
        SLOTS=slots,
        BLOCKS=triton.cdiv(token_ids.shape[0], _BLOCK),
        BLOCK=_BLOCK,
    )


# The counts are arbitrary: specialized on them, 1, multiples of 16 and others would each be compiled anew.
@triton.jit(do_not_specialize=["count", "new_pages"])
def _apply_updates_kernel(
    updates_ptr, inputs_ptr, table_ptr, count, new_pages, table_stride: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    new_inputs = tl.load(updates_ptr + index, mask=index < count)
    tl.store(inputs_ptr + index, new_inputs, mask=index < count)
    mask = index < new_pages
    row = tl.load(updates_ptr + count + index, mask=mask)
    column = tl.load(updates_ptr + count + new_pages + index, mask=mask)
    page = tl.load(updates_ptr + count + 2 * new_pages + index, mask=mask)
    tl.store(table_ptr + row * table_stride + column, page, mask=mask)


@triton.jit(do_not_specialize=["sequences"])
def _finish_step_kernel(
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
    """The only program handles all sequences, since they share one step counter."""
    steps = tl.load(steps_ptr)
    tl.debug_barrier()  # every thread has read it before one writes it
    tl.store(steps_ptr, steps + 1)
    slot_ptr = ring_ptr + steps % SLOTS * ring_stride
    for block in tl.static_range(BLOCKS):
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < sequences
        token = tl.load(token_ids_ptr + index, mask=mask)
        row = tl.load(rows_ptr + index, mask=mask)
        position = tl.load(positions_ptr + index, mask=mask, other=-1)
        tl.store(slot_ptr + index, token, mask=mask)
        tl.store(last_tokens_ptr + row, token, mask=mask)
        tl.store(positions_ptr + index, position + 1, mask=position >= 0)
