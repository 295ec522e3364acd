"""One replica of a model and its engine's life, and what has come of the starts of all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meltcore.common.errors import EnginePendingError, MeltcoreError
from meltcore.fleet.plan.placement import Placement
from meltcore.protocol.shell import Asleep, Awake, EngineReady

# "pending": nothing was started, as no node has room or the cluster cannot be changed; it is tried again.
ReplicaState = Literal["waiting", "pending", "loading", "ready", "draining", "sleeping", "pausing", "failed", "stopped"]


class Death(NamedTuple):
    """When an engine has died (monotonic), and its node of a cluster."""

    at_s: float
    node: str


@dataclass(eq=False, kw_only=True)
class ReplicaLife:
    """One replica of a model, whose process may be replaced: an engine, or another server."""

    index: int
    log: Path | None
    state: ReplicaState = "waiting"
    reason: str = ""
    restarts: int = 0
    deaths: list[Death] = field(default_factory=list)
    started: asyncio.Future[Any] | None = None  # the first outcome of a start
    task: asyncio.Task[None] | None = None
    is_asleep: bool = False  # its process sleeps, and can be woken

    def begin(self) -> None:
        """Begin a new life: nothing has come of it yet."""
        self.state, self.reason, self.deaths = "waiting", "", []
        self.started = asyncio.get_running_loop().create_future()
        self.started.add_done_callback(lambda started: started.cancelled() or started.exception())

    def begin_asleep(self) -> None:
        """Begin a new life asleep, with the deaths of the last one."""
        deaths = self.deaths
        self.begin()
        self.state, self.deaths, self.is_asleep = "sleeping", deaths, False

    @property
    def deaths_s(self) -> list[float]:
        """When its processes have died."""
        return [death.at_s for death in self.deaths]

    @property
    def error(self) -> MeltcoreError | None:
        """The error of a start that has failed for good."""
        failed = self.started is not None and self.started.done() and self.started.exception()
        return failed if isinstance(failed, MeltcoreError) else None


@dataclass(eq=False, kw_only=True)
class Replica(ReplicaLife):
    """One replica of a model of ours, with its engine."""

    placement: Placement
    limits: EngineReady | None = None
    probe: asyncio.Future[str] | None = None
    sockets: Path | None = None  # of its engine
    resident_bytes: int = 0  # that it holds while it sleeps
    answer: asyncio.Future[Asleep | Awake] | None = None  # of an engine that was asked to sleep or wake

    def begin_asleep(self) -> None:
        """Begin a new life asleep, with the deaths of the last one."""
        super().begin_asleep()
        self.resident_bytes = 0

    def move(self, on_moved: Callable[[], None], node: str, gpus: Sequence[int]) -> None:
        """Note where its engine is started: there it is started again."""
        self.placement = self.placement._replace(node=node, gpus=tuple(gpus))
        on_moved()

    def note_end(self, text: str) -> str:
        """Append to the log how the engine has ended, below what it has printed. Returns the text with the log named.

        An engine that was killed, or that reported a fault in one message, has written nothing of it.
        """
        if self.log is None:
            return text
        with suppress(OSError), self.log.open("a") as log:  # a disk may be full
            log.write(f"meltcore: {text}\n")
        return f"{text}; its log: {self.log}"


class Starts:
    """What has come of the starts of a model's replicas."""

    def __init__(self, replicas: Sequence[ReplicaLife]) -> None:
        self._replicas = replicas
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Note that a replica has started, has failed, or is pending."""
        self._changed.set()

    @property
    def results(self) -> list[Any]:
        """The results of those that have started."""
        ended = [each.started for each in self._replicas if each.started is not None and each.started.done()]
        return [started.result() for started in ended if started.exception() is None]

    @property
    def is_pending(self) -> bool:
        """Whether no engine serves or loads, and one is pending."""
        states = {replica.state for replica in self._replicas}
        return "pending" in states and states.isdisjoint(("ready", "loading", "waiting"))

    async def wait_all(self, find_error: Callable[[], MeltcoreError | None]) -> None:
        """Wait until each replica has started or failed; where one has started, pending ones are not waited for.

        Raises what `find_error` returns: the error that ends the start of the model.
        """
        while (error := find_error()) is None:
            self._changed.clear()
            num_open, num_failed = len(self.results), sum(replica.error is not None for replica in self._replicas)
            num_pending = sum(replica.state == "pending" for replica in self._replicas)
            if num_open + num_failed + (num_pending if num_open else 0) == len(self._replicas):
                return
            await self._changed.wait()
        raise error

    async def wait(self, replica: ReplicaLife) -> None:
        """Wait until a replica serves. Raises MeltcoreError where it fails, or is pending."""
        assert replica.started is not None
        while not replica.started.done():
            if replica.state == "pending":
                raise EnginePendingError(replica.reason)
            self._changed.clear()
            await self._changed.wait()
        replica.started.result()
