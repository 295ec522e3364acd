"""Decides what the end of an engine means to its server.

A server of `meltcore serve` ends with its engine. A fleet starts the engine again. A model calls the policy of its
server, and does not know which policy it is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.fleet.run.replica import EngineExit, ReplicaState
from meltcore.settings.config import ModelStatus

ENGINE_DEAD = "the engine has died"
SERVER_ENDS = "the engine has died; the server is going down"
ENGINE_RESTARTS = "the engine has died and is started again; the request can be sent again"
ENGINE_FAILED = "the engine has died and is not started again"


class Outage(NamedTuple):
    """What is known of a model of Meltcore's own engines that does not serve now.

    Args:
        status: the status that API servers have now.
        text: the reason that API servers have now.
        is_open: whether the model has ever served.
        may_run: whether the model is awake.
        states: states of the model's replicas.
        reason: the reason of the last replica that has a reason.
        pause_s: seconds until an engine is started again. None means immediately, or never.
        num_deaths: number of exits of the replica with the most exits.
        num_models: number of models of the server.
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
        """Load all models. Returns True once they serve, and False if a signal came before. Raises MeltcoreError."""

    async def start_each(self) -> None:
        """Begin to load all models, each of which becomes ready or fails by itself.

        Raises ConfigError if the cluster cannot be reached.
        """


class RestartPolicy(ABC):
    """Decides what starts and exits of engines mean to their model and to the server.

    The server ends when an API server process that was started again has ended `max_early_deaths` times in a row before
    it could serve.
    """

    max_early_deaths: int

    @abstractmethod
    async def start(self, server: StartingServer) -> bool:
        """Start the models of a server.

        Returns True if the server continues, and False if a signal arrived before it served.
        """

    @abstractmethod
    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait until the server ends because its engines have ended.

        `models` has an event for each model. The event is set once the model has no engine and will get none.
        """

    @abstractmethod
    def continues_without_api_server(self, *, is_serving: bool) -> bool:
        """Return whether the server continues without an API server process.

        The process has ended, or could not read an engine's message. `is_serving` says whether any model can be served.
        """

    @abstractmethod
    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the error that ends the start of a model. Returns None if the start continues or the model can serve.

        `errors` belong to the replicas that could not start. Each error comes with the name of its replica for
        messages.
        """

    @abstractmethod
    def start_limit_s(self, start_s: float) -> float | None:
        """Return the seconds that an engine has from its start to its first answer. None is no limit.

        `start_s` is the limit of the file.
        """

    @abstractmethod
    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Call `probe`, with a time limit, if a loaded engine must answer a request before the requests of clients.

        `left_s` are the seconds that are left of the time to start. Raises MeltcoreError if the engine does not answer.
        """

    @abstractmethod
    async def wait_elsewhere(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Wait for servers that run elsewhere, if their model becomes ready only with them.

        Raises as `answered` does.
        """

    @abstractmethod
    def tell(self, tell: Callable[[], None]) -> None:
        """Call `tell`, unless the server reports the event by itself.

        `tell` reports the result of a start, or what follows an exit.
        """

    @abstractmethod
    def pause_s(self, deaths: Sequence[EngineExit]) -> float | None:
        """Return the pause after these exits, or None if the engine is not started again."""

    @abstractmethod
    def failed_nodes(self, deaths: Sequence[EngineExit], now_s: float) -> Mapping[str, int]:
        """Return the nodes where an engine has died too often to be tried first, each with the number of exits."""

    @abstractmethod
    def model_name(self, name: str, num_models: int) -> str:
        """Return the name of a model as it begins messages about its engines. Returns "" if messages need no name."""

    @abstractmethod
    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return the error of requests that were lost with an engine, if no other engine serves the model."""

    @abstractmethod
    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return the status of a model that does not serve, and the reason that refused requests receive."""

    @abstractmethod
    def ended_status(self, what: str, reason: str) -> tuple[ModelStatus, str]:
        """Return the status of an upstream model whose servers have all ended for good, and the reason.

        `what` says in words what has ended.
        """


