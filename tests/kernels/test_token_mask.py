"""Masks of grammars: both implementations against their definition."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.sampling.token_mask import WORD_BITS, mask_logits

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
