"""Repeats an experiment on interference under an ideal scheduler, with measured arrivals and step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from meltcore.measure.documents.schema import SimulatedStream
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.load.fleet.fleet_gates import StreamSpec
from meltcore.measure.load.fleet.simulation import Job, SimulatedLoad, StreamTrace, overlap_share, simulate
from meltcore.measure.load.record import RequestRecord

URGENT, BUSY = 0, 1  # ranks


def jobs_of(records: Sequence[RequestRecord], released_s: float) -> list[Job]:
    """Return the answered requests of a stream as jobs. The steps of tasks without output tokens are 0: unknown."""
    jobs = []
    for record in records:
        if record.failure is not None or not record.ended_s:
            continue
        work = record.work
        if work is None:
            job = Job(0.0, 1, record.prompt_tokens - (record.cached_tokens or 0), max(1, record.output_tokens))
        else:
            job = Job(0.0, max(1, work.sentences), work.source_chars or work.audio_s, 0)
        jobs.append(job._replace(arrived_s=max(0.0, record.intended_s - released_s)))
    return jobs


def simulate_experiment(
    specs: Sequence[StreamSpec],
    costs: Sequence[StepCosts],
    alone: Sequence[Sequence[Job]],
    together: Sequence[Sequence[Job]],
    alone_mean_ms: Sequence[float | None],
    send_s: float,
    gpu: GpuStepCosts,
) -> list[SimulatedStream]:
    """Return what an ideal scheduler gives each stream.

    Streams with a limit of their latency are urgent, others are not. Jobs are given by stream, and so are the measured
    means of the end-to-end latency alone.
    """
    loads = [
        SimulatedLoad(
            costs=each,
            jobs=_with_steps(jobs, each),
            rank=URGENT if spec.max_simulated_p95_ratio or spec.max_p95_ratio else BUSY,
            connections=spec.concurrency or 0 if jobs else 0,
        )
        for spec, each, jobs in zip(specs, costs, together, strict=True)
    ]
    own_loads = [
        replace(load, jobs=_with_steps(jobs, load.costs) or load.jobs) for load, jobs in zip(loads, alone, strict=True)
    ]
    traces = simulate(loads, send_s)
    own_traces = [simulate([load], send_s)[0] for load in own_loads]
    peak = None if gpu.bytes_per_s is None or gpu.flops_per_s is None else (gpu.bytes_per_s, gpu.flops_per_s)
    found = []
    for index, (load, trace) in enumerate(zip(loads, traces, strict=True)):
        outside_s = _outside_s(own_traces[index], alone_mean_ms[index])
        busy_alone = own_traces[index] if load.connections else None
        others = [(each.costs, traces[at]) for at, each in enumerate(loads) if at != index and each.rank == URGENT]
        found.append(
            SimulatedStream(
                throughput_ratio=_ratio(trace, busy_alone),
                overlap_ratio=(
                    None
                    if peak is None or busy_alone is None
                    else overlap_share(load, busy_alone, others, send_s, peak)
                ),
                outside_ms=1000 * outside_s,
                first_ms=distribution([1000 * (each + outside_s) for each in trace.first_s]),
                e2e_ms=distribution([1000 * (each + outside_s) for each in trace.e2e_s]),
            )
        )
    return found


def _with_steps(jobs: Sequence[Job], costs: StepCosts) -> list[Job]:
    steps = 1 if costs.row_steps is None else max(1, round(costs.row_steps))
    return [job if job.steps else job._replace(steps=steps) for job in jobs]


def _ratio(together: StreamTrace, alone: StreamTrace | None) -> float | None:
    if alone is None or not alone.warm_row_steps:
        return None
    return together.warm_row_steps / alone.warm_row_steps


def _outside_s(alone: StreamTrace, measured_mean_ms: float | None) -> float:
    """Return the seconds of a request outside of steps: in the API server, on the network and in the client."""
    if measured_mean_ms is None or not alone.e2e_s:
        return 0.0
    return max(0.0, measured_mean_ms / 1000 - mean(alone.e2e_s))
