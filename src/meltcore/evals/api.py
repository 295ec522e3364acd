"""A plain, blocking client for checks: one connection a request, any bytes as body, nothing hidden or retried.

Checks need the raw answer to deliberately bad requests, and are few. Measuring goes through the load generator.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.results.served import model_facts

LISTING_LIMIT_S = 20.0  # for what a server knows without its model: one that says nothing is found out soon


class ApiError(MeltcoreError):
    """No usable answer: the connection failed, broke off or timed out, or the body is not what was promised."""


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
    """A server by its base address, with or without `/v1` at its end. Safe to use from several threads."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
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
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
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
        """limit_s: to wait for bytes, where that is less than this client's own limit."""
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

    def first_model(self) -> str:
        """The first name that /v1/models gives. Raises ConfigError as `served`."""
        return self.served()[0]

    def _send(self, method: str, path: str, body: bytes | None, limit_s: float) -> Reply:
        connection = self._connect(limit_s)
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._prefix + path, body=body, headers=headers)
            response = connection.getresponse()
            content = response.read()
            return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, content)
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{method} {path}: {_why(error, limit_s)}") from error
        finally:
            connection.close()

    def _connect(self, limit_s: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=limit_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=limit_s)


def _why(error: OSError | http.client.HTTPException, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {limit_s:g} s"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"not HTTP: {error!r}"


def _first_name(listing: Any) -> str | None:
    """The first model of a parsed /v1/models answer; None where it is in another form, or empty."""
    try:
        return str(listing["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return None
