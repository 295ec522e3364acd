"""Excludes the tokens that a packed mask does not allow, for answers that follow a grammar."""

from __future__ import annotations

import time

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton

WORD_BITS = 32
_BLOCK, _WARPS = 4096, 4
_WAIT_BLOCK = 1024  # rows that one program waits for at a time


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """Set the logits of excluded tokens to minus infinity, in place.

    The kernel reads the masks where they are, also in pinned host memory, and writes excluded logits only.

    Args:
        logits: [rows, vocab] of any floating type, rows may be strided.
        masks: [mask rows, words] int32, contiguous. Bit b of word w allows the token 32 * w + b. A token without a bit
            is excluded.
        mask_rows: [rows] int64, the row of `masks` for each row of logits. A row of 0 excludes nothing.
    """
    rows, vocab = logits.shape
    if not use_triton(logits):
        _mask_reference(logits, masks, mask_rows)
        return
    if rows:
        _mask_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
            *(logits, masks, mask_rows, vocab, masks.shape[1], logits.stride(0)),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def wait_for_masks(
    rows: torch.Tensor,
    tickets: torch.Tensor,
    positions: torch.Tensor,
    filled: torch.Tensor,
    outcomes: torch.Tensor,
    limits_ns: torch.Tensor,
) -> torch.Tensor:
    """Wait on the device until the masks of a step are filled, but not long for the last ones.

    The host fills masks meanwhile, so it may launch the step earlier.

    Args:
        rows: [sequences] int64, the row of each sequence's mask.
        tickets: [sequences] int64. A sequence waits for the mask of the ticket `tickets + positions`. An entry of 0
            waits for none.
        positions: [sequences] int64, where each sampled token will be. It is -1 for padding.
        filled: [mask rows] int64, which the host writes: the ticket of the mask in each row after the mask is written,
            or the negative ticket if the row needs none.
        outcomes: [2, mask rows] int64, contiguous. Each ticket is written at its parity, negative if the row gets no
            mask.
        limits_ns: [2] int64, how long to wait while no sequence can be sampled, and then for the others.

    Returns [sequences] int64: the rows of the filled masks, and 0 where a mask is late or not needed.
    """
    if not use_triton(rows):
        return _wait_reference(rows, tickets, positions, filled, outcomes, limits_ns)
    mask_rows = torch.empty_like(rows)
    _wait_kernel[(1,)](
        *(rows, tickets, positions, filled, outcomes, limits_ns, mask_rows, len(rows), outcomes.shape[1]),
        BLOCK=_WAIT_BLOCK,
        num_warps=_WARPS,
    )
    return mask_rows


def _wait_reference(
    rows: torch.Tensor,
    tickets: torch.Tensor,
    positions: torch.Tensor,
    filled: torch.Tensor,
    outcomes: torch.Tensor,
    limits_ns: torch.Tensor,
) -> torch.Tensor:
    has_mask = tickets > 0
    tickets = torch.where(has_mask, tickets + positions, 0)
    for limit_ns, is_enough in zip(limits_ns.tolist(), (torch.any, torch.all), strict=True):
        ends_s = time.monotonic() + limit_ns * 1e-9
        while True:
            seen = filled[rows.to(filled.device)].to(tickets.device)
            is_done = (seen.abs() == tickets) | ~has_mask
            if bool(is_enough(is_done[positions >= 0])) or time.monotonic() >= ends_s:
                break
    is_masked = seen == tickets
    outcomes[tickets[has_mask] % 2, rows[has_mask]] = torch.where(is_masked, tickets, -tickets)[has_mask].to(
        outcomes.device
    )
    return torch.where(has_mask & is_masked, rows, 0)


def _mask_reference(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    words = masks[mask_rows.to(masks.device)].to(logits.device)
    bits = torch.arange(WORD_BITS, device=logits.device, dtype=torch.int32)
    is_allowed = ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    is_allowed = torch.nn.functional.pad(is_allowed, (0, logits.shape[1] - is_allowed.shape[1]))
    logits.masked_fill_(~is_allowed & (mask_rows > 0)[:, None], float("-inf"))


# The tokenizer says how many words there are, which the warm-up does not know.
@triton.jit(do_not_specialize=["mask_rows_ptr", "words"])
def _mask_kernel(logits_ptr, masks_ptr, mask_rows_ptr, vocab, words, row_stride, BLOCK: tl.constexpr):
    """Each program handles BLOCK tokens of one row. Programs of a row without a mask do nothing."""
    row = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row > 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(masks_ptr + mask_row * words + token // 32, mask=token // 32 < words, other=0)
        is_excluded = ((word >> (token % 32)) & 1) == 0
        tl.store(logits_ptr + row * row_stride + token, float("-inf"), mask=is_excluded & (token < vocab))


# Settings are slices at any alignment, and the number of sequences differs from step to step.
@triton.jit(
    do_not_specialize=[
        "rows_ptr",
        "tickets_ptr",
        "positions_ptr",
        "limit_ptr",
        "mask_rows_ptr",
        "sequences",
        "table_rows",
    ]
)
def _wait_kernel(
    rows_ptr,
    tickets_ptr,
    positions_ptr,
    filled_ptr,
    outcomes_ptr,
    limits_ptr,
    mask_rows_ptr,
    sequences,
    table_rows,
    BLOCK: tl.constexpr,
):
    """One program polls the memory that the host writes. Kernels that follow it see the masks, too."""
    first_limit_ns, limit_ns = tl.load(limits_ptr), tl.load(limits_ptr + 1)
    for first in range(0, sequences, BLOCK):
        index = first + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + index, mask=index < sequences, other=0)
        ticket = tl.load(tickets_ptr + index, mask=index < sequences, other=0)
        position = tl.load(positions_ptr + index, mask=index < sequences, other=-1)
        has_mask = ticket > 0
        ticket = tl.where(has_mask, ticket + position, 0)
        seen = tl.load(filled_ptr + row, mask=has_mask, other=0, volatile=True)
        is_done = (seen == ticket) | (seen == -ticket)
        start_ns = tl.extra.cuda.globaltimer()
        while (tl.max((is_done & (position >= 0)).to(tl.int32), 0) == 0) & (
            tl.extra.cuda.globaltimer() - start_ns < first_limit_ns
        ):
            seen = tl.load(filled_ptr + row, mask=has_mask, other=0, volatile=True)
            is_done = (seen == ticket) | (seen == -ticket)
        start_ns = tl.extra.cuda.globaltimer()
        while (tl.min(is_done.to(tl.int32), 0) == 0) & (tl.extra.cuda.globaltimer() - start_ns < limit_ns):
            seen = tl.load(filled_ptr + row, mask=has_mask, other=0, volatile=True)
            is_done = (seen == ticket) | (seen == -ticket)
        is_masked = is_done & (seen == ticket)
        tl.store(outcomes_ptr + ticket % 2 * table_rows + row, tl.where(is_masked, ticket, -ticket), mask=has_mask)
        tl.store(mask_rows_ptr + index, tl.where(has_mask & is_masked, row, 0), mask=index < sequences)
