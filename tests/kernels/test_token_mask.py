"""Masks of grammars: both implementations against their definition."""

from __future__ import annotations

import threading

import pytest
import torch

from meltcore.kernels.sampling.token_mask import WORD_BITS, mask_logits, wait_for_masks

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("vocab", [5000, 96, 70])
def test_mask_excludes_the_tokens_without_a_bit_and_skips_free_rows(device: torch.device, vocab: int) -> None:
    """Rows 0 and 3 have the masks 2 and 1, rows 1 and 2 are free. The masks end before a vocabulary of 5,000."""
    torch.manual_seed(0)
    words = min(150, -(-vocab // WORD_BITS))
    masks = torch.randint(-(2**31), 2**31, (4, words), dtype=torch.int32)
    masks[0] = 0  # the row of free rows is not read
    mask_rows = [2, 0, 0, 1]
    logits = torch.randn(4, vocab + 6)[:, :vocab]
    expected = logits.clone()
    for row, mask_row in enumerate(mask_rows):
        for token in range(vocab) if mask_row else ():
            word = int(masks[mask_row, token // WORD_BITS]) if token // WORD_BITS < words else 0
            if not (word >> (token % WORD_BITS)) & 1:
                expected[row, token] = float("-inf")
    result = logits.to(device)
    host_masks = masks.pin_memory() if device.type == "cuda" else masks
    mask_logits(result, host_masks, torch.tensor(mask_rows, device=device))
    assert torch.equal(result.cpu(), expected)
    assert torch.isinf(expected).any()


@pytest.mark.parametrize("is_pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_device_waits_for_each_mask_and_says_which_were_late(is_pinned: bool) -> None:
    """Row 1 has its mask, row 2 needs none, row 3 has the mask of another token, and row 4 gets its mask meanwhile."""
    tickets, positions = [7 << 32 | 1, 8 << 32 | 2, 9 << 32 | 3, 0, 10 << 32 | 4], [1, 0, 3, 5, 2]
    filled = torch.zeros(6, dtype=torch.int64)
    filled[1], filled[2], filled[3] = tickets[0], -tickets[1], tickets[2] - 2
    outcomes = torch.zeros(2, 6, dtype=torch.int64)
    device = torch.device("cuda" if is_pinned else "cpu")
    if is_pinned:
        filled, outcomes = filled.pin_memory(), outcomes.pin_memory()
    rows, first_tickets = (
        [1, 2, 3, 5, 4],
        [ticket and ticket - at for ticket, at in zip(tickets, positions, strict=True)],
    )
    settings = [torch.tensor(values, device=device) for values in (rows, first_tickets, positions)]
    limits_ns = torch.tensor([0, 500_000_000], device=device)
    timer = threading.Timer(0.02, filled.__setitem__, (4, tickets[4]))
    timer.start()
    mask_rows = wait_for_masks(*settings, filled, outcomes, limits_ns)
    timer.join()
    assert mask_rows.tolist() == [1, 0, 0, 0, 4]
    expected = torch.zeros(2, 6, dtype=torch.int64)
    expected[1, 1], expected[0, 2], expected[1, 3], expected[0, 4] = tickets[0], -tickets[1], -tickets[2], tickets[4]
    assert torch.equal(outcomes, expected)


@pytest.mark.parametrize("is_pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_device_waits_longer_while_it_can_sample_nothing(is_pinned: bool) -> None:
    """The mask of row 1 comes meanwhile, the one of row 2 does not. Then no time is left. Padding does not count."""
    tickets, filled, outcomes = [7 << 32, 8 << 32, 0], torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3).long()
    device = torch.device("cuda" if is_pinned else "cpu")
    if is_pinned:
        filled, outcomes = filled.pin_memory(), outcomes.pin_memory()
    settings = [torch.tensor(values, device=device) for values in ([1, 2, 0], tickets, [4, 5, -1])]
    timer = threading.Timer(0.02, filled.__setitem__, (1, tickets[0] + 4))
    timer.start()
    limits_ns = torch.tensor([60_000_000_000, 0], device=device)
    mask_rows = wait_for_masks(*settings, filled, outcomes, limits_ns)
    timer.join()
    assert mask_rows.tolist() == [1, 0, 0]
    assert outcomes.tolist() == [[0, tickets[0] + 4, 0], [0, 0, -(tickets[1] + 5)]]
