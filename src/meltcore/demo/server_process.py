"""A `meltcore serve` of our own: started, waited for, always stopped. Its output goes to a log in the run folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from meltcore.errors import MeltcoreError
from meltcore.evals.api import Api, ApiError

OWN_PROGRAM = (sys.executable, "-m", "meltcore.cli.main")
_BANNER = re.compile(r"^meltcore: listening on (http://\S+)", re.MULTILINE)
LISTEN_LIMIT_S = 60.0
READY_LIMIT_S = 180.0
STOP_LIMIT_S = 45.0  # above the server's own drain limit of 30 s
_POLL_S = 0.1
_LOG_LINES = 8


class ServerError(MeltcoreError):
    """The server did not start, or ended when it should not have. Holds the last lines of its log."""


class ServerProcess:
    """A context manager: the server runs inside the `with`, and is gone after it whatever happened.

    `say` is told what a user should know while waiting and stopping.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log_path: Path,
        *,
        say: Callable[[str], None],
        program: Sequence[str] = OWN_PROGRAM,
    ) -> None:
        self._command = [*program, "serve", *arguments, "--port", "0"]
        self._log_path = log_path
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        # Its own session: Ctrl-C reaches only us, and we stop it in order. Unbuffered: the banner must reach the file.
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server's own process; its other processes are children of it."""
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process.pid

    def wait_ready(self, *, listen_limit_s: float = LISTEN_LIMIT_S, ready_limit_s: float = READY_LIMIT_S) -> str:
        """The server's address, once /health answers 200. Raises ServerError past the limits or where it ends first."""
        address = self._wait(self._banner, listen_limit_s, "print its address")
        self._wait(lambda: address if _healthy(address) else None, ready_limit_s, "become ready")
        return address

    def stop(self, limit_s: float = STOP_LIMIT_S) -> int | None:
        """SIGTERM, a bounded wait, then SIGKILL, which is said aloud. The exit code; None where it never started."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self._say(f"the server did not end within {limit_s:g} s of SIGTERM; killing it")
                process.kill()
                process.wait()
        return process.returncode

    def ended_within(self, limit_s: float) -> bool:
        """Whether the server has ended, or does so within `limit_s`: its connections go before its exit is known."""
        if self._process is None:
            return True
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self) -> str:
        """The end of the server's log."""
        lines = self._log_path.read_text(errors="replace").splitlines() if self._log_path.exists() else []
        return "\n".join(line.rstrip() for line in lines[-_LOG_LINES:])

    def _banner(self) -> str | None:
        match = _BANNER.search(self._log_path.read_text(errors="replace"))
        return match[1] if match else None

    def _wait(self, look: Callable[[], str | None], limit_s: float, what: str) -> str:
        deadline = time.monotonic() + limit_s
        while True:
            found = look()
            if found is not None:
                return found
            if not self.running:
                code = self._process.returncode if self._process else None
                raise ServerError(f"the server ended with code {code} before it could {what}:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server did not {what} within {limit_s:g} s:\n{self.last_lines()}")
            time.sleep(_POLL_S)


def _healthy(address: str) -> bool:
    try:
        return Api(address, timeout_s=5.0).get("/health").status == 200
    except ApiError:
        return False
