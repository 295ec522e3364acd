"""The simulated bound of a shared GPU, against closed forms, traces by hand, and simulators with a fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import msgspec
import pytest

from meltcore.common.errors import ConfigError
from meltcore.common.files import SCHEMA_VERSION
from meltcore.engine.host.step_pacing import NO_WAIT, StepCounts
from meltcore.measure.documents.schema import LevelResult, StreamLoad
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.load.fleet import simulation
from meltcore.measure.load.fleet.bound import RANKS, MeasuredStream, simulate_experiment
from meltcore.measure.load.fleet.fleet_gates import ExperimentSpec, StreamSpec, simulation_error
from meltcore.measure.load.fleet.simulation import Job, SimulatedLoad, StreamTrace, overlap_shares, simulate
from meltcore.measure.load.fleet.step_costs import (
    AloneSteps,
    ModelCounters,
    alone_error,
    counted_between,
    fit_step_costs,
    merge_step_costs,
    parse_counters,
    read_step_costs,
)
from meltcore.protocol.generation import EngineStats
from meltcore.protocol.step_sums import StepKind, StepSums
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.config import PriorityClass


def costs(step_s: float = 1.0, **fields: Any) -> StepCosts:
    return StepCosts(decode_s=[(1, step_s)], **fields)


def poisson(rate: float, count: int, seed: int, *, steps: int = 1) -> list[Job]:
    source, now_s, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += source.expovariate(rate)
        jobs.append(Job(now_s, 1, 0.0, steps))
    return jobs


def one_by_one(costs: StepCosts) -> StepCosts:
    """Costs of a server that takes one request per step: each has a unit, which fills the step."""
    return StepCosts(decode_s=costs.decode_s, max_units=1.0)


def single(load: float) -> list[float]:
    """The waits of a queue with Poisson arrivals and one step of 1 s per request, at a load of 0 to 1."""
    jobs = [job._replace(units=1.0) for job in poisson(load, 20_000, seed=3)]
    [trace] = simulate([SimulatedLoad(costs=one_by_one(costs()), jobs=jobs)], 0.0)
    return [latency_s - 1.0 for latency_s in trace.e2e_s]


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_waits_of_single_requests_are_those_of_an_m_d_1_queue(load: float) -> None:
    waits = single(load)
    assert min(waits) == pytest.approx(0.0, abs=1e-6)
    assert mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.06)  # Pollaczek and Khinchine


@pytest.mark.parametrize(("connections", "step_s"), [(1, 0.01), (64, 0.02)])
def test_one_model_alone_has_its_own_speed(connections: int, step_s: float) -> None:
    alone = StepCosts(decode_s=[(1, 0.01), (64, 0.02)])
    [trace] = simulate([SimulatedLoad(costs=alone, jobs=[Job(0, 1, 0, 16)], connections=connections)], 100.0)
    assert trace.warm_row_steps / (100.0 * (1 - simulation.WARM_UP_SHARE)) == pytest.approx(
        connections / step_s, rel=0.01
    )
    assert trace.e2e_s[0] == pytest.approx(16 * step_s)
    assert trace.busy_s == pytest.approx(100.0, rel=0.01)


BUSY = SimulatedLoad(costs=costs(3.0), jobs=[Job(0, 1, 0, 3)], rank=1, connections=1)
URGENT = SimulatedLoad(costs=costs(1.0), jobs=[Job(4.0, 1, 0, 2), Job(6.5, 1, 0, 1)])


def by_hand() -> tuple[list[float], list[float]]:
    """The ends of urgent and of busy requests.

    The busy stream steps from 0 to 3 and from 3 to 6. The first urgent request comes at 4: it waits until 6, and takes
    until 7 and 8. The second comes at 6.5 and joins the step from 7 to 8. Then the busy request ends at 11.
    """
    urgent, busy = simulate([URGENT, BUSY], 10.0)
    return urgent.e2e_s, busy.e2e_s[:1]


EXPECTED = ([pytest.approx(4.0), pytest.approx(1.5)], [pytest.approx(11.0)])


def test_an_urgent_stream_waits_for_one_step_of_another() -> None:
    ends, busy = by_hand()
    assert (sorted(ends, reverse=True), busy) == EXPECTED
    urgent, other = simulate([URGENT, BUSY], 10.0)
    assert urgent.first_s == [pytest.approx(3.0), pytest.approx(1.5)]
    assert (urgent.steps, urgent.busy_s) == (2, pytest.approx(2.0))
    assert other.steps == 3


def no_preemption(ready: Sequence[simulation._StreamState]) -> simulation._StreamState | None:
    """Let a stream go on until it has no work: the newest step belongs to it."""
    return max(ready, key=lambda stream: (stream.last_end_s, -stream.load.rank), default=None)


def no_order(ready: Sequence[simulation._StreamState]) -> simulation._StreamState | None:
    return min(ready, key=lambda stream: stream.last_end_s, default=None)


@pytest.mark.parametrize("fault", [no_preemption, no_order])
def test_a_simulator_without_preemption_gives_another_trace(monkeypatch: pytest.MonkeyPatch, fault: object) -> None:
    monkeypatch.setattr(simulation, "choose_stream", fault)
    ends, busy = by_hand()
    assert (sorted(ends, reverse=True), busy) != EXPECTED


def test_batches_share_a_step() -> None:
    """Four requests that wait together end together; one after another they end at 1, 2, 3 and 4 s."""
    jobs = [Job(0.0, 1, 1.0, 1)] * 4
    [together] = simulate([SimulatedLoad(costs=costs(), jobs=jobs)], 0.0)
    assert together.e2e_s == [1.0] * 4
    [apart] = simulate([SimulatedLoad(costs=one_by_one(costs()), jobs=jobs)], 0.0)
    assert apart.e2e_s == [1.0, 2.0, 3.0, 4.0], "a scheduler that does not batch is not taken for one that does"


def test_a_long_prompt_takes_several_steps() -> None:
    """25 units in steps of 10 take three steps; the second prompt shares the third and the fourth."""
    by_tens = StepCosts(decode_s=[(1, 1.0)], prompt_s=[(5, 0.5), (10, 1.0)], max_units=10.0)
    [trace] = simulate([SimulatedLoad(costs=by_tens, jobs=[Job(0, 1, 25.0, 2), Job(0, 1, 10.0, 1)])], 0.0)
    assert trace.first_s == [pytest.approx(6.0), pytest.approx(7.5)]
    assert trace.e2e_s == [pytest.approx(7.5), pytest.approx(7.5)]
    assert trace.units == 35.0


def test_equals_take_turns() -> None:
    loads = [SimulatedLoad(costs=costs(), jobs=[Job(0, 1, 0, 3)]) for _ in range(2)]
    assert [trace.e2e_s for trace in simulate(loads, 0.0)] == [[5.0], [6.0]]


def test_step_costs_are_linear_between_points() -> None:
    measured = StepCosts(decode_s=[(2, 1.0), (4, 2.0)], prompt_s=[(10, 0.5), (20, 0.75), (30, 0.7)])
    assert [measured.step_s(rows, 0) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    added = [measured.step_s(2, units) - 1.0 for units in (5, 15, 25, 60)]
    assert added == pytest.approx([0.5, 0.625, 0.725, 0.7]), "more units than were measured cost no less"
    assert StepCosts(prompt_s=[(10, 0.5)]).step_s(4, 30) == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode_s": [(1, 0.1), (8, 0.1), (8, 0.2)]}, "the size 8 after 8: sizes must ascend"),
        ({"prompt_s": [(9, 0.1), (8, 0.2)]}, "the size 8 after 9: sizes must ascend"),
        ({"decode_s": [(1, 0.0)]}, "more than 0 s"),
        ({"prompt_s": [(1, 0.0)]}, "more than 0 s"),
        ({"decode_s": [(1, -0.1)]}, ">= 0"),
        ({"decode_s": [(1, 0.1)], "prompt_s": [(1, -0.1)]}, ">= 0"),
        ({"max_units": 0}, "> 0"),
        ({"row_steps": 0}, "> 0"),
        ({"weight_bytes": [(1, -1.0)]}, ">= 0"),
        ({"context_bytes": [(8, 1.0), (8, 2.0)]}, "context_bytes has the size 8 after 8"),
    ],
)
def test_a_file_with_impossible_step_costs_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """Two equal sizes were a ZeroDivisionError, and with a step of no time the simulation did not end."""
    path = tmp_path / "costs.json"
    document = {"document": "step-costs", "schema_version": SCHEMA_VERSION, "gpus": {"a": {"models": {"m": fields}}}}
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(ConfigError, match=message):
        read_step_costs(path)
    decode = {"decode_s": [(1, 0.1)], "prompt_s": [(1, 0.0)]}  # prompts that add nothing
    path.write_bytes(msgspec.json.encode({**document, "gpus": {"a": {"models": {"m": decode}}}}))
    assert read_step_costs(path).gpus["a"].models["m"].step_s(1, 5) == 0.1


def test_a_simulation_whose_time_does_not_advance_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder has costs of units alone: a request without units takes no time."""
    encoder = SimulatedLoad(costs=StepCosts(prompt_s=[(1, 0.1)]), jobs=[Job(0, 1, 0.0, 1)], connections=1)
    with pytest.raises(ValueError, match="time must advance"):
        simulate([encoder], 1.0)
    monkeypatch.setattr(simulation, "MAX_STEPS", 50)
    with pytest.raises(ValueError, match="after 50 steps"):
        simulate([SimulatedLoad(costs=costs(1e-9), jobs=[Job(0, 1, 0.0, 1)], connections=1)], 1.0)
    assert len(simulate([SimulatedLoad(costs=costs(), jobs=[Job(0, 1, 0.0, 50)])], 1.0)[0].e2e_s) == 1


