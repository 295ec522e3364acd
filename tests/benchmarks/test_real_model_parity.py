"""Which greedy texts of real_model_parity.py count as faults, by given log-probabilities of the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_model_parity import Difference, Parity, _first_difference

PROMPT = [5, 6]
CLEAR, TIED = [-0.1, -0.9, -9.0], [-0.70, -0.72, -9.0]  # of three tokens, of which the first is the best


@pytest.mark.parametrize(
    ("rows", "chosen", "position", "is_fault"),
    [
        ([CLEAR, CLEAR, CLEAR], [0, 0, 0], None, False),
        ([TIED, CLEAR, CLEAR], [0, 0, 0], None, False),
        ([CLEAR, TIED, CLEAR], [0, 1, 2], 1, False),  # what follows is of another text
        ([CLEAR, CLEAR, TIED], [0, 0, 1], 2, False),
        ([CLEAR, CLEAR, CLEAR], [0, 1, 0], 1, True),
        ([TIED, CLEAR, CLEAR], [0, 1, 0], 1, True),  # both chose the same token at the tie
        ([TIED, TIED, CLEAR], [0, 0, 2], 2, True),
    ],
)
def test_only_a_tie_at_the_difference_excuses_it(
    rows: list[list[float]], chosen: list[int], position: int | None, is_fault: bool
) -> None:
    def logprobs(tokens: list[int], first: int) -> list[torch.Tensor]:
        assert (tokens, first) == (PROMPT + chosen, len(PROMPT))
        return [torch.tensor(rows)]

    reference: Any = SimpleNamespace(logprobs=logprobs)
    completion: Any = SimpleNamespace(prompt_token_ids=PROMPT, token_ids=chosen)
    found = _first_difference(reference, 7, completion)
    if position is None:
        assert found is None
        return
    assert found == Difference(7, position, pytest.approx(rows[position][0] - rows[position][1], rel=1e-4))
    assert bool(Parity({}, 1, [found]).faults) == is_fault
