"""The simulated bound of a shared GPU, against closed forms, traces by hand, and simulators with a fault."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean

import msgspec
import pytest

from meltcore.measure.documents.step_costs import UNLIMITED, StepCosts
from meltcore.measure.load.fleet import simulation
from meltcore.measure.load.fleet.simulation import Job, SimulatedLoad, StreamTrace, overlap_share, simulate
from meltcore.measure.load.fleet.step_costs import (
    AloneSteps,
    StepSums,
    fit_step_costs,
    merge_step_costs,
    parse_step_sums,
    windows_of,
)


def costs(step_s: float = 1.0, **fields: float) -> StepCosts:
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
    prompts = StepCosts(decode_s=[(1, 1.0)], unit_s=0.1, max_units=10.0)
    [trace] = simulate([SimulatedLoad(costs=prompts, jobs=[Job(0, 1, 25.0, 2), Job(0, 1, 10.0, 1)])], 0.0)
    assert trace.first_s == [pytest.approx(6.0), pytest.approx(7.5)]
    assert trace.e2e_s == [pytest.approx(7.5), pytest.approx(7.5)]
    assert trace.units == 35.0


def test_equals_take_turns() -> None:
    loads = [SimulatedLoad(costs=costs(), jobs=[Job(0, 1, 0, 3)]) for _ in range(2)]
    assert [trace.e2e_s for trace in simulate(loads, 0.0)] == [[5.0], [6.0]]


def test_step_costs_are_linear_between_points() -> None:
    measured = StepCosts(decode_s=[(2, 1.0), (4, 2.0)], row_s=0.25, unit_s=0.01)
    assert [measured.step_s(rows, 0) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 2.5]
    assert measured.step_s(2, 50) == pytest.approx(1.5)


def test_bytes_and_operations_bound_what_overlaps() -> None:
    """Of 100 bytes per second an urgent stream reads 30: a busy one that reads 100 alone keeps 70 %."""
    busy = SimulatedLoad(costs=costs(step_bytes=10.0, unit_flops=1.0), jobs=[], rank=1)
    alone = StreamTrace(steps=10, row_steps=20)
    urgent = (costs(step_bytes=6.0, unit_flops=5.0), StreamTrace(steps=5, row_steps=5))
    assert overlap_share(busy, alone, [urgent], 1.0, (100.0, 1e9)) == pytest.approx(0.7)
    assert overlap_share(busy, alone, [urgent], 1.0, (1e9, 30.0)) == pytest.approx(0.25)
    assert overlap_share(busy, alone, [urgent], 1.0, (1e9, 20.0)) == 0.0
    assert overlap_share(busy, alone, [(costs(), StreamTrace(steps=1))], 1.0, (100.0, 1e9)) is None


def window(steps: int, rows: int, tokens: int) -> StepSums:
    """The sums of steps that cost 4 ms, 0.5 ms for each row and 0.1 ms for each prompt token."""
    return StepSums(steps, steps * 0.004 + rows * 0.0005 + tokens * 0.0001, rows, tokens)


WINDOWS = [window(100, 100, 400), window(50, 200, 0), window(40, 680, 900), window(2, 60, 100)]


def test_step_costs_are_those_behind_the_metrics() -> None:
    """The engine counts 1,400 prompt tokens for 700 units of its clients: each unit costs twice a token."""
    fitted = fit_step_costs(AloneSteps(windows=WINDOWS, rows=1, units=700.0))
    assert fitted is not None
    assert fitted.decode_s == [
        (1.0, pytest.approx(0.0045)),
        (4.0, pytest.approx(0.006)),
        (pytest.approx(740 / 42), pytest.approx(0.004 + 0.0005 * 740 / 42)),
    ]
    assert (fitted.row_s, fitted.unit_s) == (pytest.approx(0.0005), pytest.approx(0.0002))
    assert fitted.max_units == pytest.approx(25.0), "of 50 tokens in a step"
    assert fitted.row_steps is None
    assert fit_step_costs(AloneSteps()) is None, "a server without metrics"


def test_rows_of_other_tasks_take_the_mean_number_of_steps() -> None:
    alone = AloneSteps()
    alone.add(WINDOWS, [Job(0.0, 2, 350.0, 0)] * 2)
    fitted = fit_step_costs(alone)
    assert fitted is not None
    assert fitted.row_steps == pytest.approx(1040 / 4)
    without_tokens = AloneSteps(windows=[StepSums(10, 0.1, 10, 0)], rows=10, units=100.0)
    fitted = fit_step_costs(without_tokens)
    assert fitted is not None
    assert (fitted.step_s(1, 50.0), fitted.max_units) == (pytest.approx(0.01), UNLIMITED)


def test_costs_of_a_file_stay_where_none_were_measured() -> None:
    known = StepCosts(decode_s=[(1, 1.0), (5, 2.0), (64, 9.0)], unit_s=0.5, step_bytes=1e9)
    measured = StepCosts(decode_s=[(6, 3.0)])
    merged = merge_step_costs(known, measured)
    assert merged.decode_s == [(1, 1.0), (6, 3.0), (64, 9.0)]
    assert (merged.unit_s, merged.step_bytes) == (0.5, 1e9)
    assert merge_step_costs(None, measured) == measured
    needs = StepCosts(step_bytes=1e9, unit_flops=2.0)  # as benchmarks/floors.py writes them before any measurement
    limited = StepCosts(decode_s=[(6, 3.0)], max_units=512.0)
    assert merge_step_costs(needs, limited) == msgspec.structs.replace(limited, step_bytes=1e9, unit_flops=2.0)


def test_metrics_are_read_by_model() -> None:
    text = "".join(
        f'meltcore:engine_{name}_total{{model_name="{model}"}} {value}\n'
        for model, names in (("a", ("steps", "step_seconds", "step_rows", "step_prompt_tokens")), ("b", ("steps",)))
        for value, name in enumerate(names, 1)
    )
    text += 'meltcore:engine_paced_steps_total{model_name="a"} 9\nmeltcore:wakes_total{model_name="a"} 9\n'
    sums = parse_step_sums(text)
    assert sums == {"a": StepSums(1, 2, 3, 4)}
    later = {"a": StepSums(3, 2.5, 7, 4)}
    assert windows_of([sums, {}, later, later], "a") == [StepSums(2, 0.5, 4, 0)]
    assert windows_of([sums], "b") == []
