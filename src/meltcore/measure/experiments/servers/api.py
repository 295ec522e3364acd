"""Provides a blocking API client for checks: one connection per request, any bytes as body, no retries.

Checks need the raw response to deliberately invalid requests, and they are few. The client uses the connections of the
load generator.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.measure.documents.schema import Evaluation
from meltcore.measure.load.tasks.generation import CHAT_PATH
from meltcore.measure.load.wire.connection import HttpRequestError, Response, parse_target, request, run_coroutine
from meltcore.measure.load.wire.probe import served_model
from meltcore.measure.load.wire.response import whole_text

REQUEST_TIMEOUT_S = 120.0  # from connecting to the last byte of the response
MODELS_TIMEOUT_S = 20.0  # for what a server knows without its model: one that does not respond is found out soon
_FAILURE_PREFIX = "request failed: "
_MAX_BODY_CHARS = 200  # kept of an unusable body


class ApiError(MeltcoreError):
    """Reports that there is no usable response: the connection failed, or the body is malformed."""


class ApiTimeoutError(ApiError):
    """Reports that there was no complete response within the time limit."""


class ApiResponse(Response):
    """Holds one complete response, with methods that read its body."""

    def json(self) -> Any:
        """Parse the body. Raises ApiError if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"status {self.status} with a body that is not JSON: {self.body[:80]!r}") from error

    def events(self) -> list[str]:
        """Return the data of each server-sent event, "[DONE]" included. Raises ApiError for another content type."""
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            raise ApiError(f"content-type is {self.headers.get('content-type')!r}, not text/event-stream")
        event_texts = self.body.decode(errors="replace").replace("\r\n", "\n").split("\n\n")
        lines = [line for block in event_texts for line in block.split("\n") if line.startswith("data:")]
        return [line.removeprefix("data:").lstrip() for line in lines]


class Api:
    """Sends requests to one server. It is safe to use from several threads.

    `url` is the server's base address, with or without `/v1` at its end. Every response must be complete within
    `timeout_s`, and its body must not exceed connection.MAX_BODY_BYTES.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Parse the address. Raises ConfigError for a malformed address or key."""
        self._target = parse_target(url, api_key)
        self.address = url
        self._timeout_s = timeout_s

    @property
    def chat_url(self) -> str:
        """Return the URL of chat completions, for programs that need it in full."""
        return self._target.url + CHAT_PATH

    def get(self, path: str, *, timeout_s: float = math.inf) -> ApiResponse:
        """Send a GET request for `path`. A `timeout_s` below the client's own replaces it. Raises ApiError."""
        return self._send("GET", path, None, min(timeout_s, self._timeout_s))

    def post(self, path: str, body: dict[str, Any] | bytes) -> ApiResponse:
        """POST `body` to `path`: a JSON object, or bytes exactly as they are. Raises ApiError."""
        return self._send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), self._timeout_s)

    def resolve_model(self, model: str | None = None) -> tuple[str, dict[str, Any]]:
        """Return the name of the model to request, and the facts that the server reports about it.

        The name is `model`, or the first model of /v1/models if `model` is None. Raises ConfigError if the server
        cannot be reached, or if there is no model name.
        """
        try:
            return run_coroutine(served_model(self._target, model, min(MODELS_TIMEOUT_S, self._timeout_s)))
        except HttpRequestError as error:
            raise ConfigError(f"no answer from {self.address}: GET /v1/models: {error.detail}") from error

    def is_reachable(self) -> bool:
        """Return whether the server still responds."""
        try:
            self.get("/v1/models", timeout_s=MODELS_TIMEOUT_S)
        except ApiError:
            return False
        return True

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> ApiResponse:
        try:
            return ApiResponse(*run_coroutine(request(self._target, method, path, body, timeout_s=timeout_s)))
        except HttpRequestError as error:
            error_type = ApiTimeoutError if error.reason in ("timeout", "connect timeout") else ApiError
            raise error_type(f"{method} {path}: {error.detail}") from error


@dataclass(frozen=True)
class Answer:
    """Holds the answer to one chat question. With `failed`, `text` is the reason of the failure."""

    text: str
    failed: bool = False

    @property
    def failure(self) -> str | None:
        """Return the reason of a failed request, or None for an answered one."""
        return self.text.removeprefix(_FAILURE_PREFIX) if self.failed else None


def ask_all(api: Api, bodies: Sequence[dict[str, Any]], concurrency: int) -> Iterator[tuple[int, Answer]]:
    """POST every chat body once, `concurrency` at a time, and yield (index, answer) in the order of completion."""
    pending = deque(range(len(bodies)))
    results: SimpleQueue[tuple[int, Answer] | Exception] = SimpleQueue()

    def ask_pending() -> None:
        while True:
            try:
                index = pending.popleft()
            except IndexError:
                return
            try:
                results.put((index, _ask(api, bodies[index])))
            except Exception as error:  # raised again on the caller's thread
                results.put(error)

    # Daemon threads: an interrupted program does not wait for pending answers, as a thread pool would.
    for _ in range(min(concurrency, len(bodies))):
        threading.Thread(target=ask_pending, name="eval", daemon=True).start()
    try:
        for _ in bodies:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        pending.clear()


def _ask(api: Api, body: dict[str, Any]) -> Answer:
    try:
        response = api.post(CHAT_PATH, body)
        if response.status != 200:
            return _failed_answer(
                f"status {response.status}: {response.body[:_MAX_BODY_CHARS].decode(errors='replace')}"
            )
        content = response.json()["choices"][0]["message"]["content"]
    except ApiError as error:
        return _failed_answer(str(error))
    except (KeyError, IndexError, TypeError):
        return _failed_answer(f"not in OpenAI's form: {response.body[:_MAX_BODY_CHARS].decode(errors='replace')}")
    return Answer(whole_text(content)) if isinstance(content, str) else _failed_answer("content is not text")


def _failed_answer(reason: str) -> Answer:
    return Answer(f"{_FAILURE_PREFIX}{reason}", failed=True)


def failure_reasons(evaluation: Evaluation) -> list[str]:
    """Return a list with one sentence about the failed requests, or an empty list if no request failed."""
    if not evaluation.failed:
        return []
    failed_of_total = f"{evaluation.failed} of {evaluation.total}"
    return [f"{failed_of_total} requests failed, the first one: {evaluation.first_failure}"]


def death_reason(api: Api, evaluation: Evaluation) -> str | None:
    """Return a sentence if requests failed and the server no longer responds. Returns None otherwise.

    The accuracy of such an evaluation is meaningless.
    """
    if not evaluation.failed or api.is_reachable():
        return None
    return f"the server ended after {evaluation.total - evaluation.failed} of {evaluation.total} answers"
