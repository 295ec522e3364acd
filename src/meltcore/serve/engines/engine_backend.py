"""The base class of the backends of all Meltcore engines: queue, sockets, exits of replicas, profiles and readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from meltcore.common.errors import EngineDeadError, RequestError
from meltcore.common.tasks import tasks
from meltcore.protocol.engines import FromEngine, ToEngine, shared_stats
from meltcore.protocol.shell import EngineOutputs, EngineReady, Profile, ProfileDone
from meltcore.serve.engines.engine_link import EngineLink
from meltcore.serve.requests.admission import Admission, Unit
from meltcore.serve.requests.backend import SERVING, Health
from meltcore.serve.requests.open_tickets import OpenTickets, Outcome
from meltcore.serve.requests.request_queue import RequestQueue
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.settings.config import Profiler
from meltcore.settings.fleet_spec import LimitsSection, ModelSection

ENGINE_DEAD = "the engine has died"


class EngineBackend:
    """Connects one API server process to the engines of one model. There is one engine per replica.

    `purpose` completes "the model NAME ..." in errors. `unit` is the unit in which the queue is bounded beside the
    number of requests.
    """

    purpose: str
    unit: Unit
    tickets: OpenTickets[Any] | None = None  # once there can be any
    loading: asyncio.Task[Any] | None = None  # of what `load` returns; None where no engine can be started
    opening: asyncio.Task[None] | None = None

    def __init__(
        self,
        name: str,
        config: ModelSection,
        server: ServerStats,
        stats: ModelStats,
        *,
        limits: LimitsSection,
        request_timeout_s: float,
    ) -> None:
        """Create the backend of a model. The model's statistics name the task."""
        self.config = config
        self.names = (name, *config.aliases)
        self.paths: Sequence[str] = tuple(tasks()[stats.task].paths)
        self.stats = stats
        self.health = Health(stats, model=self.names[0])
        self._limit_s = request_timeout_s
        self._limits = limits
        self._server_stats = server
        self._text: Any = None  # what `load` has returned
        self._ready: Any = None  # what the engines have said about the loaded model
        self._created = 0  # Unix seconds; once the model is open
        self._links: dict[int, EngineLink] = {}  # by replica
        self._profiles: list[tuple[int, asyncio.Future[ProfileDone]]] = []  # by the replica that was asked

    @property
    def chats(self) -> bool:
        """Whether the model accepts chats."""
        return False

    def load(self) -> Any:
        """Load what the API needs of a model, such as a tokenizer, and return it. Called in a thread.

        Raises ConfigError if the files are missing or invalid.
        """

    def open(self, text: Any, engine: Any, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready".

        Args:
            text: the return value of `load`.
            engine: the engines' ready message about the loaded model.
            created: time at which the model was created, for the model card.
        """
        self._text, self._ready, self._created = text, engine, created

    def on_step(self, step: Any, replica: int) -> None:
        """Pass the outputs of one step of a replica's engine to their requests."""
        self.stats.record_step(shared_stats(step.stats), step.step_ended_s, replica)
        for output in step.outputs:
            self.on_output(replica, output)

    def on_output(self, replica: int, output: Any) -> None:
        """Handle one output of a request.

        An output of a lost replica is dropped if another replica works on the request.
        """

    def on_message(self, replica: int, message: FromEngine) -> None:
        """Handle a message that a replica's engine sent to this process."""
        if isinstance(message, EngineOutputs):
            if self.tickets is not None:
                self._server_stats.record_cpu_time()
                self.on_step(message, replica)
        elif isinstance(message, ProfileDone):
            self._on_profile_done(replica, message)

    def _new_queue(self, slots: int, waiting_units: Callable[[], float] | None = None) -> RequestQueue:
        """Create the queue of the model. A replica runs `slots` requests concurrently."""
        limits = self._limits.of(self.config)
        max_units = getattr(limits, self.unit.setting)
        admission = Admission(max_queue=limits.max_queue, max_units=max_units, max_num_seqs=slots, unit=self.unit)
        return RequestQueue(self.stats, admission, slots=slots, shares=limits.class_shares, waiting_units=waiting_units)

    def end_all(self, error: RequestError, outcome: Outcome, replica: int | None = None) -> None:
        """End the open requests with an error: all of them, or the requests of `replica` only."""
        if self.tickets is not None:
            self.tickets.end_all(error, outcome, replica)

    def retry(self, replica: int, others: Sequence[int]) -> None:
        """Send the requests of a lost replica to other replicas."""
        if self.tickets is not None:
            self.tickets.retry(replica, others)

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""
        self._loaded()

    def _loaded(self) -> Any:
        """Return the engines' ready message. Raises RequestError (503) while the model cannot serve."""
        if self._ready is None or self.health.status not in SERVING:
            self.stats.add(f"rejected_{self.health.status}")
            raise self.health.not_ready(self.health.reason)
        return self._ready

    def model_card(self, name: str) -> dict[str, Any]:
        """Return OpenAI's model card, with the fields of the task and with fields for clients and measurements.

        Raises RequestError (503) while the model cannot serve.
        """
        engine: EngineReady = self._loaded()
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "meltcore"}
        common = {"weights": engine.weights, "device": engine.device, "dtype": engine.dtype}
        facts = {"task": self.stats.task, **self.facts(engine)}
        return card | facts | common | {"replicas": self.config.replicas, "priority": self.config.priority}

    def facts(self, ready: Any) -> Mapping[str, Any]:  # noqa: ARG002 - of some tasks
        """Return the fields that the task adds to the model card."""
        return {}

    def connect(
        self, replica: int, folder: Path, client_index: int, on_unreadable: Callable[[int, str], object]
    ) -> None:
        """Bind the sockets in `folder` to which a replica's engine connects.

        The replica stays disconnected if its engine has ended before this process knew of it. `on_unreadable` has the
        arguments replica and reason.
        """
        on_message, on_error = partial(self.on_message, replica), partial(on_unreadable, replica)
        on_lost = partial(self._on_lost, replica)
        with suppress(EngineDeadError):  # `replica_ended` follows
            self._links[replica] = EngineLink(folder, client_index, on_message, on_error, on_lost)
        self.stats.set_connected(replica, replica in self._links)

    def _on_lost(self, replica: int, reason: str) -> None:
        """Retry or end the requests of an engine on another machine, since messages may be lost with the connection."""
        self._retry_or_end(replica, reason, "engine_lost", replica)

    def _retry_or_end(self, replica: int, message: str, code: str, ended_replica: int | None) -> None:
        """Retry the requests of a lost replica on other replicas if one is ready, and end all others of its requests.

        `message` and `code` are the error (503) of ended requests. Requests of `ended_replica` are ended if they were
        not retried. None means all replicas.
        """
        others = [each for each in self.stats.live_replicas() if each != replica]
        if others:
            self.retry(replica, others)
        self.end_all(RequestError(message, status=503, code=code), "failed", ended_replica)

    def replica_ended(self, replica: int, message: str) -> None:
        """Retry or end the requests of a replica whose engine has died or was stopped.

        Close the sockets to the engine.
        """
        self.stats.set_connected(replica, False)
        # With the last one also those end that wait for a turn, unless they wait for a model that sleeps.
        ended_replica = replica if self.stats.live_replicas() or self.stats.is_asleep else None
        self._retry_or_end(replica, message, "engine_dead", ended_replica)
        for profiled_replica, future in self._profiles:
            if profiled_replica == replica and not future.done():
                future.set_exception(EngineDeadError(message))
        self._profiles = [waiting_profile for waiting_profile in self._profiles if waiting_profile[0] != replica]
        if (link := self._links.pop(replica, None)) is not None:
            link.close()

    def close(self) -> None:
        """Close the sockets."""
        for link in self._links.values():
            link.close()

    async def close_workers(self) -> None:
        """End the worker processes of this backend."""

    async def profile(self, action: Literal["start", "stop"], directory: str, profiler: Profiler) -> ProfileDone:
        """Start or stop the profiler of the first replica only, because all replicas do the same work.

        Returns the engine's answer. Raises RequestError (503) while the model cannot serve, and EngineDeadError if the
        replica dies.
        """
        self.check_ready()
        replica = min(self.stats.live_replicas(), default=None)
        if replica is None:
            raise EngineDeadError(ENGINE_DEAD)
        done_future: asyncio.Future[ProfileDone] = asyncio.get_running_loop().create_future()
        self._profiles.append((replica, done_future))
        self._send(Profile(action, directory, profiler), replica)
        return await done_future

    def _on_profile_done(self, replica: int, message: ProfileDone) -> None:
        for index, (profiled_replica, future) in enumerate(self._profiles):
            if profiled_replica == replica:
                del self._profiles[index]
                if not future.done():
                    future.set_result(message)
                return

    def _send(self, message: ToEngine, replica: int) -> None:
        if (link := self._links.get(replica)) is not None:  # else its engine has ended, and all that it worked on
            link.send(message)

    def _live_replicas(self) -> list[int]:
        """Return the indices of the replicas for a new request. The list is empty while the model sleeps.

        Raises RequestError (503) if no replica lives. The last replica may have died a moment ago, before the
        supervisor's message about its exit has arrived.
        """
        replicas = self.stats.live_replicas()
        if not replicas and not self.stats.is_asleep:
            self.check_ready()
            raise self.health.not_ready(ENGINE_DEAD)
        return replicas
