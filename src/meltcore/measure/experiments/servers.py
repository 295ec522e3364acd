"""Starts servers, waits until a server is ready, sends requests, and ends all processes of a server.

All experiments use this module. The API client is blocking: it opens one connection per request, sends any bytes as
body, and never retries. So checks can send invalid requests and see the raw response. It uses the connections of the
load generator.

A template in a file is the command that starts any server: ours, vLLM's, llama.cpp's.

    # comments and line breaks are allowed
    CUDA_VISIBLE_DEVICES=0 meltcore serve meltcore/sums --port {port} {args}

`{port}` is replaced by a free port, and `{args}` by the settings that `meltcore tune` tries. Without `{args}` the
settings are appended. Leading NAME=value assignments are environment variables. No shell reads the line: no globs,
pipes, variables.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.process import LoggedProcess, ProcessError, free_port
from meltcore.measure.documents.fingerprint import clean_arguments
from meltcore.measure.documents.schema import Evaluation
from meltcore.measure.load.tasks.generation import CHAT_PATH
from meltcore.measure.load.wire.connection import HttpRequestError, Response, parse_target, request, run_coroutine
from meltcore.measure.load.wire.probe import served_model
from meltcore.measure.load.wire.response import whole_text

REQUEST_TIMEOUT_S = 120.0  # from connecting to the last byte of the response
MODELS_TIMEOUT_S = 20.0  # for what a server knows without its model: one that does not respond is found out soon
_FAILURE_PREFIX = "request failed: "
_MAX_BODY_CHARS = 200  # kept of an unusable body
PORT, ARGS = "{port}", "{args}"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
COMMAND = SERVER_COMMAND = (sys.executable, "-m", "meltcore.cli.main")
START_LIMIT_S = 900.0  # vLLM took 217 s for Qwen3.5-35B-A3B on eight H200s (2026-11-20), more where it must compile
LISTEN_LIMIT_S = 60.0
READY_LIMIT_S = 360.0  # of our own server, all models of a fleet included
STOP_LIMIT_S = 45.0  # above our own server's drain limit of 30 s
_PROBE_TIMEOUT_S = 5.0
_BANNER = re.compile(r"^meltcore: listening on (http://\S+)", re.MULTILINE)


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
        """Return the response to GET `path`. The shorter of `timeout_s` and the client's timeout counts.

        Raises ApiError without a response.
        """
        return self._send("GET", path, None, min(timeout_s, self._timeout_s))

    def post(self, path: str, body: dict[str, Any] | bytes) -> ApiResponse:
        """Return the response to POST `path`. `body` is a JSON object, or bytes that are sent unchanged.

        Raises ApiError without a response.
        """
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
    """Holds the answer to one chat question. With `failed`, `text` is the reason of the failure.

    `tokens` holds (token, log probability) pairs, if they were requested and returned.
    """

    text: str
    failed: bool = False
    tokens: Sequence[tuple[str, float]] = ()

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


@dataclass(frozen=True)
class ServerCommand:
    """A command template: arguments with placeholders, and environment variables that are added to ours.

    Without `inherits`, `environment` is the whole environment, and results do not show its names.
    """

    template: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    inherits: bool = True

    def argv(self, port: int, args: Sequence[str] = ()) -> list[str]:
        """Return the arguments to start, with `port` and `args` in place of the placeholders."""
        argv: list[str] = []
        for argument in self.template:
            argv += args if argument == ARGS else [argument.replace(PORT, str(port))]
        return argv if ARGS in self.template else [*argv, *args]

    @property
    def variables(self) -> dict[str, str]:
        """The whole environment of the server."""
        return {**(os.environ if self.inherits else {}), **self.environment}

    @property
    def redacted(self) -> str:
        """The template as text for results, without secrets, folders and values of environment variables."""
        parts = [
            shlex.quote(argument) if PORT not in argument and argument != ARGS else argument
            for argument in clean_arguments(self.template)
        ]
        return " ".join([*(f"{name}=..." for name in self.environment if self.inherits), *parts])


def parse_command(text: str, source: str = "the command") -> ServerCommand:
    """Parse a template. Error messages name its `source`.

    Raises ConfigError if the text is empty, cannot be split or has no {port}.
    """
    try:
        parts = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{source} cannot be parsed: {error}") from error
    environment: dict[str, str] = {}
    while parts and (assignment := _ASSIGNMENT.fullmatch(parts[0])):
        environment[assignment[1]] = assignment[2]
        parts = parts[1:]
    if not parts:
        raise ConfigError(f"{source} is empty: it names no program to start")
    if not any(PORT in part for part in parts):
        raise ConfigError(f"{source} has no {PORT}: write it where the port goes, as in `--port {PORT}`")
    return ServerCommand(tuple(parts), environment)


def read_command(path: Path | str) -> ServerCommand:
    """Parse the template in a file. Raises ConfigError as `parse_command`, and for a file that cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the command file {path}: {error}") from error
    return parse_command(text.replace("\\\n", " "), str(path))


