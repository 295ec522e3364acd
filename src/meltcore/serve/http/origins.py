"""Decides which web pages may use a server, by the headers Host and Origin. Browsers set these headers, not pages.

A page of another site can send requests to a server on the user's own machine. Origin then names the page's site. If
the name of a site resolves to 127.0.0.1 (DNS rebinding), the browser treats its pages as pages of this server. Host
then has the name of that site.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import Scope

from meltcore.common.errors import RequestError
from meltcore.serve.requests.request_fields import shorten

ANY_ORIGIN = "*"
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))  # whose answers a browser keeps from other sites' pages
_MAX_ACCEPTED_HOSTS = 256  # values of Host that are remembered: a port may stand in them
_REMEDY = "(--allowed-origins, or server.allowed_origins of a fleet)"


def is_loopback(host: str) -> bool:
    """Return whether a host without a port is this machine: localhost or a loopback address.

    Other names are not resolved.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """Return the name or address in the value of a Host header, in lower case and without the port."""
    host = value.strip().lower()
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


class OriginCheck:
    """Refuses requests of web pages that are neither the server's own nor allowed."""

    def __init__(self, host: str, allowed_origins: Sequence[str] = ()) -> None:
        """Prepare the check for a server that listens on `host`."""
        self._allows_all = ANY_ORIGIN in allowed_origins
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        # The host of an allowed origin may stand in Host: a page there is allowed, and a proxy may keep the header.
        self._hosts = {urlsplit(origin).hostname for origin in allowed_origins} | {host}
        self._checks_host = not self._allows_all and is_loopback(host)
        self._accepted_hosts: set[bytes] = set()

    def check(self, scope: Scope) -> None:
        """Raise RequestError (403) if Host is not this machine, or if Origin is not allowed."""
        if self._allows_all:
            return
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        if self._checks_host and host is not None and host not in self._accepted_hosts:
            self._check_host(host)
        if origin is not None and scope["method"] not in _SAFE_METHODS and origin not in self._origins:
            self._check_origin(origin, host or b"")

    def _check_host(self, value: bytes) -> None:
        text = value.decode("latin-1")
        name = host_name(text)
        if not is_loopback(name) and name.strip("[]") not in self._hosts:
            raise RequestError(
                f"the header Host is {shorten(text)!r}, and this server listens for its own machine alone; "
                f"allow the origin of that host, such as http://{shorten(text)} {_REMEDY}",
                status=403,
                code="host_not_allowed",
            )
        if len(self._accepted_hosts) < _MAX_ACCEPTED_HOSTS:
            self._accepted_hosts.add(value)

    def _check_origin(self, value: bytes, host: bytes) -> None:
        """Check that a page comes from the host of the request. The scheme may differ behind a proxy."""
        if value.partition(b"://")[2].lower() != host.lower() or not host:
            text = shorten(value.decode("latin-1"))
            raise RequestError(
                f"the header Origin is {text!r}: a page of another site may not use this server; allow it {_REMEDY}",
                status=403,
                code="origin_not_allowed",
            )
