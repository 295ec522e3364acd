"""What the end of an engine means to its server: one of `meltcore serve` ends with it, a fleet starts it again.

A model asks the policy what to do, and never which one it is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.fleet.run.replica import Death, ReplicaState
from meltcore.settings.config import ModelStatus

ENGINE_DEAD = "the engine has died"
SERVER_ENDS = "the engine has died; the server is going down"
ENGINE_RESTARTS = "the engine has died and is started again; the request can be sent again"
ENGINE_FAILED = "the engine has died and is not started again"


class Outage(NamedTuple):
    """A model of ours that does not serve now, as far as its status follows from that.

    Args:
        status: the status that API servers have.
        text: the reason that API servers have.
        is_open: it has served.
        may_run: it does not sleep.
        states: states of its replicas.
        reason: reason of the last replica that has one.
        pause_s: time until an engine is started again; None stands for now, or never.
        num_deaths: exits of the replica with most.
        num_models: models of the server.
    """

    name: str
    status: ModelStatus
    text: str
    is_open: bool
    may_run: bool
    states: frozenset[ReplicaState]
    reason: str
    pause_s: float | None
    num_deaths: int
    num_models: int


class StartingServer(Protocol):
    """The supervisor, which starts models in two ways."""

    async def start_together(self) -> bool:
        """Load all models. Returns whether they serve, or False where a signal came before. Raises MeltcoreError."""

    async def start_each(self) -> None:
        """Begin to load all models, which become ready or fail one by one. Raises ConfigError without a cluster."""


class RestartPolicy(ABC):
    """Decides what the starts and the ends of engines mean to their model and to the server.

    The server ends when an API server process that was started again has ended `max_early_deaths` times in a row before
    it could serve.
    """

    max_early_deaths: int

    @abstractmethod
    async def start(self, server: StartingServer) -> bool:
        """Start the models of a server. Returns whether it goes on, or False where a signal came before it served."""

    @abstractmethod
    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait until the server ends with its engines. An event is set once its model has none and gets none."""

    @abstractmethod
    def keeps_api_servers(self, *, is_serving: bool) -> bool:
        """Return whether the server goes on with an API server process that has ended, or cannot read a model.

        `is_serving` says whether any model can be served.
        """

    @abstractmethod
    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the error that ends the start of a model, or None where the start goes on or the model can serve.

        `errors` belong to the replicas that could not start, each with the replica's name in messages.
        """

    @abstractmethod
    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Let a loaded engine answer `probe`, which gets a time limit, where it must before requests of clients.

        Of the time to start `left_s` is left. Raises MeltcoreError where it does not answer.
        """

    @abstractmethod
    async def wait_elsewhere(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Wait for servers that run elsewhere, where their model is ready with them. Raises as `answered` does."""

    @abstractmethod
    def tell(self, tell: Callable[[], None]) -> None:
        """Tell what has come of a start or follows an end, where the server does not tell it by itself."""

    @abstractmethod
    def pause_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Return the pause after exits at these times, or None if the engine is not started again."""

    @abstractmethod
    def failed_nodes(self, deaths: Sequence[Death], now_s: float) -> Mapping[str, int]:
        """Return the nodes where an engine has died too often to be tried there first, with the number of deaths."""

    @abstractmethod
    def model_name(self, name: str, num_models: int) -> str:
        """Return a model's name as messages about its engines begin, or "" where they need no name."""

    @abstractmethod
    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return the error of requests that an engine has lost, where no other engine serves the model."""

    @abstractmethod
    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return the status of a model that does not serve, and the reason that refused requests receive."""

    @abstractmethod
    def ended_status(self, what: str, reason: str) -> tuple[ModelStatus, str]:
        """Return the status of a model whose other servers have all ended for good, which `what` says in words."""


class NeverRestart(RestartPolicy):
    """No engine is started again: a fault of the GPU would make it die again. Without engines the server ends.

    All engines have to start: the first error ends the server, and is its message.
    """

    max_early_deaths = 0

    async def start(self, server: StartingServer) -> bool:
        """Load all models before requests are answered."""
        return await server.start_together()

    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait until no model has an engine."""
        await asyncio.gather(*(ended.wait() for ended in models))

    def keeps_api_servers(self, *, is_serving: bool) -> bool:
        """Return whether a model is served."""
        return is_serving

    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the first error, with the replica's name."""
        for name, error in errors:
            return ConfigError(f"{name}: {error}") if name else error
        return None

    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Return immediately: the first request of a client shows it as well."""

    async def wait_elsewhere(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Return immediately: requests find out who answers."""

    def tell(self, tell: Callable[[], None]) -> None:
        """Return immediately: the table of a ready server and the error of another one tell it."""

    def pause_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Return None."""
        return None

    def failed_nodes(self, deaths: Sequence[Death], now_s: float) -> Mapping[str, int]:
        """Return none."""
        return {}

    def model_name(self, name: str, num_models: int) -> str:
        """Return the name of one model of several."""
        return name if num_models > 1 else ""

    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return that the server goes down, where that was its only model."""
        return ENGINE_DEAD if num_models > 1 else SERVER_ENDS

    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return `dead` for a model that has served; one that has not ends the server."""
        if outage.is_open:
            return "dead", f"{self.death_text(None, outage.num_models)} ({outage.reason})"
        return outage.status, outage.text

    def ended_status(self, what: str, reason: str) -> tuple[ModelStatus, str]:
        """Return `dead`."""
        return "dead", f"{what}: {reason}"


@dataclass(frozen=True, kw_only=True)
class RestartAfterPause(RestartPolicy):
    """An engine that has died is started again after a pause, which doubles with each death in `window_s`.

    Models fail and come back by themselves, and the server goes on without them.
    """

    first_pause_s: float = 1.0
    max_pause_s: float = 60.0
    max_deaths: int = 5  # within `window_s`; then it stays down
    max_node_deaths: int = 3  # within `window_s` on a node of a cluster; then another node is tried
    window_s: float = 600.0
    probe_limit_s: float = 120.0  # for the answer to the readiness request
    max_early_deaths: int = 3

    async def start(self, server: StartingServer) -> bool:
        """Begin to load each model."""
        await server.start_each()
        return True

    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait forever: a reload may add a model."""
        await asyncio.get_running_loop().create_future()

    def keeps_api_servers(self, *, is_serving: bool) -> bool:
        """Return True."""
        return True

    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the first error where all replicas have failed: one is enough. Its report has named the engine."""
        return errors[0][1] if errors and len(errors) == num_replicas else None

    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Wait for the answer."""
        await probe(max(0.0, min(self.probe_limit_s, left_s)))

    async def wait_elsewhere(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Wait until one answers."""
        await answered()

    def tell(self, tell: Callable[[], None]) -> None:
        """Tell it."""
        tell()

    def pause_s(self, deaths_s: Sequence[float], now_s: float) -> float | None:
        """Return the pause after exits at these times, or None when they are too many."""
        num_recent = sum(now_s - death_s < self.window_s for death_s in deaths_s)
        if num_recent >= self.max_deaths:
            return None
        doublings = max(0, num_recent - 1)
        return min(self.max_pause_s, self.first_pause_s * float(2**doublings))

    def failed_nodes(self, deaths: Sequence[Death], now_s: float) -> Mapping[str, int]:
        """Return the nodes with too many deaths."""
        counts = Counter(death.node for death in deaths if now_s - death.at_s < self.window_s)
        return {node: count for node, count in counts.items() if count >= self.max_node_deaths}

    def model_name(self, name: str, num_models: int) -> str:
        """Return the name."""
        return name

    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return whether the request can be sent again."""
        return ENGINE_FAILED if pause_s is None else ENGINE_RESTARTS

    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return what the model waits for, or that it has failed."""
        name, reason = outage.name, outage.reason
        if outage.states == {"failed"}:
            if outage.is_open:
                times = f"{outage.num_deaths} times"
                return "failed", f"the engine of {name} has died {times} and is not started again: {reason}"
            return "failed", f"{name} could not be loaded: {reason}"
        if outage.is_open and not outage.may_run:
            return "sleeping", f"{name} sleeps; requests wait until it is woken"
        if "pending" in outage.states:
            return "restarting" if outage.is_open else "loading", f"{name} is pending: {reason}"
        if reason:
            when = "now" if outage.pause_s is None else f"after a pause of {outage.pause_s:g} s"
            return "restarting", f"the engine of {name} has died ({reason}); it is started again {when}"
        if not outage.is_open:
            return "loading", outage.text
        if outage.status == "waking":
            return outage.status, outage.text
        return "restarting", f"{name} is being restarted"

    def ended_status(self, what: str, reason: str) -> tuple[ModelStatus, str]:
        """Return `failed`."""
        return "failed", f"{what} and is not started again: {reason}"
