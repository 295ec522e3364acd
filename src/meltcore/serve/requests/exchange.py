"""Represents one HTTP request and its answer, from the gate to the log line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.serve.requests.admission import asleep_error
from meltcore.serve.requests.asgi import (
    ErrorForm,
    Headers,
    error_form,
    error_json,
    identity_headers,
    read_body,
    request_id,
    send_bytes,
    send_error,
)
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.request_fields import header
from meltcore.serve.requests.tracing import describe_span
from meltcore.settings.config import PriorityClass

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from meltcore.serve.requests.keys import ApiKey
    from meltcore.serve.requests.stats import ModelStats

EVENTS = b"text/event-stream; charset=utf-8"


class Exchange:
    """One HTTP request and its answer.

    `key`, `priority_class` and `timeout_s` come from the headers. None uses the default of the server or of the model.
    `fields` are for the log line, and contain neither text nor audio. A request may use several models, one after
    another or concurrently, as speech to speech does. The tickets at all these models belong to this exchange.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.arrived_s = time.monotonic()
        self.identity = request_id(scope)
        self.body_type = (header(scope, b"content-type") or b"application/json").decode("latin-1")
        self.key: ApiKey | None = None
        self.priority_class: PriorityClass | None = None
        self.timeout_s: float | None = None
        self.span: Span | None = None  # where traces are on
        self.buffered_body: bytes | None = None  # that was read to find its model, until its endpoint reads it
        self.headers: Headers = identity_headers(scope["path"], self.identity)  # of the answer
        self.content_type: bytes | None = None  # of an answer that has begun
        self.error_form: ErrorForm = error_form(scope["path"])
        self.fields: dict[str, Any] = {}
        self.admissions: list[tuple[str, PriorityClass]] = []  # task and class, at each model
        self.queued_models: list[ModelStats] = []  # models in whose queues it waits, or has waited until it ended
        self.queue_wait_s = 0.0  # in all queues
        self.retries = 0  # on other replicas, after the death of the first

    # --- the request

    @property
    def query(self) -> dict[str, str]:
        """The fields of the URL."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    async def body(self, limit_bytes: int) -> bytes:
        """Return the body.

        Raises RequestError (413) if it is larger than `limit_bytes`, and ClientDisconnectedError.
        """
        body, self.buffered_body = self.buffered_body, None
        return await read_body(self.scope, self.receive, limit_bytes) if body is None else body

    def class_of(self, default: PriorityClass, priority: int | None = None) -> PriorityClass:
        """Return the priority class of the request. The API key may lower it.

        `default` is the model's class. `priority` is the field of vLLM's API: values below 0 mean interactive, values
        above 0 mean batch.
        """
        name = self.priority_class
        if name is None:
            name = default if not priority else "interactive" if priority < 0 else "batch"
        return name if self.key is None else self.key.at_most(name)

    def charge(self, tokens: int) -> None:
        """Count tokens of the request against the limit of its key."""
        if self.key is not None:
            self.key.charge(tokens)

    # --- its time limit

    def limit_s(self, server_limit_s: float) -> float:
        """Return the time limit in seconds, counted from the request's arrival."""
        return server_limit_s if self.timeout_s is None else min(self.timeout_s, server_limit_s)

    def overdue(self, server_limit_s: float) -> RequestError:
        """Return the error for a request that exceeds its time limit.

        The status is 503 if the request waited for a model that sleeps, else 504.
        """
        limit_s = self.limit_s(server_limit_s)
        if self.queued_models and self.queued_models[0].is_asleep:
            return asleep_error(self.queued_models[0], f"the model sleeps and could not be woken within {limit_s:g} s")
        server_source = "--request-timeout, or timeouts.request_s of a fleet"
        source = server_source if limit_s == server_limit_s else "X-Request-Timeout"
        message = f"the answer took longer than {limit_s:g} s ({source})"
        return RequestError(message, status=504, code="request_timeout")

    @asynccontextmanager
    async def timeout(self, server_limit_s: float) -> AsyncIterator[None]:
        """Limit the time of the block. When the time has passed, raise the error that `overdue` returns (503, 504)."""
        try:
            async with asyncio.timeout(self.limit_s(server_limit_s)):
                yield
        except TimeoutError as error:
            raise self.overdue(server_limit_s) from error

    # --- the answer

    async def answer(self, body: bytes, content_type: bytes) -> None:
        """Send a complete answer."""
        self.content_type = content_type
        await send_bytes(self.send, body, content_type, headers=self.headers)

    async def answer_json(self, value: Any) -> None:
        """Send a complete answer, encoded as JSON."""
        await self.answer(msgspec.json.encode(value), b"application/json")

    async def stream(self, data: bytes, content_type: bytes) -> None:
        """Send the next part of an answer whose length is unknown. Wait while the client is slow to read."""
        if self.content_type is None:
            self.content_type = content_type
            headers = [(b"content-type", content_type), *self.headers]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def event(self, event: dict[str, Any]) -> None:
        """Send a server-sent event."""
        await self.stream(b"data: " + msgspec.json.encode(event) + b"\n\n", EVENTS)

    async def end(self) -> None:
        """End a streamed answer."""
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: RequestError) -> None:
        """Report an error: as the answer, as an event of a stream, or by breaking off an answer that has begun."""
        self.fields |= {"status": error.status, "error": error.code or error.param}
        if self.content_type is None:
            await send_error(self.send, error, headers=self.headers, form=self.error_form, identity=self.identity)
        elif self.content_type is EVENTS:
            await self.stream(b"data: " + error_json(error, self.error_form) + b"\n\n", EVENTS)
            await self.end()
        else:  # without its last chunk the answer is incomplete, which HTTP clients report
            self.scope["meltcore.connection"].transport.abort()

    def write_line(self, log: Log) -> None:
        """Write the log line of the request, and set the attributes of its span."""
        fields = {"request_id": self.identity, "path": self.scope["path"], **self.fields}
        fields |= {"total_s": round(time.monotonic() - self.arrived_s, 6)}
        if self.key is not None:
            fields["key"] = self.key.name
        if self.admissions:
            fields["task"] = ",".join(task for task, _ in self.admissions)
            fields["class"] = self.admissions[0][1]
            fields["queue_wait_s"] = round(self.queue_wait_s, 6)
        if self.retries:
            fields["retries"] = self.retries
        if self.span is not None:
            describe_span(self.span, fields)
        log.write("request", **fields)


_CURRENT: ContextVar[Exchange] = ContextVar("exchange")


def current_exchange() -> Exchange:
    """Return the exchange that the current asyncio task serves. Raises LookupError if it serves none."""
    return _CURRENT.get()


def set_exchange(exchange: Exchange) -> None:
    """Set the exchange that the current asyncio task serves. Tasks that it creates later serve the same exchange."""
    _CURRENT.set(exchange)