def test_bytes_and_operations_bound_what_overlaps() -> None:
    """Of 100 bytes per second others read 30: a busy stream that reads 100 alone keeps 70 %."""
    weights = [(1, 1.0)]
    busy = (costs(weight_bytes=weights, unit_flops=1.0), StreamTrace(read_bytes=100.0, row_steps=20))
    others = [
        (costs(weight_bytes=weights, unit_flops=5.0), StreamTrace(read_bytes=20.0, row_steps=3)),
        (costs(weight_bytes=weights, unit_flops=5.0), StreamTrace(read_bytes=10.0, row_steps=1, units=1.0)),
    ]
    assert overlap_shares(busy, others, 1.0, (100.0, 1e9)) == (pytest.approx(0.7), 1.0)
    assert overlap_shares(busy, others, 1.0, (1e9, 30.0)) == (1.0, pytest.approx(0.25))
    assert overlap_shares(busy, others, 1.0, (1e9, 20.0)) == (1.0, 0.0)
    of_speech = (costs(weight_bytes=weights), StreamTrace(read_bytes=10.0, row_steps=1))
    assert overlap_shares(busy, [*others, of_speech], 1.0, (100.0, 1e9)) == (pytest.approx(0.6), None)
    assert overlap_shares(busy, [*others, (costs(), StreamTrace())], 1.0, (100.0, 1e9)) == (None, None)
    assert overlap_shares((costs(), StreamTrace()), others, 1.0, (100.0, 1e9)) == (None, None)


