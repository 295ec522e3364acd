"""One start of a server from its command: on a free port, waited for, ended with all its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meltcore.evals.api import Api, ApiError
from meltcore.evals.server_process import ServerProcess
from meltcore.trials.command import ServerCommand, free_port

START_LIMIT_S = 900.0  # as for a baseline: vLLM took 217 s for a 35B model on eight H200s


@dataclass(frozen=True)
class RunningServer:
    """`ready_s`: from the start of the process until /health answered 200."""

    url: str
    ready_s: float
    process: ServerProcess


@contextmanager
def started(
    command: ServerCommand,
    log_path: Path,
    *,
    say: Callable[[str], None],
    args: Sequence[str] = (),
    limit_s: float = START_LIMIT_S,
) -> Iterator[RunningServer]:
    """The server runs within the `with`. Raises ServerError where it does not become ready within `limit_s`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **command.environment}
    begun_s = time.monotonic()
    with ServerProcess(command.filled(port, args), log_path, say=say, environment=environment) as process:
        process.wait_healthy(url, limit_s)
        yield RunningServer(url, time.monotonic() - begun_s, process)


def served_version(url: str) -> str | None:
    """What /version says, as vLLM and others answer it; None where the server has no such page."""
    try:
        reply = Api(url, timeout_s=5.0).get("/version")
        found = reply.json() if reply.status == 200 else None
    except ApiError:
        return None
    return str(found["version"]) if isinstance(found, dict) and "version" in found else None
