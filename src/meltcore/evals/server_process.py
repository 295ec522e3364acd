"""Runs a server that Meltcore starts itself: a child process that is ready once /health answers 200."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.evals.api import Api, ApiError
from meltcore.load.connection import parse_target
from meltcore.process import LoggedProcess, ProcessError
from meltcore.results.fingerprint import clean_arguments

STOP_LIMIT_S = 45.0  # above our own server's drain limit of 30 s
_PROBE_TIMEOUT_S = 5.0


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
