"""Counting: rates and latencies are exactly those of the steps, and steps that cannot be true are refused."""

from itertools import pairwise

import numpy as np
import pytest

from meltcore.bench.engine_process import EngineError
from meltcore.bench.lines import Step
from meltcore.bench.tally import Tally

TOKENS = 4


def step(t_s: float, *ids: int, tokens: int = 1, ended: tuple[int, ...] = (), reason: str = "length") -> Step:
    return Step(t_s, list(ids), [[7] * tokens for _ in ids], [(number, reason) for number in ended])


def filled() -> Tally:
    """Two requests of 4 tokens: 0 sent at 0 s, with tokens at 1, 2, 3, 4; 1 sent at 0.5 s, at 2, 2.5, 3, 4."""
    tally = Tally(TOKENS)
    tally.send(100, 0.0)
    tally.send(50, 0.5)
    for line in (step(1, 0), step(2, 0, 1), step(2.5, 1), step(3, 0, 1), step(4, 0, 1, ended=(0, 1))):
        tally.take(line)
    return tally


def test_a_window_holds_what_came_after_its_start_and_up_to_its_end() -> None:
    window = filled().window(1.0, 3.0)
    assert window.output_tokens == 5
    assert window.prompt_tokens == 50, "request 0 had its first token at the window's start, so before it"
    assert window.ttft_s.tolist() == [1.5]
    assert sorted(window.itl_s.tolist()) == [0.5, 0.5, 1.0, 1.0]
    assert window.finished == 0
    assert filled().window(3.0, 4.0).e2e_s.tolist() == [4.0, 3.5]


def test_neighbouring_windows_hold_every_token_once() -> None:
    tally = filled()
    edges = [0.0, 1.0, 2.0, 2.5, 3.0, 4.0]
    pieces = [tally.window(*pair) for pair in pairwise(edges)]
    assert sum(piece.output_tokens for piece in pieces) == 8
    assert sum(len(piece.itl_s) for piece in pieces) == 6
    assert sum(piece.finished for piece in pieces) == 2


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    tally = Tally(TOKENS)
    tally.send(1, 0.0)
    tally.take(step(1, 0))
    tally.take(step(4, 0, tokens=3, ended=(0,)))
    assert tally.window(0, 4).itl_s.tolist() == [1.0, 1.0, 1.0]
    assert tally.window(0, 4).output_tokens == 4


def test_requests_without_a_token_are_counted_as_waiting() -> None:
    tally = Tally(TOKENS)
    tally.send(1, 0.0)
    tally.send(1, 0.0)
    tally.send(1, 9.0)
    tally.take(step(1, 0))
    tally.take(step(2, 1))
    assert [tally.window(0, end).waiting for end in (0.5, 1, 2, 9)] == [2, 1, 0, 1]
    assert tally.open() == [0, 1, 2]


def test_thousands_of_requests_are_counted_exactly() -> None:
    """Past the first size of its tables, each request by itself."""
    tally, random = Tally(TOKENS), np.random.default_rng(0)
    for number in range(5_000):
        assert tally.send(number, 0.0) == number
    order = np.repeat(np.arange(5_000), TOKENS)
    random.shuffle(order)
    seen = dict.fromkeys(range(5_000), 0)
    for place, number in enumerate(map(int, order)):
        seen[number] += 1
        tally.take(step(float(place + 1), number, ended=(number,) if seen[number] == TOKENS else ()))
    window = tally.window(0, 30_000)
    assert (window.output_tokens, window.finished, tally.finished) == (20_000, 5_000, 5_000)
    assert window.prompt_tokens == sum(range(5_000))
    assert tally.open() == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (step(5, 2), "request 2, which was never sent"),
        (step(5, -1), "request -1, which was never sent"),
        (step(5, 0, 0), "one list of tokens for each request"),
        (Step(5, [0, 1], [[7]], []), "one list of tokens for each request"),
        (Step(5, [0], [[]], []), "one list of tokens for each request"),
        (step(0.5, 0), "before the one before it"),
        (step(1.2, 1), "before its request was sent"),
        (step(5, 0, tokens=4), "more than 4 tokens"),
        (step(5, 0, ended=(0,)), "after 2 tokens; each must give exactly 4"),
        (step(5, 0, tokens=3, ended=(0,), reason="stop"), r"ended \(stop\) after 4 tokens"),
        (step(5, 0, tokens=3, ended=(0, 0)), "request 0, which was not running"),
        (step(5, 0, ended=(8,)), "request 8, which was not running"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_a_step_that_cannot_be_true_is_refused(line: Step, told: str) -> None:
    tally = Tally(TOKENS)
    tally.send(10, 0.0)
    tally.send(10, 1.5)
    tally.take(step(1, 0))
    with pytest.raises(EngineError, match=told):
        tally.take(line)


def test_tokens_for_a_request_that_is_over_are_refused() -> None:
    with pytest.raises(EngineError, match="request 1, which had ended"):
        filled().take(step(5, 1))
