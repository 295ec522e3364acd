"""Pacing of a very long prompt under load, against models of the step time by a step's contents."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import PagePool
from meltcore.engine.core.pacing import LARGE_CHUNK_ADDED_S, MAX_SLOWDOWN, MIN_LIMIT, PromptSpeed
from meltcore.engine.core.request import Request
from meltcore.engine.core.scheduler import LONG_PROMPT_STEPS, Scheduler
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

BUDGET, LONG = 8192, 200_000
LOAD = 8

# Seconds of a step: of the sequences that decode, and of prompt tokens at their positions.
Cost = Callable[[int, int, float], float]


def dense(decodes: int, tokens: int, position: float) -> float:
    """The time of a chunk grows with its tokens and with its position in the prompt."""
    return 0.004 + 1e-5 * decodes + tokens * (5e-6 + 2e-11 * position)


def routed(decodes: int, tokens: int, position: float) -> float:
    """Experts of one GPU: few tokens read few of their weights, some dozens nearly all."""
    return 0.002 + 0.014 * (1 - (1 - 1 / 32) ** (decodes + tokens)) + tokens * (2e-5 + 1e-10 * position)


def launched_one_by_one(decodes: int, tokens: int, position: float) -> float:
    """A step with a chunk has the cost of its launches; a step that only decodes is one graph."""
    return 0.002 + (0.012 if tokens else 0.0) + tokens * 1e-5


class Sim:
    """A scheduler one step ahead of a device whose step times are given by `cost`."""

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
        self.scheduler.update(done, [[7] for chunk in done if chunk.samples])
        if self.scheduler.pacer is not None and done:
            self.scheduler.record_step_time(done, took_s)
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
    """Add a long prompt and step until its first token; returns the time."""
    began_s = sim.now_s
    request = sim.add(LONG, 10)
    while request.id not in sim.token_times:
        sim.step()
        assert sim.steps < 100_000, "the long prompt starves"
    return sim.now_s - began_s


@pytest.mark.parametrize("cost", [dense, routed])
def test_long_prompt_at_most_doubles_the_itl_of_others(cost: Cost) -> None:
    sim, load = under_load(cost)
    alone_s = p99(sim.gaps(load, sim.now_s / 2))
    began_s = sim.now_s
    read_long(sim)
    assert p99(sim.gaps(load, began_s)) <= MAX_SLOWDOWN * alone_s


def test_chunks_are_as_large_as_the_slowdown_allows() -> None:
    alone = Sim(dense)
    alone_s = read_long(alone)
    sim, _ = under_load(dense)
    assert alone_s < read_long(sim) < 2.5 * alone_s


@pytest.mark.slow
@pytest.mark.parametrize(("cost", "enough_s"), [(routed, 66), (launched_one_by_one, 12)])
def test_few_large_chunks_run_when_the_smallest_is_too_slow(cost: Cost, enough_s: float) -> None:
    """enough_s: for chunks of a tenth of a second and the steps between them, 67 of 3,000 tokens or 25 of 8,192."""
    sim, load = under_load(cost)
    alone_s = p99(sim.gaps(load, sim.now_s / 2))
    began_s = sim.now_s
    reading_s = read_long(sim)
    gaps = sim.gaps(load, began_s)
    assert p99(gaps) <= 1.1 * alone_s
    assert gaps[-1] <= alone_s + 1.3 * LARGE_CHUNK_ADDED_S, (
        "a piece further back in the text costs more than the one before it"
    )
    assert sum(gaps) / len(gaps) <= 1.35 * alone_s
    assert reading_s < enough_s


@pytest.mark.parametrize("cost", [dense, routed, launched_one_by_one])
def test_long_prompt_alone_fills_whole_steps(cost: Cost) -> None:
    sim = Sim(cost)
    read_long(sim)
    assert sim.steps <= LONG // BUDGET + 3


def test_ordinary_prompts_are_not_paced() -> None:
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


def test_offline_prompts_are_not_paced() -> None:
    """No sequence decodes there, so prompts get the whole budget."""
    sim, _ = under_load(dense)
    sim.scheduler.long_prompt = sim.scheduler.max_model_len
    steps = sim.steps
    read_long(sim)
    assert sim.steps - steps <= LONG // (BUDGET - LOAD) + 3


@pytest.mark.parametrize("first", ["long", "ordinary"])
def test_long_and_ordinary_prompts_both_advance(first: str) -> None:
    """More ordinary prompts arrive than a step holds; long and ordinary prompts both advance."""
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


def test_chunks_grow_and_shrink_with_the_load() -> None:
    """The step time without a chunk is measured repeatedly, although nearly every step has a chunk."""
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


def test_disturbed_steps_do_not_change_the_chunk_size() -> None:
    """One step in seven is slowed by another program; most tokens of other sequences keep their pace."""
    steps = 0

    def disturbed(decodes: int, tokens: int, position: float) -> float:
        nonlocal steps
        steps += 1
        return dense(decodes, tokens, position) * (3 if steps % 7 == 0 else 1)

    sim, load = under_load(disturbed)
    began_s = sim.now_s
    read_long(sim)
    gaps = sim.gaps(load, began_s)
    assert gaps[int(0.84 * len(gaps))] <= MAX_SLOWDOWN * dense(LOAD, 0, 0)


def test_pacing_ends_with_the_last_long_prompt() -> None:
    sim, _ = under_load(dense)
    first, second = sim.add(LONG, 5), sim.add(LONG, 5)
    for _ in range(20):
        sim.step()
    assert first.num_computed_tokens > second.num_computed_tokens
    sim.scheduler.finish(first, "abort")
    assert sim.scheduler.pacer is not None
    sim.scheduler.finish(second, "abort")
    assert sim.scheduler.pacer is None


def test_two_long_prompts_share_one_allotment() -> None:
    sim, load = under_load(dense)
    alone_s = p99(sim.gaps(load, sim.now_s / 2))
    began_s = sim.now_s
    sim.add(LONG, 10)
    read_long(sim)
    assert p99(sim.gaps(load, began_s)) <= MAX_SLOWDOWN * alone_s


def test_steps_are_limited_to_a_time_while_the_gpu_is_shared() -> None:
    """Prompts get as many tokens as fit; sequences that decode are not left out; without a limit all is as before."""
    sim, _ = under_load(dense)
    speed = PromptSpeed(BUDGET)
    assert speed.tokens_in(0.02) == BUDGET // 8  # nothing measured
    for number in range(40):
        sim.add(3000 + number, 4)
    for limit_s in (None, 0.02, 1e-6, 1.0):
        sim.scheduler.max_prompt_tokens = BUDGET if limit_s is None else speed.tokens_in(limit_s)
        for _ in range(3):
            sim.step()
            prompts = [chunk.size for chunk in sim._launched if chunk.size > 1]
            assert len(sim._launched) - len(prompts) >= LOAD, "a sequence that decodes was left out"
            if limit_s in (None, 1.0):
                assert sum(prompts) > 0.99 * BUDGET
            else:
                assert sum(prompts) == sim.scheduler.max_prompt_tokens
            took_s = sim.seconds(sim._launched)
            speed.record(took_s, sum(prompts))
            if limit_s == 0.02:
                assert 0.01 < took_s < 0.024
    speed.record(9.0, MIN_LIMIT - 1)  # says more about what else the step held
    assert speed.tokens_in(1.0) == BUDGET
