"""BatchEngine with a scripted task: order, shapes, cost, latency bound, deadlines, aborts, random arrivals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from meltcore.common.errors import ConfigError, RequestError
from meltcore.common.tasks import Task, tasks
from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.host.step_pacing import StepTurn
from meltcore.engine.tasks.batch_engine import BatchEngine, BatchTask, check_options
from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import EngineOutputs
from meltcore.protocol.step_sums import StepKind, sums_by_kind
from meltcore.settings.config import EngineConfig


class Ask(TaskRequest, tag="ask", array_like=True, frozen=True, kw_only=True):
    cost: int


class Answer(TaskResult, tag="answer", array_like=True, frozen=True, kw_only=True):
    pass


class Answers(EngineOutputs[Answer, BatchStats], tag="answers", array_like=True, frozen=True):
    pass


class ScriptedTask(BatchTask[Ask, Answer]):
    """Takes `steps` steps per request, and a time in proportion to the padded cost that has begun."""

    result, message = Answer, Answers

    def __init__(self, max_cost: int = 1000, steps: int = 1, s_per_cost: float = 0.0) -> None:
        self.max_cost, self.steps, self.s_per_cost = max_cost, steps, s_per_cost
        self.now_s = 0.0
        self.batches: list[tuple[int, list[str]]] = []
        self.running: dict[str, int] = {}
        self.padded_costs: dict[str, int] = {}
        self.aborted: list[str] = []

    def cost(self, request: Ask) -> int:
        if request.cost < 1:
            raise RequestError("cost must be at least 1")
        return request.cost

    def start(self, requests: Sequence[Ask], padded_cost: int) -> None:
        self.batches.append((padded_cost, [request.request_id for request in requests]))
        assert all(request.cost <= padded_cost for request in requests)
        self.running.update({request.request_id: self.steps for request in requests})
        self.padded_costs.update({request.request_id: padded_cost for request in requests})
        self.now_s += self.s_per_cost * padded_cost * len(requests)
        assert sum(self.padded_costs[request_id] for request_id in self.running) <= self.max_cost

    def step(self) -> list[Answer]:
        assert self.running
        self.running = {request_id: left - 1 for request_id, left in self.running.items()}
        done = [request_id for request_id, left in self.running.items() if left == 0]
        for request_id in done:
            del self.running[request_id]
        return [Answer(request_id=request_id, finish_reason="stop") for request_id in done]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            del self.running[request_id]

    def ready(self) -> BatchReady:
        raise NotImplementedError


def engine_of(task: ScriptedTask, **limits: float) -> BatchEngine[Ask, Answer]:
    return BatchEngine(task, clock=lambda: task.now_s, **limits)


def drain(engine: BatchEngine[Ask, Answer]) -> list[tuple[str, str | None]]:
    """Run all steps; returns (request id, finish reason) in order."""
    ended = []
    for _ in range(10_000):
        if not engine.has_work:
            break
        outputs = engine.step()
        ended += [(output.request_id, output.finish_reason) for output in outputs.outputs]
    assert not engine.has_work
    return ended


def test_priority_then_deadline_then_arrival_decide() -> None:
    task = ScriptedTask(max_cost=100)
    engine = engine_of(task)
    for name, priority, deadline_s in [("a", 1, None), ("b", 0, None), ("c", 0, 9.0), ("d", 0, 5.0), ("e", -1, None)]:
        engine.add(Ask(request_id=name, priority=priority, deadline_s=deadline_s, cost=90))
    assert [name for name, _ in drain(engine)] == ["e", "d", "c", "b", "a"]


def test_batch_has_requests_of_similar_cost_and_never_exceeds_the_cost() -> None:
    task = ScriptedTask(max_cost=640)
    engine = engine_of(task)
    for i, cost in enumerate([150, 20, 155, 90, 100, 640]):
        engine.add(Ask(request_id=str(i), cost=cost))
    drain(engine)
    # 160 is the shape of the first. 90 and 100 are padded to 96 and 112; 20 would be padded more than twice.
    assert task.batches == [(160, ["0", "2", "4", "3"]), (32, ["1"]), (640, ["5"])]
    assert engine.stats().padded_cost_total == 4 * 160 + 32 + 640
    assert engine.stats().cost_total == 150 + 20 + 155 + 90 + 100 + 640


def test_buckets_pad_by_at_most_a_quarter() -> None:
    shapes = cost_buckets(5000)
    assert shapes == sorted(set(shapes))
    assert shapes[-1] == 5000
    assert max(later / earlier for earlier, later in itertools.pairwise(shapes)) <= 1.25


def test_started_batches_keep_the_latency_bound() -> None:
    """After the first batch the speed is known: a batch of many requests takes at most 0.1 s, one request may more."""
    task = ScriptedTask(max_cost=100_000, s_per_cost=1e-3)
    engine = engine_of(task, max_start_s=0.1)
    for i in range(50):
        engine.add(Ask(request_id=str(i), cost=32))
    engine.add(Ask(request_id="long", priority=1, cost=5000))
    drain(engine)
    first, *others, last = task.batches
    assert len(first[1]) == 50  # the speed was unknown
    assert (others, last[1]) == ([], ["long"])
    for i in range(50):
        engine.add(Ask(request_id=str(i), cost=32))
    drain(engine)
    assert {len(names) for _, names in task.batches[2:]} <= {3, 2}  # 3 x 32 positions take 0.096 s


def test_batches_are_smaller_while_the_gpu_is_shared() -> None:
    task = ScriptedTask(max_cost=100_000, s_per_cost=1e-3)
    engine = engine_of(task, max_start_s=0.2)
    engine.add(Ask(request_id="first", cost=32))
    drain(engine)
    for limit_s, sizes in [(0.1, {3}), (None, {6}), (0.5, {6}), (0.001, {1})]:
        engine.take_turn(StepTurn(0.0, limit_s))
        for number in range(6):
            engine.add(Ask(request_id=f"{number}", cost=32))
        first = len(task.batches)
        drain(engine)
        assert {len(names) for _, names in task.batches[first:]} == sizes


def test_requests_begin_while_others_run() -> None:
    task = ScriptedTask(max_cost=64, steps=3)
    engine = engine_of(task)
    engine.add(Ask(request_id="a", cost=32))
    engine.step()
    engine.add(Ask(request_id="b", cost=32))
    engine.add(Ask(request_id="c", cost=32))
    engine.step()
    assert set(task.running) == {"a", "b"}
    assert engine.stats().running == 2
    assert engine.stats().waiting_cost == 32
    assert drain(engine) == [("a", "stop"), ("b", "stop"), ("c", "stop")]
    stats = engine.stats()
    # Two steps have one row and one has two; a prompt of 32 begins in each of the other three.
    sums = sums_by_kind(stats.step_sums)
    counts = {kind: (each.steps, each.rows, each.prompt_tokens) for kind, each in sums.items()}
    assert counts == {("decode", 1): (2, 2, 0), ("decode", 2): (1, 2, 0), ("prompt", 32): (3, 5, 96)}
    engine.take_turn(StepTurn(0.0, 1.0))
    engine.add(Ask(request_id="d", cost=32))
    drain(engine)
    paced = sums_by_kind(engine.stats().step_sums)
    each = paced.pop(StepKind("paced", 0))
    assert (each.steps, each.rows, each.prompt_tokens) == (3, 3, 32)
    assert paced == sums, "a limited step is of no other kind"


def test_large_request_is_not_starved_by_small_ones() -> None:
    task = ScriptedTask(max_cost=100, steps=2)
    engine = engine_of(task)
    engine.add(Ask(request_id="small 0", cost=30))
    engine.step()
    engine.add(Ask(request_id="large", cost=100))
    for i in range(1, 20):
        engine.add(Ask(request_id=f"small {i}", cost=30))
        engine.step()
    assert task.batches[1] == (100, ["large"])


def test_aborted_requests_end_and_release_their_cost() -> None:
    task = ScriptedTask(max_cost=32, steps=100)
    engine = engine_of(task)
    for name in ("running", "waiting", "next"):
        engine.add(Ask(request_id=name, cost=32))
    engine.step()
    engine.abort(["running", "waiting", "unknown"])
    outputs = engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs.outputs] == [
        ("running", "abort"),
        ("waiting", "abort"),
    ]
    assert task.aborted == ["running"]
    assert set(task.running) == {"next"}


def test_deadline_ends_what_has_not_begun() -> None:
    task = ScriptedTask(max_cost=32, steps=2, s_per_cost=0.1)
    engine = engine_of(task)
    engine.add(Ask(request_id="a", cost=32, deadline_s=1.0))  # begins in time, at 0 s
    engine.add(Ask(request_id="b", cost=32, deadline_s=2.0))
    engine.add(Ask(request_id="c", cost=32))
    assert dict(drain(engine)) == {"a": "stop", "b": "deadline", "c": "stop"}
    assert engine.stats().expired_total == 1


def test_wrong_requests_are_refused() -> None:
    engine = engine_of(ScriptedTask(max_cost=100))
    engine.add(Ask(request_id="a", cost=1))
    for request, message in [
        (Ask(request_id="a", cost=1), "id a is in use"),
        (Ask(request_id="b", cost=0), "at least 1"),
        (Ask(request_id="c", cost=101), "takes 101 positions; the engine computes at most 100"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.add(request)
    (refusal,) = engine.refuse("b", "why").outputs
    assert (refusal.request_id, refusal.finish_reason, refusal.error) == ("b", "error", "why")


@pytest.mark.parametrize("seed", range(5))
def test_every_request_ends_exactly_once_under_random_arrivals(seed: int) -> None:
    rng = random.Random(seed)
    task = ScriptedTask(max_cost=500, steps=rng.choice([1, 4]), s_per_cost=1e-4)
    engine = engine_of(task, max_start_s=0.02)
    ended: dict[str, str | None] = {}
    added: list[str] = []
    for round_number in range(300):
        for _ in range(rng.randrange(4)):
            name = f"r{len(added)}"
            deadline_s = None if rng.random() < 0.7 else task.now_s + rng.random() * 0.2
            request = Ask(request_id=name, cost=rng.randint(1, 500), priority=rng.randint(0, 2), deadline_s=deadline_s)
            engine.add(request)
            added.append(name)
        if added and rng.random() < 0.2:
            engine.abort(rng.sample(added, k=1))
        if round_number % 3 == 0 or rng.random() < 0.5:
            for output in engine.step().outputs:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
                assert (output.times is not None) == (output.finish_reason == "stop")
    for name, reason in drain(engine):
        assert name not in ended
        ended[name] = reason
    assert set(ended) == set(added)
    assert engine.stats().waiting_cost == engine.stats().running == engine._running_cost == 0
    assert len({*ended.values()}) == 3


@pytest.mark.parametrize(
    "task", [task for task in tasks().values() if not task.has_context], ids=lambda task: task.name
)
def test_settings_of_generation_are_refused_unless_they_are_the_defaults(task: Task) -> None:
    check_options(EngineConfig(model="x"), task)
    with pytest.raises(ConfigError, match=f"--max-num-seqs 7: {task.title} does not support it"):
        check_options(EngineConfig(model="x", max_num_seqs=7), task)
    with pytest.raises(ConfigError, match="--hf-overrides"):
        check_options(EngineConfig(model="x", hf_overrides={"a": 1}), task)
