"""Runs a server that Meltcore starts itself: a child process that is ready once /health answers 200."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.process import LoggedProcess, ProcessError
from meltcore.measure.documents.fingerprint import clean_arguments
from meltcore.measure.experiments.evals.api import Api, ApiError
from meltcore.measure.load.wire.connection import parse_target

COMMAND = SERVER_COMMAND = (sys.executable, "-m", "meltcore.cli.main")
LISTEN_LIMIT_S = 60.0
READY_LIMIT_S = 180.0
STOP_LIMIT_S = 45.0  # above our own server's drain limit of 30 s
_PROBE_TIMEOUT_S = 5.0
_BANNER = re.compile(r"^meltcore: listening on (http://\S+)", re.MULTILINE)


class ServerProcess(LoggedProcess):
    """Runs a server inside a `with` block, and ends its process group afterwards."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        report: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            command,
            log_path,
            name="the server",
            report=report,
            environment=environment,
            stop_limit_s=STOP_LIMIT_S,
        )

    def wait_healthy(self, address: str, limit_s: float, *, api_key: str | None = None, settle_s: float = 0.0) -> None:
        """Wait until /health answers 200 and the process has stayed alive for `settle_s` more.

        Raises ProcessError where the process ends or is not ready within `limit_s`. Raises ConfigError where a server
        answers that is not the process started here.
        """
        self.wait_for(lambda: is_healthy(address, api_key) or None, limit_s, "become ready")
        if not self.ended_within(settle_s):
            return
        if not accepts_connections(address):
            raise ProcessError(f"the server ended with code {self.returncode} once it was ready:\n{self.log_tail()}")
        raise ConfigError(
            f"{shlex.join(clean_arguments(self.command))} ended with code {self.returncode}, and a server answers at "
            f"{address}: one in the background, which cannot be ended from here, or another's; give a command that "
            "runs as long as its server does"
        )


class MeltcoreServer(ServerProcess):
    """A `meltcore serve` or `meltcore up`, whose port the system may choose (`--port 0`)."""

    def __init__(self, arguments: Sequence[str], log_path: Path, *, report: Callable[[str], None]) -> None:
        super().__init__([*SERVER_COMMAND, *arguments], log_path, report=report)

    def wait_ready(self, *, listen_limit_s: float = LISTEN_LIMIT_S, ready_limit_s: float = READY_LIMIT_S) -> str:
        """Return the address once /health answers 200. Raises ProcessError past the limits or where it ends first."""
        address = self.wait_for(self._address, listen_limit_s, "print its address")
        self.wait_healthy(address, ready_limit_s)
        return address

    def _address(self) -> str | None:
        match = _BANNER.search(self.log)
        return match[1] if match else None


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