def test_steps_read_the_experts_of_their_tokens_and_the_keys_of_their_rows() -> None:
    """A step reads 10 bytes with one token and 40 with four; a row 2 for each token before it, at most eight."""
    reads = costs(weight_bytes=[(1, 10.0), (4, 40.0)], context_bytes=[(0, 0.0), (8, 16.0), (9, 16.0)])
    assert [reads.step_bytes(tokens) for tokens in (0.5, 2, 4)] == [10.0, 20.0, 40.0]
    [trace] = simulate([SimulatedLoad(costs=reads, jobs=[Job(0, 1, 3.0, 1)])], 0.0)
    assert trace.read_bytes == 40.0, "a row and three tokens; keys of a prompt in its own step are in no memory yet"
    [trace] = simulate([SimulatedLoad(costs=reads, jobs=[Job(0, 1, 3.0, 4)])], 0.0)
    assert trace.read_bytes == 40.0 + 3 * 10.0 + 8.0 + 10.0 + 12.0
    assert sum(reads.row_bytes(context, 1) for context in range(4, 13)) == 8 + 10 + 12 + 14 + 5 * 16
    assert reads.row_bytes(4, 9) == 9 * (8 + 16) / 2, "where a window ends, less than all: the bound stays a bound"


def test_bytes_of_every_other_stream_count_and_the_class_of_the_server_decides_who_is_first() -> None:
    """Streams of batch without limits were left out of the bytes, and limits made a stream urgent."""
    busy = StreamSpec(name="busy", model="a", concurrency=1, max_p95_ratio={"e2e": 2.0})
    jobs = [Job(0, 1, 0.0, 10)]
    reads = costs(0.01, weight_bytes=[(1, 10.0)])

    def stream(spec: StreamSpec, jobs: list[Job], priority: str) -> MeasuredStream:
        return MeasuredStream(
            spec=spec, costs=reads, alone=jobs, together=jobs, alone_s=1.0, alone_mean_ms=None, priority=priority
        )

    other = msgspec.structs.replace(busy, name="other", max_p95_ratio={})
    gpu = GpuStepCosts(bytes_per_s=1500.0, flops_per_s=1e12)
    shares = [
        [(each.throughput_ratio, each.bytes_ratio) for each in simulate_experiment(streams, 0.95, gpu)]
        for streams in ([stream(busy, jobs, a), stream(other, jobs, b)] for a, b in (("", ""), ("batch", "standard")))
    ]
    assert [share for share, _ in shares[0]] == [pytest.approx(1.0, abs=0.05), 0.0]
    assert [share for share, _ in shares[1]] == [0.0, pytest.approx(1.0, abs=0.05)]
    # Each reads 1,000 bytes alone. The GPU reads 1,425 in this time, and the first stream takes 1,000 of them.
    assert [shares[0][1][1], shares[1][0][1]] == [pytest.approx(0.425)] * 2
    assert list(RANKS) == list(get_args(PriorityClass))


