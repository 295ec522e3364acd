"""Finds requests that come back to the server that sent them on, whatever form its address had.

Each server adds a name of its own to the header `Via` (RFC 9110, 7.6.3) of what it sends to its upstreams. It refuses
requests that have been here before, also over other servers. `/v1/models` states the name too, since gateways may drop
the header.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

from meltcore.common.errors import RequestError

LOOP_STATUS = 508
CIRCLE_CODE = "waiting_in_a_circle"
_NAME = re.compile(r"\bmeltcore-[0-9a-f]{16}\b")
_MOST_NAMES = 64  # a loop of more servers than these would not be seen
_MOST_PROBED = 6  # servers of a circle that wait for each other: each asks all of its upstreams for every question
_own_name = f"meltcore-{secrets.token_hex(8)}"


def own_name() -> str:
    """Return the name of this server, which all its processes have."""
    return _own_name


def set_own_name(name: str) -> None:
    """Take the name of the server that this process belongs to."""
    global _own_name
    _own_name = name


def check_hops(scope: Scope) -> None:
    """Raise RequestError (508) for a request that this server has sent on before."""
    if _own_name in _passed_servers(scope):
        raise RequestError(
            "this request has been here before: the address of an upstream leads back to this server",
            status=LOOP_STATUS,
            code="loop_detected",
        )


def may_probe(scope: Scope) -> bool:
    """Return whether a question about this server's health comes from another one that may wait for it."""
    return 1 <= len(_passed_servers(scope)) < _MOST_PROBED


def via_lines(scope: Scope | None = None) -> str:
    """Return lines of the head of a request to an upstream: the servers that `scope` has passed, and this one.

    Other names stay here, as all headers of clients do.
    """
    passed = [] if scope is None else _passed_servers(scope)[-_MOST_NAMES:]
    return f"Via: {', '.join(f'1.1 {name}' for name in [*passed, _own_name])}\r\n"


def _passed_servers(scope: Scope) -> list[str]:
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == b"via"]
    return [name for value in values for name in _NAME.findall(value)]
