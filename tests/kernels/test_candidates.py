"""Candidates of vocabulary shards: the largest is the choice from the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from meltcore.kernels.sampling.argmax import argmax
from meltcore.kernels.sampling.draw import (
    _pack,
    _pack_reference,
    argmax_candidates,
    candidate_tokens,
    gumbel_sample,
    sampled_candidates,
)

VOCAB = 300
HIGH_BITS = 7 * 2**16  # ids far above 2^16 must come through


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_candidate_is_the_argmax(shards: int, dtype: torch.dtype) -> None:
    """Logits from few values, so that equal ones are in several shards; rows of one value, of NaN and of infinity."""
    torch.manual_seed(0)
    logits = torch.randint(-3, 3, (8, VOCAB)).to(dtype)
    logits[1] = float("-inf")
    logits[2, 290], logits[2, 3] = float("nan"), float("inf")
    logits[3] = -0.0
    logits[3, 200] = 0.0
    logits[4] = -torch.rand(VOCAB).to(dtype) - 1e-3
    size = VOCAB // shards
    each = [argmax_candidates(logits[:, first : first + size], first) for first in range(0, VOCAB, size)]
    assert torch.equal(candidate_tokens(torch.stack(each).amax(0)), argmax(logits))


def test_ids_of_large_vocabularies_are_preserved() -> None:
    logits = torch.zeros(1, 3)
    logits[0, 1] = -5.0
    logits[0, 2] = 2.0
    assert candidate_tokens(argmax_candidates(logits, HIGH_BITS)).tolist() == [HIGH_BITS + 2]


@pytest.mark.parametrize("shards", [2, 3])
def test_largest_candidate_is_the_sampled_token(shards: int) -> None:
    torch.manual_seed(1)
    logits, temperatures = torch.randn(20, VOCAB), torch.tensor([0.0, 0.6, 1.0, 1.7] * 5)
    seeds, positions = torch.randint(-(2**62), 2**62, (20,)), torch.arange(20)
    size = VOCAB // shards
    each = [
        sampled_candidates(logits[:, first : first + size].contiguous(), temperatures, seeds, positions, first)
        for first in range(0, VOCAB, size)
    ]
    assert torch.equal(
        candidate_tokens(torch.stack(each).amax(0)), gumbel_sample(logits, temperatures, seeds, positions)
    )


def test_implementations_pack_alike(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, 50)
    logits[:5, 7] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0])
    columns = torch.full((40,), 7)
    expected = _pack_reference(logits[:, 7].clone(), columns + HIGH_BITS)
    found = _pack(logits.to(device), 50, columns.to(device), columns.to(device), HIGH_BITS)
    assert torch.equal(found.cpu(), expected)
