"""Decides whether engines are started again after an exit, and when the server itself ends.

A server of `meltcore serve` ends with its engine. A fleet starts the engine again. A model calls the policy of its
server, and does not know which policy it is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.fleet.run.replica import EngineExit, ReplicaState
from meltcore.settings.config import ModelStatus
from meltcore.settings.fleet_checks import model_error

ENGINE_DEAD = "the engine has died"
SERVER_ENDS = "the engine has died; the server is going down"
ENGINE_RESTARTS = "the engine has died and is started again; the request can be sent again"
ENGINE_FAILED = "the engine has died and is not started again"


class Outage(NamedTuple):
    """Describes a model of Meltcore's own engines that does not serve now.

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


class RestartPolicy(ABC):
    """Decides how a model and its server react to starts and exits of engines.

    The server ends when an API server process that was started again has ended `max_early_deaths` times in a row before
    it could serve.
    """

    max_early_deaths: int

    @abstractmethod
    async def start(self, load_all: Callable[[], Awaitable[bool]], start_each: Callable[[], Awaitable[bool]]) -> bool:
        """Start the models of a server. Return False if a signal arrived before they could serve, or else True.

        Args:
            load_all: loads all models, and returns False if a signal arrives before all serve. Raises MeltcoreError.
            start_each: begins to load each model, which becomes ready or fails independently of the others. Returns
                False if a signal arrives before. Raises ConfigError if the cluster cannot be reached.
        """

    @abstractmethod
    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait until the server must end, because its engines have ended.

        `models` has one event per model. The event is set when the model has no engine and will get none.
        """

    @abstractmethod
    def continues_without_api_server(self, *, is_serving: bool) -> bool:
        """Return whether the server continues after it has lost an API server process.

        The process has ended, or could not read an engine's message. `is_serving` says whether any model can be served.
        """

    @abstractmethod
    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the error that ends the start of a model. Returns None if the start continues or the model can serve.

        `errors` has the name and the error of each replica that could not start.
        """

    @abstractmethod
    def error_text(self, name: str, error: MeltcoreError) -> str:
        """Return the text of an error about the model `name`. It names settings as the user has written them."""

    @abstractmethod
    def start_limit_s(self, start_s: float) -> float | None:
        """Return how many seconds an engine may take from its start to its first answer, or None for no limit.

        `start_s` is the limit in fleet.yaml.
        """

    @abstractmethod
    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Call `probe` if a loaded engine must answer a test request before it gets requests of clients.

        `left_s` is the rest of the time limit for the start, in seconds. Raises MeltcoreError if the engine does not
        answer.
        """

    @abstractmethod
    def tell(self, tell: Callable[[], None]) -> None:
        """Report the outcome of a start, or the reaction to an exit, by calling `tell`.

        Do nothing if the server prints it elsewhere.
        """

    @abstractmethod
    def pause_s(self, deaths: Sequence[EngineExit]) -> float | None:
        """Return the seconds to wait after these exits, or None if the engine is not started again."""

    @abstractmethod
    def exits_by_failed_node(self, deaths: Sequence[EngineExit], now_s: float) -> Mapping[str, int]:
        """Return the number of exits by node, for nodes where an engine has died too often to be tried first."""

    @abstractmethod
    def model_name(self, name: str, num_models: int) -> str:
        """Return the name of a model for the beginning of messages, or "" if messages need no name."""

    @abstractmethod
    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return the error for requests that were lost with an engine while no other engine serves the model."""

    @abstractmethod
    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return the status of a model that does not serve, and the reason that refused requests receive."""


class NeverRestart(RestartPolicy):
    """Never starts an engine again, because a fault of the GPU would make the new engine die too.

    Without engines the server ends. All engines have to start. The first error ends the server, and is its message.
    """

    max_early_deaths = 0

    async def start(self, load_all: Callable[[], Awaitable[bool]], start_each: Callable[[], Awaitable[bool]]) -> bool:
        """Load all models before requests are answered."""
        return await load_all()

    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Wait until no model has an engine."""
        await asyncio.gather(*(ended.wait() for ended in models))

    def continues_without_api_server(self, *, is_serving: bool) -> bool:
        """Return whether a model is served."""
        return is_serving

    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the first error, with the replica's name before it, because all engines have to start.

        Without errors return None.
        """
        for name, error in errors:
            return ConfigError(f"{name}: {error}") if name else error
        return None

    def error_text(self, name: str, error: MeltcoreError) -> str:
        """Return the text, which names flags."""
        return str(error)

    def start_limit_s(self, start_s: float) -> float | None:
        """Return None, because a person watches the progress and needs no limit."""
        return None

    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Do nothing, because the first request of a client also shows whether the engine answers."""

    def tell(self, tell: Callable[[], None]) -> None:
        """Do nothing, because a ready server prints a table, and a server that ends prints an error."""

    def pause_s(self, deaths: Sequence[EngineExit]) -> float | None:
        """Return None, because no engine is started again."""
        return None

    def exits_by_failed_node(self, deaths: Sequence[EngineExit], now_s: float) -> Mapping[str, int]:
        """Return no nodes, because no engine is started again."""
        return {}

    def model_name(self, name: str, num_models: int) -> str:
        """Return the name if the server has several models, or else ""."""
        return name if num_models > 1 else ""

    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return a text which says that an engine has died.

        If it was the only model, the text says that the server ends.
        """
        return ENGINE_DEAD if num_models > 1 else SERVER_ENDS

    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return the status `dead` if the model has served before. Otherwise the failed start ends the server."""
        if outage.is_open:
            return "dead", f"{self.death_text(None, outage.num_models)} ({outage.reason})"
        return outage.status, outage.text


