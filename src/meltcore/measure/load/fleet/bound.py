"""Repeats an experiment on interference under an ideal scheduler, with measured arrivals and step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from meltcore.measure.documents.schema import SimulatedStream
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.load.fleet.fleet_gates import StreamSpec
from meltcore.measure.load.fleet.simulation import Job, SimulatedLoad, StreamTrace, overlap_shares, simulate
from meltcore.measure.load.record import RequestRecord

RANKS = {"interactive": 0, "standard": 1, "batch": 2}  # by the class of the requests of a model
# In a closed loop the time outside of steps changes the batches, and so the time of steps: the estimate is repeated.
_OUTSIDE_ROUNDS = 5
# The time outside of steps is at most the larger of these. With more of it wrong step costs would give the latency that
# was measured.
MAX_OUTSIDE_SHARE = 0.1  # of the mean latency
MAX_OUTSIDE_S = 0.005


@dataclass(frozen=True, kw_only=True)
class MeasuredStream:
    """What was measured of a stream: its step costs, its requests alone and together with all, and its time alone.

    `priority` is the class of the model's requests, as the server states it. Where it states none, streams with a limit
    of their latency are interactive, and others are batch.
    """

    spec: StreamSpec
    costs: StepCosts
    alone: Sequence[Job]
    together: Sequence[Job]
    alone_s: float
    alone_mean_ms: float | None
    alone_first_mean_ms: float | None = None
    priority: str | None = None

    def load(self, jobs: Sequence[Job]) -> SimulatedLoad:
        """Return the load of some requests, which take no time outside of steps."""
        spec, costs = self.spec, self.costs
        assumed = "interactive" if spec.max_simulated_p95_ratio or spec.max_p95_ratio else "batch"
        return SimulatedLoad(
            costs=costs,
            jobs=[job._replace(steps=max(1, round(costs.row_steps * job.steps))) for job in jobs],
            rank=RANKS.get(self.priority or assumed, RANKS[assumed]),
            connections=spec.concurrency or 0 if jobs else 0,
        )

    def run_alone(self) -> tuple[StreamTrace, SimulatedLoad]:
        """Simulate the stream alone. Return its trace, and its load with the seconds of a request outside of steps.

        These make the simulated means of the latencies the measured ones, up to a limit. They are 0 if the steps alone
        take longer than was measured.
        """
        load = self.load(self.alone)
        [trace] = simulate([load], self.alone_s)
        for _ in range(_OUTSIDE_ROUNDS if self.spec.concurrency else 1):
            load = replace(
                load,
                outside_s=_outside_s(load.outside_s, self.alone_mean_ms, trace.e2e_s),
                first_outside_s=_outside_s(load.first_outside_s, self.alone_first_mean_ms, trace.first_s),
            )
            [trace] = simulate([load], self.alone_s)
        return trace, load


def _outside_s(outside_s: float, measured_ms: float | None, simulated_s: Sequence[float]) -> float:
    """Return the seconds outside of steps, with which simulated latencies get nearest to the measured mean.

    `simulated_s` are the latencies with `outside_s`.
    """
    if measured_ms is None or not simulated_s:
        return outside_s
    limit_s = max(MAX_OUTSIDE_SHARE * measured_ms / 1000, MAX_OUTSIDE_S)
    return min(limit_s, max(0.0, outside_s + measured_ms / 1000 - mean(simulated_s)))


def jobs_of(records: Sequence[RequestRecord], released_s: float) -> list[Job]:
    """Return the answered requests of a stream as jobs.

    Their steps are the output tokens of a row, and 1 if the answers have none: `StepCosts.row_steps` is the factor.
    """
    jobs = []
    for record in records:
        if record.failure is not None or not record.ended_s:
            continue
        work = record.work
        if work is None:
            job = Job(0.0, 1, record.prompt_tokens - (record.cached_tokens or 0), max(1, record.output_tokens))
        else:
            rows = max(1, work.sentences)
            job = Job(0.0, rows, work.source_chars or work.audio_s, max(1, round(work.target_tokens / rows)))
        jobs.append(job._replace(arrived_s=max(0.0, record.intended_s - released_s)))
    return jobs


def simulate_experiment(streams: Sequence[MeasuredStream], send_s: float, gpu: GpuStepCosts) -> list[SimulatedStream]:
    """Return what an ideal scheduler gives each stream, alone and together."""
    alone = [stream.run_alone() for stream in streams]
    loads = [
        replace(stream.load(stream.together), outside_s=own.outside_s, first_outside_s=own.first_outside_s)
        for stream, (_, own) in zip(streams, alone, strict=True)
    ]
    traces = simulate(loads, send_s)
    peak = None if gpu.bytes_per_s is None or gpu.flops_per_s is None else (gpu.bytes_per_s, gpu.flops_per_s)
    found = []
    for index, (stream, load, trace) in enumerate(zip(streams, loads, traces, strict=True)):
        alone_trace = alone[index][0]
        throughput_ratio = bytes_ratio = flops_ratio = None
        if load.connections:
            # Of the same length as together: throughputs without the first steps are compared.
            [own] = simulate([replace(load, jobs=stream.load(stream.alone).jobs or load.jobs)], send_s)
            throughput_ratio = trace.warm_row_steps / own.warm_row_steps if own.warm_row_steps else None
            others = [(each.costs, traces[at]) for at, each in enumerate(loads) if at != index]
            if peak is not None:
                bytes_ratio, flops_ratio = overlap_shares((load.costs, own), others, send_s, peak)
        found.append(
            SimulatedStream(
                throughput_ratio=throughput_ratio,
                bytes_ratio=bytes_ratio,
                flops_ratio=flops_ratio,
                outside_ms=1000 * load.outside_s,
                first_outside_ms=1000 * load.first_outside_s,
                first_ms=distribution([1000 * each for each in trace.first_s]),
                e2e_ms=distribution([1000 * each for each in trace.e2e_s]),
                alone_e2e_ms=distribution([1000 * each for each in alone_trace.e2e_s]),
                alone_first_ms=distribution([1000 * each for each in alone_trace.first_s]),
                alone_busy_s=alone_trace.busy_s,
                alone_requests_per_s=len(alone_trace.e2e_s) / alone_trace.ended_s if alone_trace.ended_s else 0.0,
            )
        )
    return found
