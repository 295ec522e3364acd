"""The base class of the supervisor's models. Their processes are Meltcore's engines or upstream servers.

A model starts its processes, drains them, puts them to sleep and replaces them.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from meltcore.common.errors import EngineDeadError, MeltcoreError
from meltcore.fleet.run.engines import Launcher
from meltcore.fleet.run.replica import SERVED, BaseReplica, EngineExit, ReplicaEvent, Starts
from meltcore.fleet.run.restart_policy import RestartPolicy
from meltcore.fleet.run.start_gate import StartGate
from meltcore.fleet.run.worker_pool import WorkerPool
from meltcore.protocol.channel import EndRequests, StatusChanged
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.stats import ModelStats
from meltcore.settings.config import ModelStatus, PriorityClass
from meltcore.settings.fleet_spec import TimeoutsSection

POLL_S = 0.02  # while draining
ROOM_POLL_S = 5.0  # until an engine is tried again that no node has room for
REPLICA_DEAD = "the replica that worked on this has died; the others go on, so the request can be sent again"
REPLICA_REPLACED = "the engine that worked on this is replaced, and its time to finish is over"
_R = TypeVar("_R", bound=BaseReplica[Any])


async def wait_while(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until `condition` is false, for at most `limit_s`. Return whether it is. It may read shared memory."""
    deadline_s = time.monotonic() + limit_s
    while condition() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - no event tells of shared memory
        await asyncio.sleep(POLL_S)
    return not condition()


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """The objects of a server that all its models share."""

    pool: WorkerPool
    gate: StartGate
    log: Log
    report: Callable[[str], None]  # prints a line
    sockets: Path
    next_engine: Callable[[], int]  # numbers engine processes, whose sockets are in a folder of that number
    launcher: Launcher
    policy: RestartPolicy
    timeouts: TimeoutsSection  # of other servers
    log_folder: Path | None  # with a file per engine; None: our standard error


