"""Candidates of parts of the vocabulary: the largest is what the whole would have given."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels import candidates as kernel
from meltcore.kernels.candidates import candidates, drawn_candidates, tokens_of
from meltcore.kernels.sampling import draw, greedy

VOCAB = 300
HIGH_BITS = 7 * 2**16  # ids far above 2^16 must come through


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_candidate_is_the_likeliest_token(parts: int, dtype: torch.dtype) -> None:
    """Logits from few values, so that equal ones stand in several parts; rows of one value, of NaN and of infinity."""
    torch.manual_seed(0)
    logits = torch.randint(-3, 3, (8, VOCAB)).to(dtype)
    logits[1] = float("-inf")
    logits[2, 290], logits[2, 3] = float("nan"), float("inf")
    logits[3] = -0.0
    logits[3, 200] = 0.0
    logits[4] = -torch.rand(VOCAB).to(dtype) - 1e-3
    size = VOCAB // parts
    each = [candidates(logits[:, first : first + size], first) for first in range(0, VOCAB, size)]
    assert torch.equal(tokens_of(torch.stack(each).amax(0)), greedy(logits))


def test_ids_of_large_vocabularies_come_through() -> None:
    logits = torch.zeros(1, 3)
    logits[0, 1] = -5.0
    logits[0, 2] = 2.0
    assert tokens_of(candidates(logits, HIGH_BITS)).tolist() == [HIGH_BITS + 2]


@pytest.mark.parametrize("parts", [2, 3])
def test_the_largest_candidate_is_the_token_drawn(parts: int) -> None:
    torch.manual_seed(1)
    logits, temperatures = torch.randn(20, VOCAB), torch.tensor([0.0, 0.6, 1.0, 1.7] * 5)
    seeds, positions = torch.randint(-(2**62), 2**62, (20,)), torch.arange(20)
    size = VOCAB // parts
    each = [
        drawn_candidates(logits[:, first : first + size].contiguous(), temperatures, seeds, positions, first)
        for first in range(0, VOCAB, size)
    ]
    assert torch.equal(tokens_of(torch.stack(each).amax(0)), draw(logits, temperatures, seeds, positions))


def test_both_bodies_pack_alike(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, 50)
    logits[:5, 7] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0])
    columns = torch.full((40,), 7)
    expected = kernel._packed_torch(logits[:, 7].clone(), columns + HIGH_BITS)
    found = kernel._packed_triton(logits.to(device), 50, columns.to(device), columns.to(device), HIGH_BITS)
    assert torch.equal(found.cpu(), expected)
