"""Starts a server, waits until it is ready, and ends it with all its processes. All experiments use this module.

A template in a file is the command that starts any server: ours, vLLM's, llama.cpp's.

    # comments and line breaks are allowed
    CUDA_VISIBLE_DEVICES=0 meltcore serve meltcore/sums --port {port} {args}

`{port}` is replaced by a free port, `{args}` by the settings that `meltcore tune` tries; without `{args}` they are
appended. Leading NAME=value assignments are environment variables. No shell reads the line: no globs, pipes, variables.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.process import LoggedProcess, ProcessError, free_port
from meltcore.measure.documents.fingerprint import clean_arguments
from meltcore.measure.experiments.servers.api import Api, ApiError
from meltcore.measure.load.wire.connection import parse_target

PORT, ARGS = "{port}", "{args}"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
COMMAND = SERVER_COMMAND = (sys.executable, "-m", "meltcore.cli.main")
START_LIMIT_S = 900.0  # vLLM took 217 s for Qwen3.5-35B-A3B on eight H200s (2026-11-20), more where it must compile
LISTEN_LIMIT_S = 60.0
READY_LIMIT_S = 360.0  # of our own server, all models of a fleet included
STOP_LIMIT_S = 45.0  # above our own server's drain limit of 30 s
_PROBE_TIMEOUT_S = 5.0
_BANNER = re.compile(r"^meltcore: listening on (http://\S+)", re.MULTILINE)


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
        """The template as results store it: without secrets, folders and values of environment variables."""
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

    `report` receives lines for the user. With a `port` of None, a free port is chosen. ServerProcess explains
    `is_ready`. Raises ProcessError if the server is not ready within `limit_s`.
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
    """Return the version that GET `path` reports under `key`. The defaults are vLLM's.

    Returns None if the server reports no version.
    """
    try:
        reply = Api(url, timeout_s=_PROBE_TIMEOUT_S).get(path)
        facts = reply.json() if reply.status == 200 else None
    except ApiError:
        return None
    return str(facts[key]) if isinstance(facts, dict) and facts.get(key) else None