class ServerProcess(LoggedProcess):
    """Runs a server inside a `with` block, and ends its process group afterwards.

    Once the server is ready, `url` is its address, and `ready_s` the time that it took.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        report: Callable[[str], None],
        url: str | None = None,
        api_key: str | None = None,
        environment: Mapping[str, str] | None = None,
        is_ready: Callable[[str], bool] = lambda _url: True,
    ) -> None:
        """Store the command. The process starts when the `with` block is entered.

        The server's address is `url`. With None, the address is read from the line that `meltcore serve` prints.
        `environment` is the whole environment; None inherits ours. The server is ready once /health answers 200 and
        `is_ready` returns True for the address.
        """
        super().__init__(
            command,
            log_path,
            name="the server",
            report=report,
            environment=environment,
            stop_limit_s=STOP_LIMIT_S,
        )
        self.url = url or ""
        self.ready_s = 0.0
        self._start_s = time.monotonic()
        self._api_key = api_key
        self._is_ready = is_ready

    def wait_ready(
        self, *, ready_limit_s: float = READY_LIMIT_S, listen_limit_s: float = LISTEN_LIMIT_S, settle_s: float = 0.0
    ) -> str:
        """Return the address once the server is ready and its process has stayed alive for another `settle_s`.

        Raises ProcessError if the process ends or is not ready within the limits. Raises ConfigError if the server that
        answers is not the process started here. Errors of `is_ready` pass through.
        """
        self.url = url = self.url or self.wait_for(self._printed_url, listen_limit_s, "print its address")
        self.wait_for(
            lambda: (is_healthy(url, self._api_key) and self._is_ready(url)) or None, ready_limit_s, "become ready"
        )
        self.ready_s = time.monotonic() - self._start_s
        if not self.ended_within(settle_s):
            return url
        if not accepts_connections(url):
            raise ProcessError(f"the server ended with code {self.returncode} once it was ready:\n{self.log_tail()}")
        raise ConfigError(
            f"{shlex.join(clean_arguments(self.command))} ended with code {self.returncode}, and a server answers at "
            f"{url}: one in the background, which cannot be ended from here, or another's; give a command that "
            "runs as long as its server does"
        )

    def _printed_url(self) -> str | None:
        match = _BANNER.search(self.log)
        return match[1] if match else None


class MeltcoreServer(ServerProcess):
    """Runs `meltcore serve` or `meltcore up`. With `--port 0` the system chooses the port."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        *,
        report: Callable[[str], None],
        is_ready: Callable[[str], bool] = lambda _url: True,
    ) -> None:
        super().__init__([*SERVER_COMMAND, *arguments], log_path, report=report, is_ready=is_ready)


@contextmanager
def run_server(
    command: ServerCommand,
    log_path: Path,
    *,
    report: Callable[[str], None],
    args: Sequence[str] = (),
    limit_s: float = START_LIMIT_S,
    port: int | None = None,
    is_ready: Callable[[str], bool] = lambda _url: True,
) -> Iterator[ServerProcess]:
    """Start the server, wait until it is ready, and end it with all its processes after the block.

    `report` receives lines for the user. With a `port` of None, a free port is chosen. The server is ready once /health
    answers 200 and `is_ready` returns True for its address. Raises ProcessError if the server is not ready within
    `limit_s`.
    """
    port = free_port() if port is None else port
    with ServerProcess(
        command.argv(port, args),
        log_path,
        report=report,
        url=f"http://127.0.0.1:{port}",
        environment=command.variables,
        is_ready=is_ready,
    ) as process:
        process.wait_ready(ready_limit_s=limit_s)
        yield process


def is_healthy(address: str, api_key: str | None = None) -> bool:
    """Return whether /health of `address` answers 200 now."""
    try:
        return Api(address, api_key=api_key, timeout_s=_PROBE_TIMEOUT_S).get("/health").status == 200
    except ApiError:
        return False


def accepts_connections(address: str) -> bool:
    """Return whether anything accepts a connection at `address`. Raises ConfigError for a malformed address."""
    target = parse_target(address)
    try:
        with socket.create_connection((target.host, target.port), _PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def server_version(url: str, path: str = "/version", key: str = "version") -> str | None:
    """Return the version that GET `path` reports under `key`. The default path and key are vLLM's.

    Returns None if the server reports no version.
    """
    try:
        reply = Api(url, timeout_s=_PROBE_TIMEOUT_S).get(path)
        facts = reply.json() if reply.status == 200 else None
    except ApiError:
        return None
    return str(facts[key]) if isinstance(facts, dict) and facts.get(key) else None
