"""Counting: rates and latencies equal those of the steps, and impossible steps are refused."""

from itertools import pairwise

import numpy as np
import pytest

from meltcore.measure.score.counting import StepCounter
from meltcore.measure.score.engine_process import EngineError
from meltcore.protocol.json_lines import StepLine

TOKENS = 4


def step(t_s: float, *ids: int, tokens: int = 1, ended: tuple[int, ...] = (), reason: str = "length") -> StepLine:
    return StepLine(t_s, list(ids), [[7] * tokens for _ in ids], [(number, reason) for number in ended])


def filled() -> StepCounter:
    """Two requests of 4 tokens: 0 sent at 0 s, with tokens at 1, 2, 3, 4; 1 sent at 0.5 s, at 2, 2.5, 3, 4."""
    counter = StepCounter(TOKENS)
    counter.send(100, 0.0)
    counter.send(50, 0.5)
    for line in (step(1, 0), step(2, 0, 1), step(2.5, 1), step(3, 0, 1), step(4, 0, 1, ended=(0, 1))):
        counter.add(line)
    return counter


def test_window_excludes_its_start_and_includes_its_end() -> None:
    window = filled().window(1.0, 3.0)
    assert window.output_tokens == 5
    assert window.prompt_tokens == 50, "request 0 had its first token at the window's start, so before it"
    assert window.ttft_s.tolist() == [1.5]
    assert sorted(window.itl_s.tolist()) == [0.5, 0.5, 1.0, 1.0]
    assert window.finished == 0
    assert filled().window(3.0, 4.0).e2e_s.tolist() == [4.0, 3.5]


def test_adjacent_windows_hold_every_token_once() -> None:
    counter = filled()
    edges = [0.0, 1.0, 2.0, 2.5, 3.0, 4.0]
    windows = [counter.window(*pair) for pair in pairwise(edges)]
    assert sum(window.output_tokens for window in windows) == 8
    assert sum(len(window.itl_s) for window in windows) == 6
    assert sum(window.finished for window in windows) == 2


def test_tokens_of_one_step_divide_the_time_before_it() -> None:
    counter = StepCounter(TOKENS)
    counter.send(1, 0.0)
    counter.add(step(1, 0))
    counter.add(step(4, 0, tokens=3, ended=(0,)))
    assert counter.window(0, 4).itl_s.tolist() == [1.0, 1.0, 1.0]
    assert counter.window(0, 4).output_tokens == 4


def test_requests_without_a_token_are_waiting() -> None:
    counter = StepCounter(TOKENS)
    counter.send(1, 0.0)
    counter.send(1, 0.0)
    counter.send(1, 9.0)
    counter.add(step(1, 0))
    counter.add(step(2, 1))
    assert [counter.window(0, end).waiting for end in (0.5, 1, 2, 9)] == [2, 1, 0, 1]
    assert counter.open() == [0, 1, 2]


@pytest.mark.slow
def test_thousands_of_requests_are_counted_exactly() -> None:
    """More than the initial size of the arrays."""
    counter, random = StepCounter(TOKENS), np.random.default_rng(0)
    for number in range(5_000):
        assert counter.send(number, 0.0) == number
    order = np.repeat(np.arange(5_000), TOKENS)
    random.shuffle(order)
    seen = dict.fromkeys(range(5_000), 0)
    for index, number in enumerate(map(int, order)):
        seen[number] += 1
        counter.add(step(float(index + 1), number, ended=(number,) if seen[number] == TOKENS else ()))
    window = counter.window(0, 30_000)
    assert (window.output_tokens, window.finished, counter.finished) == (20_000, 5_000, 5_000)
    assert window.prompt_tokens == sum(range(5_000))
    assert counter.open() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (step(5, 2), "request 2, which was never sent"),
        (step(5, -1), "request -1, which was never sent"),
        (step(5, 0, 0), "one list of tokens for each request"),
        (StepLine(5, [0, 1], [[7]], []), "one list of tokens for each request"),
        (StepLine(5, [0], [[]], []), "one list of tokens for each request"),
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
def test_impossible_step_is_refused(line: StepLine, message: str) -> None:
    counter = StepCounter(TOKENS)
    counter.send(10, 0.0)
    counter.send(10, 1.5)
    counter.add(step(1, 0))
    with pytest.raises(EngineError, match=message):
        counter.add(line)


def test_tokens_for_an_ended_request_are_refused() -> None:
    with pytest.raises(EngineError, match="request 1, which had ended"):
        filled().add(step(5, 1))
