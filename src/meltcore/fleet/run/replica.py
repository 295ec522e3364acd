"""Defines the states of a replica by a table of transitions, and waits for the starts of all replicas of a model.

The table holds for Meltcore's own engines and for servers that a command starts. `scripts/replica_picture.py` draws it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from meltcore.common.errors import EnginePendingError, MeltcoreError
from meltcore.common.gpus.machine import VISIBLE, visible_gpus
from meltcore.fleet.processes.engine_process import EngineProcess
from meltcore.protocol.shell import Asleep, Awake, EngineReady
from meltcore.settings.config import EngineConfig

ReplicaState = Literal[
    "waiting",  # until its model may run, and others on its GPUs have loaded
    "pending",  # no node has room for it, or the cluster cannot be changed; it is tried again
    "loading",
    "ready",
    "draining",  # its open requests end, and it gets no others
    "sleeping",  # its process has given its memory back, and can be woken
    "unloaded",  # its model sleeps, and it has no process
    "pausing",  # its process has ended, and is started again after a pause
    "failed",  # its process has ended, and is not started again
]
# What the supervisor does with a replica, then what becomes of its process.
ReplicaEvent = (
    Literal["start", "drain", "unload", "replace"]
    | Literal["placed", "unplaced", "loaded", "slept", "woke", "died", "died asleep", "gave up"]
)
_STOPS: Mapping[ReplicaEvent, ReplicaState] = {"unload": "unloaded", "replace": "waiting"}
_ENDS: Mapping[ReplicaEvent, ReplicaState] = {
    "unplaced": "pending",
    "died": "pausing",
    "died asleep": "unloaded",
    "gave up": "failed",
}
# The next state by state and event. What is not here cannot happen.
LIFE: Mapping[ReplicaState, Mapping[ReplicaEvent, ReplicaState]] = {
    "waiting": {"start": "waiting", "placed": "loading", **_ENDS, **_STOPS},
    "pending": {"start": "pending", "placed": "loading", **_ENDS, **_STOPS},
    "loading": {"loaded": "ready", **_ENDS, **_STOPS},
    # A model that is put to sleep drains its ready replicas before one can die.
    "ready": {"drain": "draining", "unplaced": "pending", "died": "pausing", "gave up": "failed", "replace": "waiting"},
    "draining": {"slept": "sleeping", **_ENDS, **_STOPS},
    "sleeping": {"woke": "ready", **_ENDS, "unload": "unloaded"},
    "unloaded": {"start": "waiting", "unload": "unloaded"},
    "pausing": {"start": "waiting", **_STOPS},
    "failed": _STOPS,
}
SERVED: frozenset[ReplicaState] = frozenset(("ready", "draining", "sleeping"))  # it has been ready


class EngineExit(NamedTuple):
    """The exit of an engine.

    Args:
        at_s: the time.monotonic() of the exit.
        node: the engine's node in a cluster, or "" for this machine.
        served_s: seconds for which all engines of the replica together had served until then.
    """

    at_s: float
    node: str
    served_s: float


class ReplicaProcess(Protocol):
    """The process of a replica: an engine, or a server that a command starts. Each object is started at most once."""

    @property
    def pid(self) -> int | None:
        """The process id while the process runs, else None."""

    @property
    def is_evicted(self) -> bool:
        """Whether the cluster has ended the process because its node ran out of memory.

        This is no fault of the process.
        """

    async def wait(self) -> str:
        """Wait until the process has ended. Return the reason as text."""

    async def stop(self) -> None:
        """End the process. Can be called twice, and without a start."""

    async def leave(self) -> None:
        """Remove the files and processes that an ended process has left behind. This method can be called twice."""

    async def wait_freed(self) -> None:
        """Wait until the memory of an ended process is free. `leave` must have been called before."""

    def kill(self) -> None:
        """Kill the process immediately."""

    def fail(self, reason: str) -> None:
        """End a process that cannot be used. The replica starts another one, as after an exit."""


_P = TypeVar("_P", bound=ReplicaProcess)


@dataclass(eq=False, kw_only=True)
class BaseReplica(Generic[_P]):
    """One replica of a model. Its process may be replaced by another one."""

    index: int
    log: Path | None
    state: ReplicaState = "waiting"
    reason: str = ""
    restarts: int = 0
    served_s: float = 0.0  # by all of its processes that have ended
    deaths: list[EngineExit] = field(default_factory=list)
    started: asyncio.Future[Any] | None = None  # the first outcome of a start
    task: asyncio.Task[None] | None = None
    process: _P = field(init=False)  # the newest one

    def apply(self, event: ReplicaEvent) -> None:
        """Change to the state that the table of transitions has for the current state and `event`.

        Raises ValueError if the event cannot happen in the current state.
        """
        if event not in LIFE[self.state]:
            raise ValueError(f"replica {self.index} is {self.state}, and {event!r} cannot happen there")
        self.state = LIFE[self.state][event]

    def begin(self, event: Literal["unload", "replace"]) -> None:
        """Prepare another start after the process was ended. After "replace" earlier exits no longer count."""
        self.apply(event)
        self.reason = ""
        if event == "replace":
            self.deaths = []
        self.started = asyncio.get_running_loop().create_future()
        self.started.add_done_callback(lambda started: started.cancelled() or started.exception())

    @property
    def node(self) -> str:
        """The cluster node of the replica, or "" for this machine."""
        return ""

    @property
    def error(self) -> MeltcoreError | None:
        """The error of a start that has failed for good, or None."""
        failed = self.started is not None and self.started.done() and self.started.exception()
        return failed if isinstance(failed, MeltcoreError) else None


@dataclass(eq=False, kw_only=True)
class Replica(BaseReplica[EngineProcess]):
    """One replica of a model on an engine of Meltcore: the settings of the engine, its place and its state."""

    engine: EngineConfig
    environment: dict[str, str] = field(default_factory=dict)  # names the GPUs of this machine that the engine may use
    model: str = ""
    node: str = ""  # of a cluster; "": this machine
    gpus: tuple[int, ...] = ()  # that the plan names, numbered among those of the node that may be used
    limits: EngineReady | None = None
    probe: asyncio.Future[str] | None = None
    sockets: Path | None = None  # of its engine
    resident_bytes: int = 0  # that it holds while it sleeps
    sharing_problem: str = ""  # why its kernels do not share its GPU as `sharing.means` says
    answer: asyncio.Future[Asleep | Awake] | None = None  # of an engine that was asked to sleep or wake

    @property
    def gpu_names(self) -> frozenset[str]:
        """The GPUs of the engine by their names in CUDA_VISIBLE_DEVICES. An engine on the CPU has none.

        In a cluster the name of the node comes before each name.
        """
        if self.node:
            return frozenset(f"{self.node}:{number}" for number in self.gpus)
        if self.engine.device == "cpu":
            return frozenset()
        own_gpus = self.environment.get(VISIBLE)
        gpus = visible_gpus() if own_gpus is None else own_gpus.split(",")
        return frozenset(gpus[: self.engine.tensor_parallel_size])

    def move(self, on_moved: Callable[[], None], node: str, gpus: Sequence[int]) -> None:
        """Store the node and the GPUs on which the engine is started. After an exit it is started there again."""
        self.node, self.gpus = node, tuple(gpus)
        on_moved()

    def note_end(self, text: str) -> str:
        """Write to the end of the engine's log how the engine has ended. Return the text with the log's name.

        An engine that was killed, or that reported a fault only in a message, has not written to the log how it ended.
        """
        if self.log is None:
            return text
        with suppress(OSError), self.log.open("a") as log:  # a disk may be full
            log.write(f"meltcore: {text}\n")
        return f"{text}; its log: {self.log}"


class Starts:
    """Waits for the starts of a model's replicas."""

    def __init__(self, replicas: Sequence[BaseReplica[Any]]) -> None:
        self._replicas = replicas
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Wake the waiting methods, because a replica has started, has failed, or is pending."""
        self._changed.set()

    @property
    def results(self) -> list[Any]:
        """The ready message of each replica that has started without an error."""
        ended = [each.started for each in self._replicas if each.started is not None and each.started.done()]
        return [started.result() for started in ended if started.exception() is None]

    @property
    def is_pending(self) -> bool:
        """Whether no replica serves or loads, and a replica is pending."""
        states = {replica.state for replica in self._replicas}
        return "pending" in states and states.isdisjoint(("ready", "loading", "waiting"))

    async def wait_all(self, find_error: Callable[[], MeltcoreError | None]) -> None:
        """Wait until each replica has started or failed. If one replica has started, do not wait for pending replicas.

        If `find_error` returns an error, the start of the model ends, and the error is raised.
        """
        while (error := find_error()) is None:
            self._changed.clear()
            num_open, num_failed = len(self.results), sum(replica.error is not None for replica in self._replicas)
            num_pending = sum(replica.state == "pending" for replica in self._replicas)
            if num_open + num_failed + (num_pending if num_open else 0) == len(self._replicas):
                return
            await self._changed.wait()
        raise error

    async def wait(self, replica: BaseReplica[Any]) -> None:
        """Wait until `replica` serves.

        Raises MeltcoreError if the start of the replica fails, and EnginePendingError if the replica is pending.
        """
        assert replica.started is not None
        while not replica.started.done():
            if replica.state == "pending":
                raise EnginePendingError(replica.reason)
            self._changed.clear()
            await self._changed.wait()
        replica.started.result()
