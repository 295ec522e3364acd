"""A very long prompt under a running load, against models of what steps cost: seconds by what a step holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from meltcore.engine.messages import AddRequest
from meltcore.engine.pacing import LARGE_S, SLOWDOWN
from meltcore.engine.page_pool import PagePool
from meltcore.engine.request import Request, Sampled
from meltcore.engine.sampling_params import SamplingParams
from meltcore.engine.scheduler import LONG_PROMPT_STEPS, Chunk, Scheduler

BUDGET, LONG = 8192, 200_000
LOAD = 8

# Seconds of a step: of the sequences that decode, and of prompt tokens at their positions.
Cost = Callable[[int, int, float], float]


def dense(decodes: int, tokens: int, position: float) -> float:
    """A piece costs what its tokens do, more of them further back in the text."""
    return 0.004 + 1e-5 * decodes + tokens * (5e-6 + 2e-11 * position)


def routed(decodes: int, tokens: int, position: float) -> float:
    """Experts of one GPU: a few tokens read a few of their weights, some dozens nearly all."""
    return 0.002 + 0.014 * (1 - (1 - 1 / 32) ** (decodes + tokens)) + tokens * (2e-5 + 1e-10 * position)


def launched_one_by_one(decodes: int, tokens: int, position: float) -> float:
    """Whatever a piece holds, its kernels are launched from the host, and a step that only decodes is one graph."""
    return 0.002 + (0.012 if tokens else 0.0) + tokens * 1e-5


class Sim:
    """A scheduler one step ahead of a device whose steps take what `cost` says."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.scheduler = Scheduler(
            PagePool(20_000),
            None,
            max_num_seqs=256,
            penalty_slots=1,
            max_num_batched_tokens=BUDGET,
            max_model_len=2**18,
        )
        self.now_s = 0.0
        self.steps = 0
        self.arrived = 0
        self.token_times: dict[str, list[float]] = {}
        self._launched: list[Chunk] = []

    def add(self, length: int, max_tokens: int) -> Request:
        self.arrived += 1
        message = AddRequest(str(self.arrived), [5] * length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        request = Request(message, self.arrived, frozenset(), None)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        plan, done = self.scheduler.schedule(), self._launched
        self._launched = plan
        took_s = self.seconds(done)
        self.now_s += took_s
        self.scheduler.update(done, [Sampled(7) for chunk in done if chunk.samples])
        if self.scheduler.pacer is not None and done:
            self.scheduler.note_time(done, took_s)
        for chunk in done:
            if chunk.samples:
                self.token_times.setdefault(chunk.request.id, []).append(self.now_s)
        self.steps += 1

    def seconds(self, plan: list[Chunk]) -> float:
        prompts = [chunk for chunk in plan if chunk.size > 1]
        tokens = sum(chunk.size for chunk in prompts)
        position = sum(chunk.size * (chunk.start + chunk.end) / 2 for chunk in prompts) / max(tokens, 1)
        return self.cost(len(plan) - len(prompts), tokens, position) if plan else 0.0

    def gaps(self, requests: list[Request], since_s: float) -> list[float]:
        """Times between two tokens of one sequence, from `since_s` on, ascending."""
        found = []
        for request in requests:
            times = [time for time in self.token_times[request.id] if time >= since_s]
            found += [after - before for before, after in pairwise(times)]
        return sorted(found)


def p99(gaps: list[float]) -> float:
    return gaps[math.ceil(0.99 * len(gaps)) - 1]


def under_load(cost: Cost) -> tuple[Sim, list[Request]]:
    sim = Sim(cost)
    load = [sim.add(500, 100_000) for _ in range(LOAD)]
    for _ in range(100):
        sim.step()
    return sim, load


def read_long(sim: Sim) -> float:
    """Add a long prompt and step until its first token; how long that took."""
    began_s = sim.now_s
    request = sim.add(LONG, 10)
    while request.id not in sim.token_times:
        sim.step()
        assert sim.steps < 100_000, "the long prompt starves"
    return sim.now_s - began_s


@pytest.mark.parametrize("cost", [dense, routed])
def test_tokens_of_others_come_at_most_half_as_fast(cost: Cost) -> None:
    sim, load = under_load(cost)
    alone_s = p99(sim.gaps(load, sim.now_s / 2))
    began_s = sim.now_s
    read_long(sim)
    assert p99(sim.gaps(load, began_s)) <= SLOWDOWN * alone_s


def test_pieces_are_as_large_as_that_allows() -> None:
    alone = Sim(dense)
    alone_s = read_long(alone)
    sim, _ = under_load(dense)
    assert alone_s < read_long(sim) < 2.5 * alone_s


@pytest.mark.parametrize(("cost", "enough_s"), [(routed, 66), (launched_one_by_one, 12)])
def test_where_no_piece_is_small_enough_few_large_ones_are_read(cost: Cost, enough_s: float) -> None:
    """enough_s: for pieces of a tenth of a second and the steps between them, 67 of 3,000 tokens or 25 of 8,192."""
    sim, load = under_load(cost)
    alone_s = p99(sim.gaps(load, sim.now_s / 2))
    began_s = sim.now_s
    reading_s = read_long(sim)
    gaps = sim.gaps(load, began_s)
    assert p99(gaps) <= 1.1 * alone_s
    assert gaps[-1] <= alone_s + 1.3 * LARGE_S, "a piece further back in the text costs more than the one before it"
    assert sum(gaps) / len(gaps) <= 1.35 * alone_s
    assert reading_s < enough_s


@pytest.mark.parametrize("cost", [dense, routed, launched_one_by_one])
def test_alone_a_long_prompt_has_whole_steps(cost: Cost) -> None:
    sim = Sim(cost)
    read_long(sim)
    assert sim.steps <= LONG // BUDGET + 3


def test_ordinary_prompts_are_planned_as_if_there_were_no_pacing() -> None:
    sim = Sim(dense)
    for number in range(2000):
        sim.add(128 + number % 897, 20)
    sim.add(LONG_PROMPT_STEPS * BUDGET, 20)
    full = 0
    while sim.scheduler.has_work:
        sim.step()
        assert sim.scheduler.pacer is None
        full += sum(chunk.size for chunk in sim._launched) == BUDGET
    assert full > 100


def test_offline_no_prompt_is_read_slowly() -> None:
    """Nobody waits for the next token there: the whole budget is the prompts'."""
    sim, _ = under_load(dense)
    sim.scheduler.long_prompt = sim.scheduler.max_model_len
    steps = sim.steps
    read_long(sim)
    assert sim.steps - steps <= LONG // (BUDGET - LOAD) + 3


@pytest.mark.parametrize("first", ["long", "ordinary"])
def test_long_and_ordinary_prompts_take_turns(first: str) -> None:
    """Ordinary prompts arrive without end, more than a step holds; neither kind waits for the other to be over."""
    sim, _ = under_load(dense)
    if first == "ordinary":
        for _ in range(40):
            sim.add(1000, 4)
    long = sim.add(LONG, 10)
    ordinary = []
    while long.id not in sim.token_times:
        ordinary += [sim.add(1000, 4) for _ in range(6)]
        sim.step()
        assert sim.steps < 200, "the long prompt starves"
    assert sum(request.id in sim.token_times for request in ordinary) > 100, "ordinary prompts starve"


def crowded(decodes: int, tokens: int, position: float) -> float:
    return 0.002 + 1e-4 * decodes + 1e-5 * tokens


def pieces_of(sim: Sim, steps: int) -> list[int]:
    """Tokens of prompts in each of the next steps; those that a step left out are not counted."""
    pieces = []
    for _ in range(steps):
        sim.step()
        pieces.append(sum(chunk.size for chunk in sim._launched if chunk.size > 1))
    return [piece for piece in pieces if piece]


def test_pieces_grow_and_shrink_with_the_load() -> None:
    """What a step takes is looked at again and again, while it holds a piece nearly always."""
    sim, _ = under_load(crowded)
    sim.add(LONG, 10)
    few = pieces_of(sim, 50)[-1]
    crowd = [sim.add(100, 10_000) for _ in range(100)]
    many = pieces_of(sim, 60)[-1]
    for request in crowd:
        sim.scheduler.finish(request, "abort")
    few_again = pieces_of(sim, 130)[-1]
    assert many > 3 * few
    assert few_again == pytest.approx(few, rel=0.1)


def test_a_disturbed_step_changes_nothing() -> None:
    """Something else had the machine for a while, in one step of seven: most of the others' tokens come as before."""
    steps = 0

    def disturbed(decodes: int, tokens: int, position: float) -> float:
        nonlocal steps
        steps += 1
        return dense(decodes, tokens, position) * (3 if steps % 7 == 0 else 1)

    sim, load = under_load(disturbed)
    began_s = sim.now_s
    read_long(sim)
    gaps = sim.gaps(load, began_s)
    assert gaps[int(0.84 * len(gaps))] <= SLOWDOWN * dense(LOAD, 0, 0)


def test_pacing_ends_with_the_last_long_prompt() -> None:
    sim, _ = under_load(dense)
    first, second = sim.add(LONG, 5), sim.add(LONG, 5)
    for _ in range(20):
        sim.step()
    assert first.computed > second.computed
    sim.scheduler.finish(first, "abort")
    assert sim.scheduler.pacer is not None
    sim.scheduler.finish(second, "abort")
    assert sim.scheduler.pacer is None


def test_two_long_prompts_share_what_one_would_have() -> None:
    sim, load = under_load(dense)
    alone_s = p99(sim.gaps(load, sim.now_s / 2))
    began_s = sim.now_s
    sim.add(LONG, 10)
    read_long(sim)
    assert p99(sim.gaps(load, began_s)) <= SLOWDOWN * alone_s
