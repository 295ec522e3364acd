"""Runs the requests of a task in continuous batches under a latency bound.

The engine decides what a task computes next. To add a task, write a subclass of `BatchTask` and messages as in
`protocol/batch.py`.

- Cost: positions that a request takes while it runs, such as frames or tokens (all beams counted). A batch costs its
  number of requests times the padded cost of its largest. The padded cost of all running requests never
  exceeds `BatchTask.max_cost`, which the task derives from its byte budget.
- Batches: whenever something fits, the first request in order (priority, deadline, arrival) begins, with others of a
  similar cost. There is no waiting for a batch to fill.
- Latency bound: a started batch is limited to what the engine, by its measured speed, computes within `max_start_s`,
  so that a request of high priority that arrives meanwhile waits at most that long. One request alone always begins.
- A task may finish all requests in one step (transcription), or one position of each per step (translation): `start`
  may be called while others run, and their results come from any later `step`.
- A request that is aborted while it waits never begins; one that runs is ended by `BatchTask.abort` before the next
  step. A request that has not begun at its deadline ends with "deadline".
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from meltcore.common.errors import ConfigError, RequestError, SleepError
from meltcore.common.tasks import DEFAULT, Task
from meltcore.engine.core.waiting import WaitingQueue, WaitingRequest, cost_buckets
from meltcore.engine.host.shell import Outputs
from meltcore.engine.host.sleep import SleepResult
from meltcore.engine.host.step_pacing import NO_WAIT, StepCounts, StepTurn
from meltcore.protocol.batch import BatchReady, BatchStats, TaskFinishReason, TaskRequest, TaskResult, TaskTimes
from meltcore.settings.config import EngineConfig

Request = TypeVar("Request", bound=TaskRequest)
Result = TypeVar("Result", bound=TaskResult)

MAX_START_S = 0.25
# Weight of the newest batch in the measured seconds per padded cost.
_SPEED_WEIGHT = 0.3


class BatchTask(ABC, Generic[Request, Result]):
    """Computes the requests of a batch engine. Requests begin and are aborted only between steps.

    `result` is the class of a request's results. `message` is the class of the message with the results of a step.
    """

    result: type[Any]
    message: type[Any]
    max_cost: int  # the padded cost of all requests that run together; fixed
    outside_bytes = 0  # of a budget, that its CUDA graphs take outside of torch's allocator

    @abstractmethod
    def cost(self, request: Request) -> int:
        """Return the number of positions of a request, at least 1.

        Raises RequestError if the request cannot be served.
        """

    @abstractmethod
    def start(self, requests: Sequence[Request], padded_cost: int) -> None:
        """Begin these requests, padded to `padded_cost`, beside the requests that run.

        The engine keeps no copy of the messages.
        """

    @abstractmethod
    def step(self) -> list[Result]:
        """Compute until there is a result, or one position of every running request. Return the new results.

        The last result of a request has a finish_reason. The engine sets the times.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End running requests without a result."""

    @abstractmethod
    def ready(self) -> BatchReady:
        """Return the message that reports that the engine can serve."""

    def ended(self, request_id: str, reason: TaskFinishReason, error: str | None) -> Result:
        """Return the result that ends a request for a `reason` of the engine, such as an abort."""
        result: Result = self.result(request_id=request_id, finish_reason=reason, error=error)
        return result

    def sleep(self, keep: Literal["host", "disk"]) -> SleepResult:  # noqa: ARG002 - of those that can
        """Release memory while nothing runs. Raises SleepError and changes nothing if this is not possible."""
        raise SleepError("the engine has no sleep mode")

    def wake(self) -> int:
        """Allocate memory again.

        Return the bytes of weights that were copied. Raises SleepError if this is not possible.
        """
        raise SleepError("the engine has no sleep mode")


class OneStepTask(BatchTask[Request, Result]):
    """The base class of tasks in which one step computes all requests that have begun, such as transcription."""

    _begun: Sequence[Any] = ()
    _batch_padded_cost = 0  # of each of them

    @abstractmethod
    def compute(self, requests: Sequence[Request], padded_cost: int) -> list[Result]:
        """Return one result per request. Requests are padded to `padded_cost`.

        A request without a result is computed again in the next step.
        """

    def start(self, requests: Sequence[Request], padded_cost: int) -> None:
        """Take requests into the next step."""
        self._batch_padded_cost = max(self._batch_padded_cost, padded_cost) if self._begun else padded_cost
        self._begun = [*self._begun, *requests]

    def step(self) -> list[Result]:
        """Compute the requests that have begun. Return no results if all of them were aborted."""
        results = self.compute(self._begun, self._batch_padded_cost) if self._begun else []
        self.abort([result.request_id for result in results])
        return results

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests that have begun."""
        self._begun = [request for request in self._begun if request.request_id not in request_ids]


