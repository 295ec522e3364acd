"""What backends of upstream servers do: they forward requests, and say how each ended."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

import msgspec

from meltcore.serve.tasks.exchange import Exchange


class ForwardedFields(msgspec.Struct):
    """What is read of a request that may be forwarded. The rest of its body is the upstream's to check."""

    model: str | None = None  # the name that the client used
    stream: bool | None = None  # the answer is server-sent events
    user: str | None = None
    priority: Any = None  # vLLM's field


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

    async def forward(self, exchange: Exchange, fields: ForwardedFields) -> ForwardOutcome:
        """Send the body that `exchange` passes on, and its answer back.

        Raises RequestError, in which case nothing was sent back.
        """


def is_forwarding(backend: object) -> TypeGuard[ForwardingBackend]:
    """Return whether a backend forwards. Of a protocol, isinstance looks at every member: 30 us per request."""
    return hasattr(backend, "forward")
