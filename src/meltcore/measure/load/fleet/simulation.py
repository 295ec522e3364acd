"""Simulates an ideal scheduler of one GPU: the bound with which an experiment on interference is compared.

The arrivals that were recorded meet the costs of steps that were measured. The GPU runs one step at a time. At the end
of each step the most urgent stream that has work is next, so urgent streams wait for one step of another at most.
Among equals it is the one whose last step ended longest ago. A step takes all rows of its stream, and all that wait.
Memory has no limit, steps of different models do not overlap, and nothing is lost between two steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meltcore.measure.documents.step_costs import StepCosts

# With more steps a simulation ends with an error: an experiment of 300 s has 300,000 steps of 1 ms.
MAX_STEPS = 5_000_000
# A closed loop is judged after this share of its time: all of its connections begin in one step.
WARM_UP_SHARE = 0.2


class Job(NamedTuple):
    """One request: its arrival in seconds after the release, its rows, its units, and the steps of each row.

    The arrivals of a closed loop are ignored.
    """

    arrived_s: float
    rows: int
    units: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class SimulatedLoad:
    """The load of one stream. `connections` of a closed loop repeat the jobs; an open loop has none.

    Streams with a lower `rank` go first. Each request takes `outside_s` outside of steps: in the API server, on the
    network and in the client. Until its first token it takes `first_outside_s` of these.
    """

    costs: StepCosts
    jobs: Sequence[Job]
    rank: int = 0
    connections: int = 0
    outside_s: float = 0.0
    first_outside_s: float = 0.0


@dataclass
class StreamTrace:
    """What the simulation of a stream has shown. Latencies are in seconds, one per ended request."""

    first_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    warm_row_steps: int = 0  # of its rows after the warm-up and before the end of sending
    steps: int = 0
    row_steps: int = 0
    units: float = 0.0
    read_bytes: float = 0.0  # at least, if the bytes of its steps are known
    busy_s: float = 0.0
    ended_s: float = 0.0  # of its last request


@dataclass
class _Begun:
    job: Job
    units_left: float


class _StreamState:
    """One stream during the simulation. All of its rows advance in each of its steps."""

    def __init__(self, load: SimulatedLoad, index: int, send_s: float) -> None:
        self.load, self.index, self.send_s = load, index, send_s
        self.trace = StreamTrace()
        self.last_end_s = -1.0
        self._rows = 0
        self._decoding: list[tuple[int, int, _Begun]] = []  # by the number of the step that ends each
        self._waiting: deque[_Begun] = deque()  # for their first step, or for more units of their prompts
        self._serial = itertools.count()
        if load.connections:
            self._source = itertools.cycle(load.jobs)
            first_jobs = itertools.islice(self._source, load.connections)
            self._arrivals = deque(job._replace(arrived_s=0.0) for job in first_jobs)
        else:
            self._arrivals = deque(sorted(load.jobs, key=lambda job: job.arrived_s))

    @property
    def has_work(self) -> bool:
        return bool(self._decoding or self._waiting)

    @property
    def next_arrival_s(self) -> float:
        return self._arrivals[0].arrived_s if self._arrivals else math.inf

    def admit(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0].arrived_s <= now_s:
            job = self._arrivals.popleft()
            self._waiting.append(_Begun(job, job.units))

    def step(self, now_s: float) -> float:
        """Run a step that begins at `now_s`, and return its end."""
        units, ended_prompts = self._fill_prompts()
        new_rows = sum(each.job.rows for each in ended_prompts)
        rows = max(1, self._rows + new_rows)  # a step may have nothing but a part of a prompt
        end_s = now_s + self.load.costs.step_s(rows, units)
        trace = self.trace
        trace.steps += 1
        trace.row_steps += rows
        trace.units += units
        trace.read_bytes += self.load.costs.step_bytes(rows + units)
        trace.busy_s += end_s - now_s
        if WARM_UP_SHARE * self.send_s < end_s <= self.send_s:
            trace.warm_row_steps += self._rows + new_rows
        for each in ended_prompts:
            trace.first_s.append(end_s - each.job.arrived_s + self.load.first_outside_s)
            self._rows += each.job.rows
            heapq.heappush(self._decoding, (trace.steps + each.job.steps - 1, next(self._serial), each))
        while self._decoding and self._decoding[0][0] <= trace.steps:
            self._end(heapq.heappop(self._decoding)[2], end_s)
        self.last_end_s = end_s
        return end_s

    def _fill_prompts(self) -> tuple[float, list[_Begun]]:
        """Give the units of one step to the requests in their order. Return the units, and the prompts that end."""
        units, ended = 0.0, []
        while self._waiting:
            first = self._waiting[0]
            taken = min(first.units_left, self.load.costs.max_units - units)
            units += taken
            first.units_left -= taken
            if first.units_left > 0:
                break
            ended.append(self._waiting.popleft())
        return units, ended

    def _end(self, begun: _Begun, end_s: float) -> None:
        job = begun.job
        self._rows -= job.rows
        # After the step of its prompt, each step of a row has one token more before it.
        self.trace.read_bytes += job.rows * self.load.costs.row_bytes(job.units / job.rows + 1, job.steps - 1)
        ended_s = end_s + self.load.outside_s  # as the client sees it
        self.trace.e2e_s.append(ended_s - job.arrived_s)
        self.trace.ended_s = ended_s
        if self.load.connections and ended_s < self.send_s:
            self._arrivals.append(next(self._source)._replace(arrived_s=ended_s))


def simulate(loads: Sequence[SimulatedLoad], send_s: float) -> list[StreamTrace]:
    """Return what each of the streams gets. Closed loops send for `send_s` seconds, and all requests end.

    Raises ValueError if a step takes no time, or after `MAX_STEPS` steps: such costs are wrong.
    """
    streams = [_StreamState(load, index, send_s) for index, load in enumerate(loads)]
    now_s = 0.0
    num_steps = 0
    while True:
        for stream in streams:
            stream.admit(now_s)
        chosen = choose_stream([stream for stream in streams if stream.has_work])
        if chosen is not None:
            began_s, now_s = now_s, chosen.step(now_s)
            num_steps += 1
            if now_s <= began_s:
                raise ValueError(f"a simulated step after {began_s:g} s took {now_s - began_s:g} s: time must advance")
            if num_steps > MAX_STEPS:
                raise ValueError(f"after {MAX_STEPS:,} steps the simulation is at {now_s:g} s: its steps are too short")
            continue
        next_s = min((stream.next_arrival_s for stream in streams), default=math.inf)
        if next_s == math.inf:
            return [stream.trace for stream in streams]
        now_s = next_s


def choose_stream(ready: Sequence[_StreamState]) -> _StreamState | None:
    """Return the stream whose step is next: the most urgent, and then the one whose last step ended first."""
    return min(ready, key=lambda stream: (stream.load.rank, stream.last_end_s, stream.index), default=None)


def overlap_shares(
    busy: tuple[StepCosts, StreamTrace],
    others: Sequence[tuple[StepCosts, StreamTrace]],
    send_s: float,
    peak: tuple[float, float],
) -> tuple[float | None, float | None]:
    """Return which share of its speed alone the bytes and the operations leave a busy stream at most.

    Each is what is left of `peak`, the bytes and the operations that the GPU reads and computes per second, if the
    other streams do what they do in the simulation of `send_s` seconds, and all steps overlap perfectly. A resource of
    which the needs of any stream are unknown is None.

    Args:
        busy: costs of the busy stream and its trace alone.
        others: costs of all other streams and their traces together.
        send_s: seconds of both.
        peak: bytes and operations per second.
    """
    shares: list[float | None] = []
    for resource, per_s in enumerate(peak):
        own, *needed = (_needs(costs, trace)[resource] for costs, trace in (busy, *others))
        known = [each for each in needed if each is not None]
        if own is None or len(known) < len(needed):
            shares.append(None)
        else:
            shares.append(min(1.0, max(0.0, per_s * send_s - sum(known)) / own) if own > 0 else 1.0)
    return shares[0], shares[1]


def _needs(costs: StepCosts, trace: StreamTrace) -> tuple[float | None, float | None]:
    """Return the bytes and the operations of a simulated stream. None if they are unknown."""
    work = trace.units + trace.row_steps
    return (
        trace.read_bytes if costs.weight_bytes else None,
        None if costs.unit_flops is None else work * costs.unit_flops,
    )