class NeverRestart(RestartPolicy):
    """Never starts an engine again, because a fault of the GPU would make the new engine die too.

    Without engines the server ends. All engines have to start. The first error ends the server, and is its message.
    """

    max_early_deaths = 0

    async def start(self, server: StartingServer) -> bool:
        """Load all models before requests are answered."""
        return await server.start_together()

    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait until no model has an engine."""
        await asyncio.gather(*(ended.wait() for ended in models))

    def continues_without_api_server(self, *, is_serving: bool) -> bool:
        """Return whether a model is served."""
        return is_serving

    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the first error, with the replica's name."""
        for name, error in errors:
            return ConfigError(f"{name}: {error}") if name else error
        return None

    def start_limit_s(self, start_s: float) -> float | None:
        """Return None: a person watches the progress."""
        return None

    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Return immediately: the first request of a client also shows whether the engine answers."""

    async def wait_elsewhere(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Return immediately: the first requests of clients find out whether the servers answer."""

    def tell(self, tell: Callable[[], None]) -> None:
        """Do nothing: the table of a ready server, or the error of a server that ends, already says it."""

    def pause_s(self, deaths: Sequence[EngineExit]) -> float | None:
        """Return None."""
        return None

    def failed_nodes(self, deaths: Sequence[EngineExit], now_s: float) -> Mapping[str, int]:
        """Return no nodes."""
        return {}

    def model_name(self, name: str, num_models: int) -> str:
        """Return the name if the server has several models, else ""."""
        return name if num_models > 1 else ""

    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return that an engine has died, and that the server shuts down if this was its only model."""
        return ENGINE_DEAD if num_models > 1 else SERVER_ENDS

    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return `dead` if the model has served before. A model that has not served ends the server."""
        if outage.is_open:
            return "dead", f"{self.death_text(None, outage.num_models)} ({outage.reason})"
        return outage.status, outage.text

    def ended_status(self, what: str, reason: str) -> tuple[ModelStatus, str]:
        """Return `dead`."""
        return "dead", f"{what}: {reason}"


@dataclass(frozen=True, kw_only=True)
class RestartAfterPause(RestartPolicy):
    """Starts an engine that has died again after a pause, which doubles with each exit within `window_s` of service.

    Models fail and come back by themselves, and the server continues without them.
    """

    first_pause_s: float = 1.0
    max_pause_s: float = 60.0
    max_deaths: int = 5  # within `window_s` of service; then it stays down
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

    def continues_without_api_server(self, *, is_serving: bool) -> bool:
        """Return True."""
        return True

    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the first error if all replicas have failed, since one replica is enough to serve.

        The report of the failed start has already named the engine.
        """
        return errors[0][1] if errors and len(errors) == num_replicas else None

    def start_limit_s(self, start_s: float) -> float | None:
        """Return the limit of the file."""
        return start_s

    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Wait until the engine has answered."""
        await probe(max(0.0, min(self.probe_limit_s, left_s)))

    async def wait_elsewhere(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Wait until one server answers."""
        await answered()

    def tell(self, tell: Callable[[], None]) -> None:
        """Report it."""
        tell()

    def pause_s(self, deaths: Sequence[EngineExit]) -> float | None:
        """Return the pause after these exits. Returns None if there were too many.

        An exit counts until the replica has served for `window_s`, so that slow starts do not let it be forgotten.
        """
        num_recent = sum(deaths[-1].served_s - death.served_s < self.window_s for death in deaths)
        if num_recent >= self.max_deaths:
            return None
        doublings = max(0, num_recent - 1)
        return min(self.max_pause_s, self.first_pause_s * float(2**doublings))

    def failed_nodes(self, deaths: Sequence[EngineExit], now_s: float) -> Mapping[str, int]:
        """Return the nodes on which the engine has died too often."""
        counts = Counter(death.node for death in deaths if now_s - death.at_s < self.window_s)
        return {node: count for node, count in counts.items() if count >= self.max_node_deaths}

    def model_name(self, name: str, num_models: int) -> str:
        """Return the name."""
        return name

    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return that an engine has died, and whether the client can send the request again."""
        return ENGINE_FAILED if pause_s is None else ENGINE_RESTARTS

    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return the status and the reason: what the model waits for, or that it has failed."""
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
