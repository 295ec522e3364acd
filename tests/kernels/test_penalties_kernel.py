"""Penalties: both implementations against their definitions."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.sampling.penalties import apply_penalties


@pytest.mark.usefixtures("implementation")
def test_penalties_follow_their_definitions(device: torch.device) -> None:
    """Rows 3, 0 and 2 are penalized with the counts of slots 1, 4 and 0; row 1 is not."""
    torch.manual_seed(0)
    vocab, rows, slots = 2500, [3, 0, 2], [1, 4, 0]
    logits = torch.randn(4, vocab)
    counts = torch.randint(0, 4, (5, vocab), dtype=torch.int32) * torch.randint(0, 2, (5, vocab), dtype=torch.int32)
    in_prompt = torch.rand(5, vocab) < 0.3
    presence, frequency = torch.tensor([0.5, 0.0, -0.5]), torch.tensor([0.0, 0.25, 1.0])
    repetition = torch.tensor([1.0, 1.5, 0.8])
    expected = logits.double()
    for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        for token in range(vocab):
            value, count = float(logits[row, token]), int(counts[slot, token])
            if count > 0 or in_prompt[slot, token]:
                value = value / float(repetition[index]) if value > 0 else value * float(repetition[index])
            value -= float(frequency[index]) * count + float(presence[index]) * (count > 0)
            expected[row, token] = value
    result = logits.to(device)
    settings = (torch.tensor(rows), torch.tensor(slots), counts, in_prompt, presence, frequency, repetition)
    apply_penalties(result, *(each.to(device) for each in settings))
    torch.testing.assert_close(result.cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(result[1].cpu(), logits[1])
