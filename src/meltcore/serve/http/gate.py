"""Checks requests before all routes: refuses pages of other sites and invalid keys, and creates the exchange."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.common.options import read_number
from meltcore.serve.http.hops import check_hops
from meltcore.serve.http.origins import OriginCheck
from meltcore.serve.http.paths import OPEN_PATHS
from meltcore.serve.requests.exchange import Exchange, set_exchange
from meltcore.serve.requests.keys import ApiKeys
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.request_fields import header, shorten
from meltcore.serve.requests.stats import CLASSES
from meltcore.serve.requests.tracing import end_span
from meltcore.settings.config import PriorityClass

if TYPE_CHECKING:
    from meltcore.serve.requests.tracing import Tracing

TIMEOUT_HEADER, CLASS_HEADER = b"x-request-timeout", b"x-priority-class"


def check_headers(exchange: Exchange, keys: ApiKeys) -> None:
    """Set the API key, the priority class and the time limit of an exchange from the headers of its request.

    Raises RequestError: 401 without a valid key, 400 for an invalid header, and 429 past a limit of the key.
    """
    scope = exchange.scope
    key = keys.find(scope)
    timeout, priority_class = header(scope, TIMEOUT_HEADER), header(scope, CLASS_HEADER)
    timeout_s = None if timeout is None else _timeout_s(timeout)
    class_name = None if priority_class is None else _priority_class(priority_class)
    if key is not None and scope["method"] == "POST":
        key.admit()
    exchange.key, exchange.priority_class, exchange.timeout_s = key, class_name, timeout_s


def _timeout_s(value: bytes) -> float:
    try:
        seconds = read_number(value.decode("latin-1"), float)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        text = shorten(value.decode("latin-1"))
        raise RequestError(f"X-Request-Timeout must be a number of seconds above 0; got {text!r}")
    return seconds


def _priority_class(value: bytes) -> PriorityClass:
    text = value.decode("latin-1").strip().lower()
    for name in CLASSES:
        if name == text:
            return name
    raise RequestError(f"X-Priority-Class must be one of {', '.join(CLASSES)}; got {shorten(text)!r}")


class RequestGate:
    """Passes requests to `app`, except requests that must be refused.

    A request is refused if it comes from a page of another site, has no valid key, or exceeds the rate of its key. A
    request that this server has already sent to an upstream is refused too.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, log: Log, origins: OriginCheck, tracing: Tracing | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins
        self._log = log
        self._tracing = tracing

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        exchange = Exchange(scope, receive, send)
        set_exchange(exchange)
        try:
            check_hops(scope)
            self._origins.check(scope)
        except RequestError as error:
            return self._refuse(exchange, error)
        if scope["path"] in OPEN_PATHS:
            return self._app(scope, receive, send)
        if self._tracing is not None and scope["method"] == "POST":
            return self._pass_traced(exchange, self._tracing)
        return self._check_and_pass(exchange)

    def _check_and_pass(self, exchange: Exchange) -> Awaitable[None]:
        try:
            check_headers(exchange, self._keys)
        except RequestError as error:
            return self._refuse(exchange, error)
        return self._app(exchange.scope, exchange.receive, exchange.send)

    async def _pass_traced(self, exchange: Exchange, tracing: Tracing) -> None:
        exchange.span, failure = tracing.begin(exchange.scope), None
        try:
            await self._check_and_pass(exchange)
        except BaseException as error:
            failure = error
            raise
        finally:
            end_span(exchange.span, failure)

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        await exchange.fail(error)
        exchange.write_line(self._log)
