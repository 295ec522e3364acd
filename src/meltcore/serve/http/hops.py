"""Detects requests that return to this server through its upstreams, whatever address the servers use for it.

Each server adds a name of its own to the header `Via` (RFC 9110, 7.6.3) of requests to its upstreams. A server refuses
requests whose `Via` contains its own name. Some gateways drop the header, so `/v1/models` shows the name too.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

from meltcore.common.errors import RequestError

LOOP_STATUS = 508
CIRCLE_CODE = "waiting_in_a_circle"
_NAME = re.compile(r"\bmeltcore-[0-9a-f]{16}\b")
_MAX_NAMES = 64  # a loop of more servers than these would not be seen
_MAX_CIRCLE_SERVERS = 6  # that wait for each other: each asks all of its upstreams for every question
_own_name = f"meltcore-{secrets.token_hex(8)}"


def own_name() -> str:
    """Return the name of this server, which is the same in all its processes."""
    return _own_name


def set_own_name(name: str) -> None:
    """Set the name of the server to which this process belongs."""
    global _own_name
    _own_name = name


def check_hops(scope: Scope) -> None:
    """Raise RequestError (508) if `Via` shows that this server has already sent this request to an upstream."""
    if _own_name in _passed_servers(scope):
        raise RequestError(
            "this request has been here before: the address of an upstream leads back to this server",
            status=LOOP_STATUS,
            code="loop_detected",
        )


def may_probe(scope: Scope) -> bool:
    """Return whether a health request may be passed on to this server's upstreams.

    The request must come from another Meltcore server, which may wait for this one, and have passed only few servers.
    """
    return 1 <= len(_passed_servers(scope)) < _MAX_CIRCLE_SERVERS


def via_lines(scope: Scope | None = None) -> str:
    """Return the header `Via` for a request to an upstream, with its line end.

    The header names the Meltcore servers that the request `scope` has passed, and then this server. Other names in the
    client's `Via` are dropped, because no header of a client is passed on.
    """
    passed_servers = [] if scope is None else _passed_servers(scope)[-_MAX_NAMES:]
    return f"Via: {', '.join(f'1.1 {name}' for name in [*passed_servers, _own_name])}\r\n"


def _passed_servers(scope: Scope) -> list[str]:
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == b"via"]
    return [name for value in values for name in _NAME.findall(value)]