def decode(steps: int, rows: int) -> StepSums:
    """The sums of steps that cost 4 ms, and 0.5 ms for each row."""
    return StepSums(steps, steps * (0.004 + rows * 0.0005), steps * rows, 0.0)


def prompts(steps: int, rows: int, tokens: int) -> StepSums:
    """The sums of steps that also cost 1 ms, and 0.1 ms for each prompt token."""
    return StepSums(steps, steps * (0.005 + rows * 0.0005 + tokens * 0.0001), steps * rows, steps * tokens)


STEPS = {
    StepKind("decode", 1): decode(100, 1),
    StepKind("decode", 4): decode(50, 6),
    StepKind("prompt", 32): prompts(10, 2, 40),
    StepKind("prompt", 64): prompts(20, 6, 100),
    StepKind("prompt", 2048): StepSums(1, 0.6, 1, 3000),  # of a shape that was new
}


def test_step_costs_are_those_behind_the_metrics() -> None:
    """The engine counts 5,400 prompt tokens for 2,700 units of its clients: two tokens each."""
    fitted = fit_step_costs(AloneSteps(sums=STEPS, row_tokens=1081, units=2700.0))
    assert fitted is not None
    assert fitted.decode_s == [(1.0, pytest.approx(0.0045)), (6.0, pytest.approx(0.007))]
    assert fitted.prompt_s == [(20.0, pytest.approx(0.005)), (50.0, pytest.approx(0.011))]
    assert fitted.max_units == 2048.0, "twice the largest kind of step"
    assert fitted.row_steps == pytest.approx((100 + 300 + 20 + 120 + 1) / 1081)
    for rows, tokens in ((1, 0), (6, 0), (2, 40), (6, 100), (3, 70), (8, 160)):
        kind = prompts(1, rows, tokens) if tokens else decode(1, rows)
        assert fitted.step_s(rows, tokens / 2) == pytest.approx(kind.seconds)
    assert fit_step_costs(AloneSteps()) is None, "a server without metrics"
    with pytest.raises(ValueError, match="more than 0 s"):
        fit_step_costs(AloneSteps(sums={StepKind("decode", 1): StepSums(9, 0.0, 9, 0)}, row_tokens=9))