class SupervisedModel(ABC, Generic[_R]):
    """Runs the replicas of one model, from their first start until the server ends or the model is removed."""

    def __init__(
        self,
        number: int,
        names: tuple[str, ...],
        replicas: Sequence[_R],
        stats: ModelStats,
        parts: ServerContext,
        *,
        is_sleepable: bool,
        priority_class: PriorityClass,
    ) -> None:
        self.number, self.stats, self.replicas = number, stats, replicas
        self.names, self.name = names, names[0]
        self.is_sleepable, self.priority_class = is_sleepable, priority_class
        self.status: ModelStatus = "loading"
        self.reason = "loading: starting"
        self.all_ended = asyncio.Event()  # no replica will serve again
        self.loading: asyncio.Task[None] | None = None  # of a fleet's model, held for as long as it lives
        self.prepared = asyncio.Event()  # it is known what a fleet's model needs to load, or that it cannot load
        self.may_run = asyncio.Event()  # cleared while the model sleeps: no process is started
        self.changing = asyncio.Lock()  # held to put it to sleep, to wake it, or to replace its processes
        if not is_sleepable:
            self.may_run.set()
        self._parts = parts
        self._starts = Starts(replicas)
        self._draining = False
        for replica in replicas:
            stats.mark_replica_dead(replica.index)

    # --- what differs

    @property
    @abstractmethod
    def is_loading(self) -> bool:
        """Whether the model is loaded for the first time."""

    @abstractmethod
    async def load(self) -> None:
        """Start all replicas and wait for them. Raises MeltcoreError if the model cannot serve."""

    @abstractmethod
    def update_status(self, pause_s: float | None = None) -> None:
        """Update the model's status from its replicas.

        `pause_s` is the number of seconds until an ended process is started again.
        """

    @abstractmethod
    async def sleep_process(self, replica: _R, keep: Literal["host", "disk"], limit_s: float) -> bool:
        """Put the process of a drained replica to sleep within `limit_s` seconds. Return whether it sleeps."""

    @abstractmethod
    async def wake_process(self, replica: _R, limit_s: float) -> str:
        """Wake the process of a sleeping replica. Return the reason if it still sleeps, or else ""."""

    @abstractmethod
    async def _start(self, replica: _R) -> Any:
        """Start a process for a replica, wait until it can serve, and return its limits.

        Raises MeltcoreError if the process cannot serve.
        """

    @abstractmethod
    def _on_ready(self, replica: _R, result: Any) -> None:
        """Store that a replica serves. `result` is the return value of `_start`."""

    @abstractmethod
    def _tell_end(self, replica: _R, *, was_serving: bool, num_open: int, plan: str) -> None:
        """Log and print how a process has ended or could not start, and whether it is started again.

        `num_open` is the number of requests that were open.
        """

    def _is_final(self, replica: _R, error: MeltcoreError) -> bool:  # noqa: ARG002 - another try may help
        """Return whether another start would fail with the same error."""
        return False

    def describe(self, replica: int, default: str) -> str:  # noqa: ARG002 - errors of other servers name them
        """Return the name of a replica for messages. If messages need no name, return `default`."""
        return default

    # --- starting and ending

    async def prepare(self) -> None:
        """Find out what the model needs to load, before `load`. Raises ConfigError if it cannot load."""
        self.prepared.set()

    async def _start_all(self) -> None:
        """Start all replicas and wait for them. Raises MeltcoreError if the policy decides that the model cannot serve.

        After an error, replicas that have started or are pending continue.
        """
        for replica in self.replicas:
            replica.begin("replace")
            replica.task = asyncio.create_task(self._keep(replica))
        await self._starts.wait_all(self._start_error)

    def _start_error(self) -> MeltcoreError | None:
        errors = [(self.describe(each.index, ""), each.error) for each in self.replicas if each.error is not None]
        return self._parts.policy.start_error(errors, len(self.replicas))

    async def load_or_fail(self) -> None:
        """Load the model. If it cannot serve, keep it in the server with the status failed."""
        try:
            await self.load()
        except MeltcoreError as error:
            await self._stop_all()
            self.fail(str(error))

    async def _keep(self, replica: _R) -> None:
        """Start the process of a replica, and start it again after each exit for as long as the policy decides to."""
        while True:
            await self.may_run.wait()
            try:
                result = await self._start(replica)
            except MeltcoreError as error:
                failure, is_final = error, self._is_final(replica, error)
                await replica.process.stop()
            else:
                self._on_ready(replica, result)
                ready_s = time.monotonic()
                failure, is_final = EngineDeadError(await replica.process.wait()), False
                replica.served_s += time.monotonic() - ready_s
            pause_s = self._after_end(replica, str(failure), is_final=is_final)
            await replica.process.leave()
            if pause_s is None:
                self._give_up(replica, failure)
                return
            await asyncio.gather(asyncio.sleep(pause_s), replica.process.wait_freed())  # not beside one that has memory
            replica.restarts += 1

    def _after_end(self, replica: _R, reason: str, *, is_final: bool) -> float | None:
        """Fail the requests of a process that has ended.

        Return the seconds until the next start, or None if there is no next start.
        """
        policy, now_s, is_evicted = self._parts.policy, time.monotonic(), replica.process.is_evicted
        was_serving, num_open = replica.state in SERVED, round(self.stats.open_requests(replica.index))
        replica.reason = reason
        if not is_evicted:
            replica.deaths.append(EngineExit(now_s, replica.node, replica.served_s))
        pause_s = None
        if not is_final and not self._draining:
            pause_s = ROOM_POLL_S if is_evicted else policy.pause_s(replica.deaths)
        self.stats.set("start_s", now_s + (pause_s or 0.0))
        if pause_s is None:
            event: ReplicaEvent = "gave up"
            plan = "it is not started again"
        elif self.may_run.is_set():
            event, plan = "unplaced" if is_evicted else "died", f"it is started again in {pause_s:g} s"
        else:
            event, plan, pause_s = "died asleep", "it is started again when it is wanted", 0.0
        replica.apply(event)
        self._starts.note()  # a pending one is not waited for
        if event != "died asleep":  # the requests that wait for it wait on
            self.stats.mark_replica_dead(replica.index)
        if self.stats.live_replicas():
            lost = REPLICA_DEAD
        elif self._draining:  # the process ends on purpose, and another one may replace the model
            lost = self.reason
        else:
            lost = policy.death_text(pause_s, self._parts.pool.num_models)
        self._end_requests(replica, lost)
        self.update_status(pause_s)
        self._tell_end(replica, was_serving=was_serving, num_open=num_open, plan=plan)
        return pause_s

    def _note_started(self, replica: _R, result: Any) -> None:
        """Store that a replica serves.

        `result` is the return value of `_start`, of which only the first one is kept.
        """
        if replica.started is not None and not replica.started.done():
            replica.started.set_result(result)
        self._starts.note()

    def _give_up(self, replica: _R, failure: MeltcoreError) -> None:
        """Store that a replica is not started again."""
        if replica.started is not None and not replica.started.done():
            replica.started.set_exception(failure)
        self._starts.note()
        if all(each.state == "failed" for each in self.replicas):
            self.all_ended.set()

    async def fail_loading(self, reason: str) -> None:
        """End the start of a model that takes too long to load for the first time."""
        await self._cancel_loading()
        await self._stop_all()
        self.fail(reason)

    async def _cancel_loading(self) -> None:
        if self.loading is not None:
            self.loading.cancel()
            await asyncio.gather(self.loading, return_exceptions=True)

    def fail(self, reason: str) -> None:
        """Refuse requests from now on. `reason` says why the model could not be loaded."""
        if not self._draining:
            self._parts.log.write("model_failed", model=self.name, why=reason)
            self._parts.report(f"{self.name} could not be loaded: {reason}")
            self.set_status("failed", f"{self.name} could not be loaded: {self._shortened(reason)}")

    def _shortened(self, reason: str) -> str:
        """Return `reason` shortened to the length that answers to refused requests may have."""
        return reason

    def drain(self, reason: str) -> None:
        """Refuse new requests, and load no further. Open requests continue, and an ended process stays ended."""
        self._draining = True
        self.prepared.set()  # others do not wait for it any more
        if self.loading is not None:
            self.loading.cancel()
        self.set_status("draining", reason)

    async def stop(self) -> None:
        """End all processes now, and the start of a model that is loading."""
        self._draining = True
        await self._cancel_loading()
        await self._stop_all()

    def kill(self) -> None:
        """End all processes without waiting."""
        for replica in self.replicas:
            replica.process.kill()

    async def _stop_all(self) -> None:
        tasks = [replica.task for replica in self.replicas if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.process.stop() for replica in self.replicas))

    async def _end_process(self, replica: _R) -> None:
        if replica.task is not None:
            replica.task.cancel()
            await asyncio.gather(replica.task, return_exceptions=True)
        self._end_requests(replica, REPLICA_REPLACED)
        await replica.process.stop()
        await replica.process.wait_freed()  # another one is started

    def _end_requests(self, replica: _R, message: str) -> None:
        """End the requests of a replica with the error `message`.

        The process of the replica has ended or is about to end.
        """

    # --- replacing

    async def replace_engines(self, drain_limit_s: float) -> None:
        """Replace one process after another, each after its requests have ended. Raises MeltcoreError if a start fails.

        Requests that take longer than `drain_limit_s` are ended with an error. While no other replica serves, new
        requests are refused with 503. A model that sleeps stays asleep: its processes are started when a request needs
        the model.
        """
        async with self.changing:
            is_asleep = not self.may_run.is_set()
            for replica in self.replicas:
                await (self.end_engine(replica) if is_asleep else self._replace(replica, drain_limit_s))
            if is_asleep:
                self.update_status()

    async def _replace(self, replica: _R, drain_limit_s: float) -> None:
        if replica.state == "ready":
            replica.apply("drain")
            self.stats.drain_replica(replica.index)
            self.update_status()
            await wait_while(lambda: self.stats.open_requests(replica.index) and replica.task, drain_limit_s)
        self.stats.mark_replica_dead(replica.index)
        await self._end_process(replica)
        replica.begin("replace")
        replica.restarts += 1
        self.all_ended.clear()
        replica.task = asyncio.create_task(self._keep(replica))
        await self._starts.wait(replica)

    # --- sleeping

    def begin_sleep(self) -> None:
        """Make new requests wait from now on, and prevent starts of processes."""
        self.may_run.clear()
        for replica in self.replicas:
            if replica.state != "failed":
                self.stats.mark_replica_asleep(replica.index)
        self.update_status()

    def begin_wake(self) -> None:
        """Allow starts of processes. The caller wakes the processes that sleep."""
        self.set_status("waking", f"{self.name} is being woken")
        self.may_run.set()

    def end_wake(self, took_s: float) -> None:
        """Count a wake-up that took `took_s`."""
        self.stats.count_wake(took_s)
        self.update_status()

    async def end_engine(self, replica: _R) -> None:
        """End the process of a replica. Another one is started when the model may be awake again."""
        await self._end_process(replica)
        replica.begin("unload")
        replica.restarts += 1
        if not self._draining:
            self.stats.mark_replica_asleep(replica.index)
            replica.task = asyncio.create_task(self._keep(replica))

    # --- telling

    def set_status(self, status: ModelStatus, reason: str) -> None:
        """Send all API servers the status of the model, and the reason that refused requests receive."""
        if (status, reason) != (self.status, self.reason):
            self.status, self.reason = status, reason
            self._parts.pool.broadcast(StatusChanged(self.number, status, reason))

    def broadcast(self, message: EndRequests) -> None:
        """Send a message about the model to all API servers."""
        self._parts.pool.broadcast(message)

    def report(self, text: str) -> None:
        """Print a line."""
        self._parts.report(text)
