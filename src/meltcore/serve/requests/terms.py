"""The terms on which a request is served: its client's key, its priority class, and its time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from meltcore.common.errors import RequestError
from meltcore.settings.config import PriorityClass

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from meltcore.serve.requests.keys import ApiKey
    from meltcore.serve.requests.stats import ModelStats


MODEL_ASLEEP = "model_asleep"


class RequestTerms:
    """What a request's headers ask for, and how long the request has waited.

    None stands for the default of the server or of the model. A request may use several models, in turn or
    concurrently, as speech to speech does.
    """

    __slots__ = (*("admissions", "key", "priority_class", "queue_wait_s", "retries", "span", "timeout_s", "waits_for"),)

    def __init__(
        self, key: ApiKey | None = None, priority_class: PriorityClass | None = None, timeout_s: float | None = None
    ) -> None:
        self.key = key
        self.priority_class = priority_class
        self.timeout_s = timeout_s
        self.admissions: list[tuple[str, PriorityClass]] = []  # task and class, at each model
        self.waits_for: list[ModelStats] = []  # models in whose queues it waits, or has waited until it ended
        self.queue_wait_s = 0.0  # in all queues
        self.retries = 0  # on other replicas, after the death of the first
        self.span: Span | None = None  # where traces are on

    def class_of(self, default: PriorityClass, priority: int | None = None) -> PriorityClass:
        """Return the class of the request, which is not above the class of its key. `default` is the model's class.

        `priority` is vLLM's field. Values below 0 mean interactive, and values above 0 mean batch.
        """
        asked = self.priority_class
        if asked is None:
            asked = default if not priority else "interactive" if priority < 0 else "batch"
        return asked if self.key is None else self.key.at_most(asked)

    def limit_s(self, server_limit_s: float) -> float:
        """Return the time limit in seconds, counted from the request's arrival."""
        return server_limit_s if self.timeout_s is None else min(self.timeout_s, server_limit_s)

    def overdue(self, server_limit_s: float) -> RequestError:
        """Return the error of a request that exceeds its time limit.

        The status is 503 if the request waited for a model that sleeps, else 504.
        """
        limit_s = self.limit_s(server_limit_s)
        if self.waits_for and self.waits_for[0].is_asleep:
            return asleep_error(self.waits_for[0], f"the model sleeps and could not be woken within {limit_s:g} s")
        source = "--request-timeout" if limit_s == server_limit_s else "X-Request-Timeout"
        message = f"the answer took longer than {limit_s:g} s ({source})"
        return RequestError(message, status=504, code="request_timeout")

    @asynccontextmanager
    async def timeout(self, server_limit_s: float) -> AsyncIterator[None]:
        """Limit the time of the block. Raises RequestError (503, 504), as `overdue` returns it."""
        try:
            async with asyncio.timeout(self.limit_s(server_limit_s)):
                yield
        except TimeoutError as error:
            raise self.overdue(server_limit_s) from error

    def charge(self, tokens: int) -> None:
        """Count tokens of the request against its key's limit."""
        if self.key is not None:
            self.key.charge(tokens)

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the request's log line that follow from its terms."""
        fields: dict[str, Any] = {} if self.key is None else {"key": self.key.name}
        if self.admissions:
            fields["task"] = ",".join(task for task, _ in self.admissions)
            fields["class"] = self.admissions[0][1]
            fields["queue_wait_s"] = round(self.queue_wait_s, 6)
        if self.retries:
            fields["retries"] = self.retries
        return fields


def asleep_error(stats: ModelStats, message: str) -> RequestError:
    """Return the error (503) of a request whose model sleeps and cannot serve the request in time."""
    retry_s = max(1.0, stats.wake_at_s() - time.monotonic())
    return RequestError(message, status=503, code=MODEL_ASLEEP, retry_after_s=retry_s)


_TERMS: ContextVar[RequestTerms | None] = ContextVar("terms", default=None)


def current_terms() -> RequestTerms:
    """Return the terms of the request that this task serves. Outside of a request, return the default terms."""
    return _TERMS.get() or RequestTerms()


def set_terms(terms: RequestTerms) -> None:
    """Set the terms of the request that this task serves. Tasks that this task creates later have the same terms."""
    _TERMS.set(terms)
