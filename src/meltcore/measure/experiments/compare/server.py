"""Start any server from a command template: ours, vLLM's, llama.cpp's.

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.fingerprint import clean_arguments
from meltcore.measure.experiments.evals.api import Api, ApiError
from meltcore.measure.experiments.evals.server_process import ServerProcess

PORT, ARGS = "{port}", "{args}"
START_LIMIT_S = 900.0  # vLLM took 217 s for a 35B model on eight H200s
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ServerCommand:
    """A command template: arguments with placeholders, and variables added to our environment.

    `inherits`: False where `environment` is the whole one, whose names results do not show.
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
    def redacted(self) -> str:
        """The template as results store it, without secrets, folders and values of environment variables."""
        parts = [
            shlex.quote(argument) if PORT not in argument and argument != ARGS else argument
            for argument in clean_arguments(self.template)
        ]
        return " ".join([*(f"{name}=..." for name in self.environment if self.inherits), *parts])


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready. `ready_s`: from the start of its process until /health answered 200."""

    url: str
    ready_s: float
    process: ServerProcess


def parse_command(text: str, source: str = "the command") -> ServerCommand:
    """Parse a template; `source` names it in errors.

    Raises ConfigError for a text that is empty, cannot be split or has no {port}.
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


def free_port() -> int:
    """Return a port without a listener. The kernel assigns others first, so it stays free until the server binds it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def run_server(
    command: ServerCommand,
    log_path: Path,
    *,
    report: Callable[[str], None],
    args: Sequence[str] = (),
    limit_s: float = START_LIMIT_S,
    port: int | None = None,
) -> Iterator[RunningServer]:
    """Start the server, wait until it is ready, and end it with all its processes after the block.

    `report` takes lines for the user. `port`: None for a free one. Raises ProcessError where the server is not ready
    within `limit_s`.
    """
    port = free_port() if port is None else port
    url = f"http://127.0.0.1:{port}"
    environment = {**(os.environ if command.inherits else {}), **command.environment}
    start_s = time.monotonic()
    with ServerProcess(command.argv(port, args), log_path, report=report, environment=environment) as process:
        process.wait_healthy(url, limit_s)
        yield RunningServer(url, time.monotonic() - start_s, process)


def server_version(url: str) -> str | None:
    """Return the version that GET /version reports, as vLLM has it; None for a server without this route."""
    try:
        reply = Api(url, timeout_s=5.0).get("/version")
        version_info = reply.json() if reply.status == 200 else None
    except ApiError:
        return None
    return str(version_info["version"]) if isinstance(version_info, dict) and "version" in version_info else None