@dataclass(frozen=True, kw_only=True)
class RestartAfterPause(RestartPolicy):
    """Starts an engine again after its exit and a pause. The pause doubles with each exit within `window_s` of service.

    Each model fails and recovers independently, and the server continues meanwhile.
    """

    first_pause_s: float = 1.0
    max_pause_s: float = 60.0
    max_deaths: int = 5  # within `window_s` of service; then it stays down
    max_node_deaths: int = 3  # within `window_s` on a node of a cluster; then another node is tried
    window_s: float = 600.0
    probe_limit_s: float = 120.0  # for the answer to the readiness request
    max_early_deaths: int = 3

    async def start(self, load_all: Callable[[], Awaitable[bool]], start_each: Callable[[], Awaitable[bool]]) -> bool:
        """Begin to load each model."""
        return await start_each()

    async def wait_ended(self, models: Sequence[asyncio.Event]) -> None:
        """Never return, because a reload may add a model at any time."""
        await asyncio.get_running_loop().create_future()

    def continues_without_api_server(self, *, is_serving: bool) -> bool:
        """Return True, because the process is started again."""
        return True

    def start_error(self, errors: Sequence[tuple[str, MeltcoreError]], num_replicas: int) -> MeltcoreError | None:
        """Return the first error if all replicas have failed. One replica is enough to serve.

        The report of the failed start has already named the engine.
        """
        return errors[0][1] if errors and len(errors) == num_replicas else None

    def error_text(self, name: str, error: MeltcoreError) -> str:
        """Return the text with keys of fleet.yaml instead of flags."""
        return model_error(name, error).removeprefix(f"models.{name}: ")

    def start_limit_s(self, start_s: float) -> float | None:
        """Return the limit that fleet.yaml has."""
        return start_s

    async def prove(self, probe: Callable[[float], Awaitable[None]], left_s: float) -> None:
        """Wait until the engine has answered a test request."""
        await probe(max(0.0, min(self.probe_limit_s, left_s)))

    def tell(self, tell: Callable[[], None]) -> None:
        """Call `tell`."""
        tell()

    def pause_s(self, deaths: Sequence[EngineExit]) -> float | None:
        """Return the seconds to wait after these exits, or None if there were too many exits.

        An exit counts until the replica has served for `window_s`. The time of starts does not count, so the exits of
        an engine with slow starts are not forgotten.
        """
        num_recent = sum(deaths[-1].served_s - death.served_s < self.window_s for death in deaths)
        if num_recent >= self.max_deaths:
            return None
        doublings = max(0, num_recent - 1)
        return min(self.max_pause_s, self.first_pause_s * float(2**doublings))

    def exits_by_failed_node(self, deaths: Sequence[EngineExit], now_s: float) -> Mapping[str, int]:
        """Return the number of exits by node, for nodes on which the engine has died too often."""
        counts = Counter(death.node for death in deaths if now_s - death.at_s < self.window_s)
        return {node: count for node, count in counts.items() if count >= self.max_node_deaths}

    def model_name(self, name: str, num_models: int) -> str:
        """Return the name of the model."""
        return name

    def death_text(self, pause_s: float | None, num_models: int) -> str:
        """Return a text which says that an engine has died, and whether the client can send the request again."""
        return ENGINE_FAILED if pause_s is None else ENGINE_RESTARTS

    def status(self, outage: Outage) -> tuple[ModelStatus, str]:
        """Return the status and the reason: the model waits for an engine, or it has failed."""
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