def test_units_that_cost_less_in_several_steps_cost_no_more() -> None:
    """One step of a new shape took 0.4 s: on an H200 such steps gave urgent streams a bound of 69 instead of 32 ms."""
    sums = {StepKind("prompt", 32): StepSums(9, 0.09, 9, 9 * 40), StepKind("prompt", 64): StepSums(5, 0.48, 5, 5 * 80)}
    fitted = fit_step_costs(AloneSteps(sums=sums, row_tokens=14, units=760.0))
    assert fitted is not None
    assert fitted.prompt_s == [(40.0, pytest.approx(0.01)), (80.0, pytest.approx(0.02))]


def test_rows_take_as_many_steps_as_their_tokens_took() -> None:
    alone = AloneSteps()
    for tokens in (3, 1):
        alone.add({StepKind("prompt", 64): StepSums(10, 0.1, 14, 700)}, [Job(0.0, 2, 350.0, tokens)])
    fitted = fit_step_costs(alone)
    assert fitted is not None
    assert fitted.row_steps == pytest.approx(28 / 8)
    spec = StreamSpec(name="a", model="a", rate=1.0)
    jobs = [Job(0.0, 2, 350.0, tokens) for tokens in (1, 2, 4)]
    stream = MeasuredStream(spec=spec, costs=fitted, alone=jobs, together=jobs, alone_s=1.0, alone_mean_ms=None)
    assert [job.steps for job in stream.load(jobs).jobs] == [4, 7, 14]
    assert (fitted.decode_s, fitted.prompt_s) == ([], [(35.0, pytest.approx(0.01))])
    assert fitted.is_measured, "an encoder alone has no decode steps"
    assert fitted.step_s(3, 70.0) == pytest.approx(0.01)


def test_costs_of_a_file_stay_where_none_were_measured() -> None:
    known = StepCosts(decode_s=[(1, 1.0), (5, 2.0), (64, 9.0)], prompt_s=[(9, 0.5)], max_units=64.0)
    known.weight_bytes = [(1, 1e9)]
    measured = StepCosts(decode_s=[(6, 3.0)], prompt_s=[(64, 1.0)], max_units=128.0)
    merged = merge_step_costs(known, measured)
    assert merged.decode_s == [(1, 1.0), (6, 3.0), (64, 9.0)]
    assert merged.prompt_s == [(9, 0.5), (64, 1.0)]
    assert (merged.max_units, merged.weight_bytes) == (128.0, [(1, 1e9)])
    assert merge_step_costs(None, measured) == measured
    bytes_and_flops: dict[str, Any] = {"weight_bytes": [(1, 1e9)], "context_bytes": [(0, 5.0)], "unit_flops": 2.0}
    needs = StepCosts(**bytes_and_flops)  # as benchmarks/floors.py writes them before any measurement
    limited = StepCosts(decode_s=[(6, 3.0)], max_units=512.0)
    assert merge_step_costs(needs, limited) == msgspec.structs.replace(limited, **bytes_and_flops)


