"""What backends of upstream servers do: they forward requests, and say how each ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import msgspec
from starlette.types import Scope, Send


@dataclass(slots=True)
class ForwardedRequest:
    """One request and the way to answer it. With `is_streamed` its answer is server-sent events."""

    scope: Scope
    send: Send
    path: str
    request_id: str
    arrived_s: float  # time.monotonic()
    body: bytes
    content_type: str
    model: str  # the name that the client used
    is_streamed: bool
    priority: int = 0  # vLLM's field
    first_byte_s: float | None = None  # time.monotonic(), of the body of the answer

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that every answer of ours has."""
        return [(b"x-request-id", self.request_id.encode())]


class ForwardOutcome(msgspec.Struct):
    """How a request ended, for the log.

    `error` is the code of an error of this server; the upstream's errors have none.

    The upstream counts prompt_tokens and completion_tokens, or else its events tell them. They are None where neither
    does.
    """

    status: int
    replica: int | None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@runtime_checkable
class ForwardingBackend(Protocol):
    """A backend whose server answers with bytes that are passed on."""

    names: tuple[str, ...]
    paths: tuple[str, ...]

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""

    async def forward(self, request: ForwardedRequest) -> ForwardOutcome:
        """Send the request on and its answer back. Raises RequestError, in which case nothing was sent back."""


def is_forwarding(backend: object) -> TypeGuard[ForwardingBackend]:
    """Return whether a backend forwards. Of a protocol, isinstance looks at every member: 30 us per request."""
    return hasattr(backend, "forward")
