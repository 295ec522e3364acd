"""A plain, blocking client for checks: one connection a request, any bytes as body, nothing hidden or retried.

Checks need the raw answer to deliberately bad requests, and are few. Measuring goes through the load generator.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import socket
import ssl
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.results.served import model_facts

EXCHANGE_LIMIT_S = 120.0  # from connecting to the answer's last byte
MAX_BODY_BYTES = 64 * 2**20  # of an answer; the longest that anybody here asks for have a few MB
LISTING_LIMIT_S = 20.0  # for what a server knows without its model: one that says nothing is found out soon


class ApiError(MeltcoreError):
    """No usable answer: the connection failed, broke off or timed out, or the body is not what was promised."""


class ApiTimeoutError(ApiError):
    """No whole answer within the limit."""


@dataclass(frozen=True)
class Reply:
    """One whole answer. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body parsed. Raises ApiError where it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ApiError(f"status {self.status} with a body that is not JSON: {self.body[:80]!r}") from error

    def events(self) -> list[str]:
        """The data of each server-sent event, "[DONE]" included. Raises ApiError where the body is no event stream."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            raise ApiError(f"content-type is {self.headers.get('content-type')!r}, not text/event-stream")
        blocks = self.body.decode().replace("\r\n", "\n").split("\n\n")
        lines = [line for block in blocks for line in block.split("\n") if line.startswith("data:")]
        return [line.removeprefix("data:").lstrip() for line in lines]


class Api:
    """A server by its base address, with or without `/v1` at its end. Safe to use from several threads.

    Every answer must be whole within `timeout_s`, however it comes, and have at most MAX_BODY_BYTES: else ApiError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = EXCHANGE_LIMIT_S) -> None:
        """Raises ConfigError for an address, or a key, that cannot be one."""
        hint = "give one such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._host, self._port = parts.hostname or "", parts.port
            self._host.encode("idna")  # as it is when the name is looked up
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address of a server ({error}); {hint}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{url!r} is no address of a server; {hint}")
        if not self._host.isprintable() or not _is_line(parts.path) or " " in self._host + parts.path:
            raise ConfigError(f"{url!r} is no address of a server: it holds a space, or its path no ASCII; {hint}")
        if api_key is not None and not _is_line(api_key):
            raise ConfigError("the API key holds what is no ASCII character, or a line's end")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.address = url
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def chat_url(self) -> str:
        """The whole address of chat completions, for programs that are given one."""
        base = self.address if "://" in self.address else f"http://{self.address}"
        return f"{base.rstrip('/').removesuffix('/v1')}/v1/chat/completions"

    def get(self, path: str, *, limit_s: float = math.inf) -> Reply:
        """limit_s: for the whole answer, where that is less than this client's own limit."""
        return self._send("GET", path, None, min(limit_s, self._timeout_s))

    def post(self, path: str, body: dict[str, Any] | bytes) -> Reply:
        """POST a JSON object, or `bytes` exactly as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._send("POST", path, content, self._timeout_s)

    def served(self, model: str | None = None) -> tuple[str, dict[str, Any]]:
        """The model to ask, the first that /v1/models names where `model` is None; and what the server tells of it.

        Raises ConfigError where the server cannot be reached, or names no model and none is given.
        """
        try:
            reply = self.get("/v1/models", limit_s=LISTING_LIMIT_S)
        except ApiError as error:
            raise ConfigError(f"no answer from {self.address}: {error}") from error
        try:
            listing = reply.json() if reply.status == 200 else None
        except ApiError:
            listing = None
        name = model or _first_name(listing)
        if name is None:
            seen = f"status {reply.status}, {reply.body[:80]!r}"
            raise ConfigError(f"/v1/models of {self.address} names no model ({seen}); name one with --model")
        return name, model_facts(listing, name)

    def is_there(self) -> bool:
        """Whether anything at this address still answers."""
        try:
            self.get("/v1/models", limit_s=LISTING_LIMIT_S)
        except ApiError:
            return False
        return True

    def first_model(self) -> str:
        """The first name that /v1/models gives. Raises ConfigError as `served`."""
        return self.served()[0]

    def _send(self, method: str, path: str, body: bytes | None, limit_s: float) -> Reply:
        until_s = time.monotonic() + limit_s
        connection = self._connect(limit_s)
        connection.response_class = partial(_Response, until_s)  # type: ignore[assignment]  # it is called, no more
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        begun = False
        try:
            connection.connect()
            connection.sock.settimeout(_left_s(until_s))
            connection.request(method, self._prefix + path, body=body, headers=headers)
            with connection.getresponse() as response:
                begun = True
                content = _read(response)
                return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, content)
        except TimeoutError as error:
            what = "the answer was not whole" if begun else "no answer"
            raise ApiTimeoutError(f"{method} {path}: {what} within {limit_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{method} {path}: {_why(error)}") from error
        finally:
            connection.close()

    def _connect(self, limit_s: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=limit_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=limit_s)


class _TooLongError(http.client.HTTPException):
    """The body has more than MAX_BODY_BYTES."""


class _Response(http.client.HTTPResponse):
    """A response that must be whole at a moment, monotonic. Reading it raises TimeoutError later on."""

    def __init__(self, until_s: float, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Timed(until_s, sock, self.fp.detach()))


class _Timed(io.RawIOBase):
    """The bytes of a socket, until a moment: its own limit begins anew with every read."""

    def __init__(self, until_s: float, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._until_s, self._sock, self._raw = until_s, sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._until_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _read(response: http.client.HTTPResponse) -> bytes:
    content = response.read(MAX_BODY_BYTES + 1)
    if len(content) > MAX_BODY_BYTES:
        raise _TooLongError
    if response.length:  # reading so much at most, the library does not say that there was less
        raise http.client.IncompleteRead(content, response.length)
    return content


def _is_line(text: str) -> bool:
    """Whether it can stand in a request's head."""
    return text.isascii() and text.isprintable()


def _why(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    if isinstance(error, _TooLongError):
        return f"the answer is longer than {MAX_BODY_BYTES:,} bytes"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"not HTTP: {error!r}"


def _first_name(listing: Any) -> str | None:
    """The first model of a parsed /v1/models answer; None where it is in another form, or empty."""
    try:
        return str(listing["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return None
