"""Defines the interface of backends, which the API calls. A table maps each model name to a backend."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Scope

from meltcore.common.errors import RequestError
from meltcore.common.tasks import DEFAULT
from meltcore.serve.requests.request_fields import MAX_FIELD_CHARS, shorten
from meltcore.serve.requests.stats import ModelStats
from meltcore.settings.config import ModelStatus
from meltcore.settings.routes_section import LanguagesSection, RoutesSection

# In which requests are accepted.
SERVING: frozenset[ModelStatus] = frozenset(("ready", "sleeping", "waking"))

LANGUAGE_PATHS = tuple(DEFAULT.paths)
# A replica with open requests that finishes no step for so long is stuck. The longest step, on a slow CPU, is shorter.
STUCK_AFTER_S = 120.0


class Backend(Protocol):
    """Serves the requests to one model. Each subclass adds the methods of its model's task."""

    names: tuple[str, ...]  # every one is accepted; the first stands in metrics and logs
    stats: ModelStats
    health: Health

    @property
    def paths(self) -> Sequence[str]:
        """The routes of the model's task."""

    @property
    def purpose(self) -> str:
        """A text that completes "the model NAME ..." in errors: the model's function, and where it is served."""

    @property
    def chats(self) -> bool:
        """Whether the model accepts chats.

        A language model accepts chats if it has a chat template, and while it is still loading.
        """

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""

    def model_card(self, name: str) -> dict[str, Any]:
        """Return the model's entry in GET /v1/models."""


def other_task(backend: Backend) -> RequestError:
    """Return the error (400) for a request whose task the model does not have."""
    return RequestError(f"the model {backend.names[0]} {backend.purpose}", param="model")


class Health:
    """Says whether a model can be served: its engine runs, and finishes steps while requests are open."""

    def __init__(self, stats: ModelStats, stuck_after_s: float = STUCK_AFTER_S, model: str | None = None) -> None:
        self.status: ModelStatus = "loading"
        self.reason = "loading: starting"
        self.has_failed = False  # in this process, which cannot load what it needs
        self._stats = stats
        self._stuck_after_s = stuck_after_s
        self._model = model  # its name, for errors

    def set(self, status: ModelStatus, reason: str) -> None:
        """Change the status.

        A "dead" model stays dead. A model that has failed in this process never serves again in this process.
        """
        if self.status != "dead" and not (self.has_failed and status in SERVING):
            self.status = status
            self.reason = reason

    def fail(self, reason: str) -> None:
        """Note that this process can never serve the model."""
        self.has_failed = True
        self.set("failed", reason)

    def not_ready(self, reason: str) -> RequestError:
        """Return the error (503) for a request that cannot be served now, with the estimated seconds until it can."""
        is_starting = self.status in ("loading", "restarting")
        retry_s = self._stats.until_started_s() if is_starting else None
        return RequestError(reason, status=503, code="not_ready", retry_after_s=retry_s, model=self._model)

    def problem(self) -> str | None:
        """Return the reason why the model cannot be served now, or None if the model can be served."""
        if self.status not in SERVING:
            return self.reason
        for replica in self._stats.live_replicas():
            age_s = time.monotonic() - self._stats.last_message_s(replica)
            if self._stats.open_requests(replica) and age_s > self._stuck_after_s:
                replica_note = f" of replica {replica}" if self._stats.replicas > 1 else ""
                return f"stuck: no step{replica_note} has finished for {age_s:.0f} s while requests are open"
        return None

    async def circle(self, scope: Scope) -> str | None:  # noqa: ARG002 - as models elsewhere have it
        """Return a text that names upstreams which wait for each other in a circle, or None if there is no circle.

        In a circle they wait for a server that the health request `scope` has already passed.
        """
        return None


def reasons_text(reasons: Mapping[str, str]) -> str:
    """Return the reasons why models cannot serve as one text.

    With several models, each reason follows the model's name.
    """
    if len(reasons) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


class ModelTable:
    """Maps each name of a model to its backend. It also has the configured models of languages and routes."""

    def __init__(self, backends: Sequence[Backend] = ()) -> None:
        self.backends: list[Backend] = []
        self.languages, self.routes = LanguagesSection(), RoutesSection()
        self._by_name: dict[str, Backend] = {}
        self._order: Sequence[str] = ()
        for backend in backends:
            self.add(backend)

    def add(self, backend: Backend) -> None:
        """Add a model. From now on its names lead to this model, even if another model has the same names.

        The model is listed before an older model of the same name. Otherwise its position is that in fleet.yaml.
        """
        position = next((index for index, each in enumerate(self.backends) if each.names[0] == backend.names[0]), None)
        self.backends.insert(len(self.backends) if position is None else position, backend)
        self._sort()
        self._by_name |= dict.fromkeys(backend.names, backend)

    def remove(self, backend: Backend) -> None:
        """Remove a model, and its names."""
        self.backends.remove(backend)
        self._by_name = {name: each for name, each in self._by_name.items() if each is not backend}

    def change_routes(self, order: Sequence[str], languages: LanguagesSection, routes: RoutesSection) -> None:
        """Replace the models of languages and routes, and the order of models.

        `order` has the first name of each model. The first model of the order is the default, regardless of when it was
        added.
        """
        self.languages, self.routes, self._order = languages, routes, order
        self._sort()

    def _sort(self) -> None:
        position_by_name = {name: position for position, name in enumerate(self._order)}
        self.backends.sort(key=lambda backend: position_by_name.get(backend.names[0], len(position_by_name)))

    def check_ready(self) -> None:
        """Raise RequestError (503) with the reason of each model while no model can serve."""
        for backend in self.backends:
            if backend.health.status in SERVING:
                return
        try:
            self._first().check_ready()
        except RequestError as error:
            reasons = {backend.names[0]: backend.health.problem() or str(error) for backend in self.backends}
            if len(reasons) == 1:
                raise
            message = reasons_text(reasons)
            raise RequestError(
                message, status=error.status, code=error.code, retry_after_s=error.retry_after_s
            ) from error

    def get(self, name: str) -> Backend | None:
        """Return the backend of the model `name`, even if it is not ready. Returns None for an unknown name."""
        return self._by_name.get(name)

    def find(self, name: str | None) -> Backend:
        """Return the backend of the model `name` if it is ready or sleeps. None stands for the first model.

        Raises RequestError: 404 with the known names for an unknown model, and 503 while the model cannot serve.
        """
        backend = self._first() if name is None else self._by_name.get(name)
        if backend is None:
            raise RequestError(
                f"there is no model {shorten(name)!r} here; this server has {', '.join(self._by_name)}",
                param="model",
                status=404,
                code="model_not_found",
                model=str(name)[:MAX_FIELD_CHARS],
            )
        backend.check_ready()
        return backend

    def default(self, path: str) -> str | None:
        """Return the name of the model for a request that names no model. Returns None if no model serves `path`.

        For chats and completions this is the model of the chat routes. For other paths it is the first model that
        serves the path.
        """
        if self.routes.chat.model is not None and path in LANGUAGE_PATHS:
            return self.routes.chat.model
        return next((backend.names[0] for backend in self.backends if path in backend.paths), None)

    def _first(self) -> Backend:
        if not self.backends:
            raise RequestError("loading: starting", status=503, code="not_ready")
        return self.backends[0]