def test_metrics_are_read_by_model_and_kind() -> None:
    stats = ServerStats((1, 1))
    counts = StepCounts()
    for ended_s, rows, tokens in ((1.0, 3, 0), (1.5, 2, 0), (2.5, 2, 40)):
        counts.end(0.75, ended_s, rows, tokens, NO_WAIT, goes_on=True)
    for name, value in (("accepted", 3), ("prompt_tokens", 40), ("generation_tokens", 7)):
        stats.model(0).add(name, value)
    stats.model(0).record_step(EngineStats(step_sums=counts.packed()), 1.0)
    metrics = Metrics(stats, lambda: {'a"b': stats.model(0), "idle": stats.model(1)})
    found = parse_counters(metrics.text().decode())
    expected = {StepKind("decode", 2): StepSums(2, 0.75, 5, 0), StepKind("prompt", 32): StepSums(1, 1.0, 2, 40)}
    assert found == {'a"b': ModelCounters(expected, 3, 40, 7), "idle": ModelCounters()}, "times have no gaps"
    later_steps = {
        **expected,
        StepKind("decode", 2): StepSums(4, 1.0, 9, 0),
        StepKind("paced", 0): StepSums(1, 0.5, 1, 0),
    }
    later = ModelCounters(later_steps, 5, 60, 9)
    steps = {StepKind("decode", 2): StepSums(2, 0.25, 4, 0), StepKind("paced", 0): StepSums(1, 0.5, 1, 0)}
    assert counted_between(found['a"b'], later) == ModelCounters(steps, 2, 20, 2)
    assert counted_between(found['a"b'], replace(later, steps={})) is None, "the engine has restarted"
    assert counted_between(later, found['a"b']) is None
    assert parse_counters('meltcore:engine_steps_total{model_name="a",phase="draft",size="4"} 1\n') == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"failed": 1}, "1 of 20 requests failed"),
        ({"own": None}, "a counter of the server fell"),
        ({"requests_accepted": 22}, "the server counted 22 requests, and this client 20"),
        ({"requests_accepted": 0}, "the server counted 0 requests"),
        ({"prompt_tokens": 1400}, "1,400 prompt tokens, and this client 1,280"),
        ({"generation_tokens": 940}, "940 output tokens, and this client 1,020"),
        ({"other_s": 0.1}, "b ran steps of 0.1 s meanwhile"),
        ({"requests_accepted": 21, "prompt_tokens": 1340, "generation_tokens": 970, "other_s": 0.04}, ""),
    ],
)
def test_steps_that_are_not_those_of_this_client_give_no_costs(changes: dict[str, Any], reason: str) -> None:
    """Two loads at a time gave each row 1.8 steps for each of its tokens, and 59 lost answers of 60 gave it 500."""
    failed, other_s = changes.pop("failed", 0), changes.pop("other_s", 0.0)
    level = LevelResult(
        concurrency=1, requests=20, succeeded=20 - failed, failed=failed, peak_in_flight=1, duration_s=1.0,
        output_tokens_per_s=1.0, total_tokens_per_s=1.0, prompt_tokens=1280, output_tokens=1020,
    )  # fmt: skip
    jobs = [Job(0.0, 1, 64.0, 51)] * 20
    steps = {StepKind("decode", 1): StepSums(1000, 1.0, 1000, 0)}
    own = ModelCounters(steps, 20, 1280, 1020)
    counted = {
        "a": None if "own" in changes else replace(own, **changes),
        "b": ModelCounters({StepKind("decode", 1): StepSums(10, other_s, 10, 0)}),
    }
    found = alone_error(StreamLoad(name="a", model="a", level=level), jobs, counted)
    assert (reason in found) if reason else (found == ""), found


def served(spec: StreamSpec, costs: StepCosts, jobs: list[Job], outside_s: float) -> MeasuredStream:
    """A stream whose mean alone is that of an ideal scheduler with these costs."""
    load = MeasuredStream(spec=spec, costs=costs, alone=jobs, together=jobs, alone_s=20.0, alone_mean_ms=None).load
    [trace] = simulate([replace(load(jobs), outside_s=outside_s)], 20.0)
    return MeasuredStream(
        spec=spec, costs=costs, alone=jobs, together=jobs, alone_s=20.0, alone_mean_ms=1000 * mean(trace.e2e_s)
    )


def test_time_outside_of_steps_is_found_and_not_spent_on_the_gpu() -> None:
    """A closed loop of four connections with 10 ms outside of steps of 10 ms leaves some of the GPU to others."""
    alone = StepCosts(decode_s=[(1, 0.010), (4, 0.012)])
    spec = StreamSpec(name="busy", model="a", concurrency=4)
    busy = served(spec, alone, [Job(0, 1, 0.0, steps) for steps in (9, 13, 11)], 0.010)
    trace, load = busy.run_alone()
    assert load.outside_s == pytest.approx(0.010, rel=0.1)
    assert mean(trace.e2e_s) == pytest.approx(busy.alone_mean_ms / 1000, rel=0.01)
    assert len(trace.e2e_s) / trace.ended_s == pytest.approx(4 / mean(trace.e2e_s), rel=0.02), "Little's law"
    slower = replace(busy, alone_mean_ms=1.0)
    assert slower.run_alone()[1].outside_s == 0.0, "steps that take longer than was measured leave no time"