def check_options(config: EngineConfig, task: Task) -> None:
    """Raise ConfigError if a setting of the generation engine that `task` does not have differs from its default."""
    for setting in msgspec.structs.fields(config):
        value = getattr(config, setting.name)
        default = setting.default if setting.default_factory is msgspec.NODEFAULT else setting.default_factory()
        is_of_generation = setting.name in (*DEFAULT.settings, "max_num_seqs")
        if is_of_generation and setting.name not in task.settings and value != default:
            flag = "--" + setting.name.replace("_", "-")
            raise ConfigError(
                f"{flag} {value}: {task.title} does not support it, and {config.model} is a model for {task.title}"
            )


class _Running(msgspec.Struct, frozen=True, gc=False):
    """A request that has begun, with its padded cost and its times."""

    padded_cost: int
    arrived_s: float
    started_s: float


class BatchEngine(Generic[Request, Result]):
    """Serves one task on one device for the process shell (`engine/host/shell.py`)."""

    def __init__(
        self,
        task: BatchTask[Request, Result],
        *,
        max_start_s: float = MAX_START_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an engine for `task`. `clock` returns monotonic seconds."""
        self.task = task
        self._max_start_s = self._start_limit_s = max_start_s
        self._clock = clock
        self._queue: WaitingQueue[Request] = WaitingQueue(cost_buckets(task.max_cost))
        self._running: dict[str, _Running] = {}
        self._running_cost = 0
        self._early_results: list[Result] = []
        self._s_per_cost: float | None = None
        self._expired = self._cost = self._padded_cost = 0
        self._step_counts = StepCounts()
        self._turn = NO_WAIT

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        return bool(self._running or self._early_results or len(self._queue))

    @property
    def outside_bytes(self) -> int:
        """The bytes of the engine's budget that torch does not allocate."""
        return self.task.outside_bytes

    def ready(self) -> BatchReady:
        """Return the message that reports that the engine can serve."""
        return self.task.ready()

    def add(self, message: Request) -> None:
        """Queue a request. Raises RequestError if the request cannot be served."""
        request_id = message.request_id
        if request_id in self._running or request_id in self._queue:
            raise RequestError(f"request id {request_id} is in use", param="request_id")
        cost = self.task.cost(message)
        if cost > self.task.max_cost:
            raise RequestError(f"the request takes {cost} positions; the engine computes at most {self.task.max_cost}")
        self._queue.add(message, cost)

    def refuse(self, request_id: str, error: str) -> Outputs:
        """Return the outputs that end a request which `add` has refused."""
        return self._outputs([self.task.ended(request_id, "error", error)], self._clock())

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with the reason "abort", which the next `step` reports. Ids of ended requests are ignored."""
        running = []
        for request_id in request_ids:
            if request_id in self._running:
                running.append(request_id)
                self._release(request_id)
            elif self._queue.remove(request_id) is None:
                continue
            self._early_results.append(self.task.ended(request_id, "abort", None))
        if running:
            self.task.abort(running)

    def take_turn(self, turn: StepTurn) -> None:
        """Start smaller batches while an engine of a higher class is using the same GPU."""
        self._turn = turn
        self._start_limit_s = min(self._max_start_s, turn.limit_s or self._max_start_s)
        self._step_counts.begin(turn.waited_s)

    def step(self) -> Outputs:
        """Begin the requests that fit, compute one step of the task, and return the new results."""
        began_s = self._clock()
        for request in self._queue.take_expired(began_s):
            self._expired += 1
            self._early_results.append(self.task.ended(request.request_id, "deadline", None))
        started_cost = self._start(began_s)
        results, self._early_results = self._early_results, []
        rows = len(self._running)
        if rows:
            results += [self._end_request(result) for result in self.task.step()]
        ended_s = self._clock()
        if rows:
            goes_on = bool(self._running or len(self._queue))
            self._step_counts.end(began_s, ended_s, rows, started_cost, self._turn, goes_on=goes_on)
        if started_cost:
            self._record_speed((ended_s - began_s) / started_cost)
        return self._outputs(results, ended_s)

    def check(self) -> None:
        """Do nothing, since there are no ranks that could fail."""

    def sleep(self, keep: Literal["host", "disk"]) -> SleepResult:
        """Release memory while there is no work. Raises SleepError and changes nothing if this is not possible."""
        return self.task.sleep(keep)

    def wake(self) -> int:
        """Allocate memory again.

        Return the bytes of weights that were copied. Raises SleepError if this is not possible.
        """
        return self.task.wake()

    def close(self) -> None:
        """Do nothing, since the end of the process releases the device."""

    def _outputs(self, results: list[Result], step_ended_s: float) -> Outputs:
        outputs: Outputs = self.task.message(results, self.stats(), step_ended_s)
        return outputs

    def stats(self) -> BatchStats:
        """Return the current gauges and counters."""
        return BatchStats(
            running=len(self._running),
            waiting=len(self._queue),
            waiting_cost=self._queue.cost,
            cost_total=self._cost,
            padded_cost_total=self._padded_cost,
            expired_total=self._expired,
            step_sums=self._step_counts.packed(),
        )

    def _start(self, now_s: float) -> int:
        """Begin the next batch if one fits. Return its padded cost."""
        free_cost = self.task.max_cost - self._running_cost
        bound = int(self._start_limit_s / self._s_per_cost) if self._s_per_cost else None
        batch = self._queue.take(free_cost, bound)
        if not batch:
            return 0
        padded_cost = max(waiting.padded_cost for waiting in batch)
        for waiting in batch:
            self._hold(waiting, padded_cost, now_s)
        self.task.start([waiting.request for waiting in batch], padded_cost)
        return padded_cost * len(batch)

    def _hold(self, waiting: WaitingRequest[Request], padded_cost: int, now_s: float) -> None:
        self._running[waiting.request.request_id] = _Running(padded_cost, waiting.request.arrived_s or now_s, now_s)
        self._running_cost += padded_cost
        self._cost += waiting.cost
        self._padded_cost += padded_cost

    def _release(self, request_id: str) -> _Running:
        running = self._running.pop(request_id)
        self._running_cost -= running.padded_cost
        return running

    def _end_request(self, result: Result) -> Result:
        """Return a result of the task. The last result of a request also gets the request's times."""
        if result.finish_reason is None:
            return result
        running = self._release(result.request_id)
        times = TaskTimes(running.arrived_s, running.started_s, self._clock())
        return msgspec.structs.replace(result, times=times)

    def _record_speed(self, s_per_cost: float) -> None:
        """Update the average speed of batches. The first batches, which load kernels, soon have little weight."""
        previous = s_per_cost if self._s_per_cost is None else self._s_per_cost
        self._s_per_cost = previous + _SPEED_WEIGHT * (s_per_cost - previous)
