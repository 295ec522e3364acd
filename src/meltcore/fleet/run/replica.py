"""One replica of a model and its engine's life, what the models of a server share, and when engines are restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from meltcore.common.errors import EnginePendingError
from meltcore.fleet.plan.placement import Placement
from meltcore.fleet.ray.cluster_driver import ClusterDriver
from meltcore.fleet.run.start_gate import StartGate
from meltcore.fleet.run.worker_pool import WorkerPool
from meltcore.protocol.engines import ServedReady
from meltcore.protocol.shell import Asleep, Awake
from meltcore.serve.requests.log import Log
from meltcore.settings.config import PriorityClass, SharingConfig

# "pending": nothing was started, as no node has room or the cluster cannot be changed; it is tried again.
ReplicaState = Literal["waiting", "pending", "loading", "ready", "draining", "sleeping", "pausing", "failed", "stopped"]


class Death(NamedTuple):
    """When an engine has died (monotonic), and its node of a cluster."""

    at_s: float
    node: str


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When an engine that has died is started again: after a pause, which doubles with each death in `window_s`."""

    first_pause_s: float = 1.0
    max_pause_s: float = 60.0
    max_deaths: int = 5  # within `window_s`; then it stays down
    max_node_deaths: int = 3  # within `window_s` on a node of a cluster; then another node is tried
    window_s: float = 600.0
    probe_limit_s: float = 120.0  # for the answer to the readiness request

    def pause_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Return the pause after deaths at these times; None when they are too many."""
        num_recent = sum(now_s - death_s < self.window_s for death_s in deaths_s)
        if num_recent >= self.max_deaths:
            return None
        doublings = max(0, num_recent - 1)
        return min(self.max_pause_s, self.first_pause_s * float(2**doublings))

    def failed_nodes(self, deaths: Sequence[Death], now_s: float) -> Mapping[str, int]:
        """Return the nodes where an engine has died too often to be tried there first, with the number of deaths."""
        counts = Counter(death.node for death in deaths if now_s - death.at_s < self.window_s)
        return {node: count for node, count in counts.items() if count >= self.max_node_deaths}


@dataclass(eq=False)
class Replica:
    """One replica of a model, whose engine process may be replaced."""

    index: int
    placement: Placement
    log: Path | None
    state: ReplicaState = "waiting"
    reason: str = ""
    restarts: int = 0
    deaths: list[Death] = field(default_factory=list)
    limits: ServedReady | None = None
    started: asyncio.Future[ServedReady] | None = None  # the first outcome of a start
    task: asyncio.Task[None] | None = None
    probe: asyncio.Future[str] | None = None
    sockets: Path | None = None  # of its engine
    is_asleep: bool = False  # its engine sleeps, and can be woken
    resident_bytes: int = 0  # that it holds while it sleeps
    answer: asyncio.Future[Asleep | Awake] | None = None  # of an engine that was asked to sleep or wake

    def begin(self) -> None:
        """Begin a new life: nothing has come of it yet."""
        self.state, self.reason, self.deaths = "waiting", "", []
        self.started = asyncio.get_running_loop().create_future()
        self.started.add_done_callback(lambda started: started.cancelled() or started.exception())

    @property
    def deaths_s(self) -> list[float]:
        """When its engines have died."""
        return [death.at_s for death in self.deaths]

    def move(self, on_moved: Callable[[], None], node: str, gpus: Sequence[int]) -> None:
        """Note where its engine is started: there it is started again."""
        self.placement = self.placement._replace(node=node, gpus=tuple(gpus))
        on_moved()

    def begin_asleep(self) -> None:
        """Begin a new life asleep, with the deaths of the last one."""
        deaths = self.deaths
        self.begin()
        self.state, self.deaths, self.is_asleep, self.resident_bytes = "sleeping", deaths, False, 0

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
    """What has come of the starts of a model's engines."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._changed = asyncio.Event()

    def note(self) -> None:
        """Note that an engine has started, has failed, or is pending."""
        self._changed.set()

    @property
    def done(self) -> list[asyncio.Future[ServedReady]]:
        """The starts that have come to an end."""
        return [each.started for each in self._replicas if each.started is not None and each.started.done()]

    @property
    def is_pending(self) -> bool:
        """Whether no engine serves or loads, and one is pending."""
        states = {replica.state for replica in self._replicas}
        return "pending" in states and states.isdisjoint(("ready", "loading", "waiting"))

    async def wait_all(self, *, needs_all: bool) -> None:
        """Wait until each engine has started or failed; where one has started, pending ones are not waited for.

        needs_all: the first that fails is enough.
        """
        while True:
            self._changed.clear()
            num_failed = sum(start.exception() is not None for start in self.done)
            num_pending = sum(replica.state == "pending" for replica in self._replicas)
            is_open = num_failed < len(self.done)
            if len(self.done) + (num_pending if is_open else 0) == len(self._replicas) or (needs_all and num_failed):
                return
            await self._changed.wait()

    async def wait(self, replica: Replica) -> None:
        """Wait until an engine serves. Raises MeltcoreError where it fails, or is pending."""
        assert replica.started is not None
        while not replica.started.done():
            if replica.state == "pending":
                raise EnginePendingError(replica.reason)
            self._changed.clear()
            await self._changed.wait()
        replica.started.result()


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """What the models of a server share. `policy`: None for `meltcore serve`, which starts no engine again."""

    pool: WorkerPool
    gate: StartGate
    log: Log
    report: Callable[[str], None]  # prints a line
    engine_command: Sequence[str]
    sockets: Path
    client_count: int
    next_engine: Callable[[], int]  # numbers engine processes, whose sockets are in a folder of that number
    environment: Callable[[Placement, PriorityClass], dict[str, str]]  # of an engine, beside that of its placement
    policy: RestartPolicy | None = None
    log_folder: Path | None = None  # with a file per engine; None: our standard error
    cluster: ClusterDriver | None = None  # whose nodes have the engines; None: this machine
    cpu_engines: Callable[[str], int] = lambda _node: 1  # that share the cores of a node
    gpu_ranks: Callable[[str], int] = lambda _node: 1  # of all engines on GPUs of a node
    on_moved: Callable[[], None] = lambda: None  # an engine of a cluster has another place
    sharing: SharingConfig | None = None  # of engines among each other; None: none waits