def level_of(trace: StreamTrace) -> StreamLoad:
    """What a client measured that got a simulated trace."""
    e2e_ms, first_ms = (distribution([1000 * each for each in seconds]) for seconds in (trace.e2e_s, trace.first_s))
    num = len(trace.e2e_s)
    level = LevelResult(
        concurrency=0, requests=num, succeeded=num, failed=0, peak_in_flight=1, duration_s=trace.ended_s,
        output_tokens_per_s=1.0, total_tokens_per_s=1.0, prompt_tokens=1, output_tokens=1,
        ttft_ms=first_ms, e2e_ms=e2e_ms,
    )  # fmt: skip
    return StreamLoad(name="chat", model="a", level=level, steps_s=trace.busy_s)


@pytest.mark.parametrize(("decode_s", "outside_s"), [(0.008, 0.010), (0.001, 0.001)], ids=["long", "short"])
def test_wrong_step_costs_give_no_bound(decode_s: float, outside_s: float) -> None:
    """The time outside of steps made up for costs of a tenth: p50 alone was off by 1 %, and all limits were judged."""
    chats = [job._replace(units=500.0, steps=16) for job in poisson(2.0, 150, seed=5)]
    true = StepCosts(decode_s=[(1, decode_s), (8, 1.1 * decode_s)], prompt_s=[(500, 5 * decode_s)])
    spec = StreamSpec(name="chat", model="a", rate=2.0)
    experiment = ExperimentSpec(name="x", streams=[spec, spec])
    [trace] = simulate([SimulatedLoad(costs=true, jobs=chats, outside_s=outside_s, first_outside_s=0.001)], 75.0)
    load = level_of(trace)

    def error_with(decode: float, prompt: float) -> str:
        wrong = StepCosts(
            decode_s=[(rows, decode * seconds) for rows, seconds in true.decode_s],
            prompt_s=[(units, prompt * seconds) for units, seconds in true.prompt_s],
        )
        stream = MeasuredStream(
            spec=spec, costs=wrong, alone=chats, together=chats, alone_s=75.0,
            alone_mean_ms=load.level.e2e_ms.mean, alone_first_mean_ms=load.level.ttft_ms.mean,
        )  # fmt: skip
        [ideal] = simulate_experiment([stream], 75.0, GpuStepCosts())
        assert ideal.outside_ms <= max(5.0, 0.1 * (load.level.e2e_ms.mean or 0.0)) + 1e-9
        return simulation_error(experiment, [load], [ideal])

    assert error_with(1.0, 1.0) == ""
    for factor in (0.1, 0.5, 0.75, 1.3):
        assert "the simulation is no bound: of chat alone it gives" in error_with(factor, factor), factor
    assert error_with(0.8, 1.0 + 0.2 * 16 / 5), "the first token is wrong, and the rest is right"


def test_a_simulation_alone_gives_its_latency_and_its_rate() -> None:
    spec = StreamSpec(name="busy", model="a", concurrency=4)
    busy = served(spec, StepCosts(decode_s=[(1, 0.01)]), [Job(0, 1, 0.0, 4)], 0.0)
    [ideal] = simulate_experiment([busy], 20.0, GpuStepCosts())
    assert ideal.alone_e2e_ms.p50 == pytest.approx(40.0)
    assert ideal.alone_requests_per_s == pytest.approx(100.0, rel=0.01)
    assert ideal.throughput_ratio == pytest.approx(1.0)
    assert (ideal.outside_ms, ideal.bytes_ratio, ideal.flops_ratio) == (0.0, None, None)
    assert ideal.alone_busy_s == pytest.approx(20.0, rel=0.01)
