"""A server that we start ourselves: waited for, always ended, with every process of its group. Its output is a log."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.evals.api import Api, ApiError
from meltcore.results.fingerprint import clean_arguments
from meltcore.results.patience import undisturbed

STOP_LIMIT_S = 45.0  # above our own server's drain limit of 30 s
_KILL_LIMIT_S = 10.0  # for the kernel to take memory back from a killed process
_LOOK_S = 5.0  # for an answer to a look at the server
_POLL_S = 0.1
_LOG_LINES = 8
_Found = TypeVar("_Found")


class ServerError(MeltcoreError):
    """The server did not start, or ended when it should not have. Holds the last lines of its log."""


class ServerProcess:
    """A context manager: the server runs inside the `with`, and is gone after it whatever happened.

    `say` is told what a user should know while stopping.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: the server's whole one; None: ours."""
        self._command = list(command)
        self._log_path = log_path
        self._say = say
        self._environment = os.environ if environment is None else environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Its own session: Ctrl-C reaches only us, and we stop it in order. Unbuffered: its words must reach the file.
        try:
            with self._log_path.open("wb") as log, undisturbed():
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**self._environment, "PYTHONUNBUFFERED": "1"},
                )
        except OSError as error:
            raise ServerError(f"{self._command[0]} cannot be started: {error.strerror}") from error
        except BaseException:  # Ctrl-C as it started: nobody else knows of it yet
            self.stop()
            raise
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
        """Of the server's own process, and of its group."""
        if self._process is None:
            raise ServerError("the server has not been started")
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How the server's own process ended; None: it runs, or was never started."""
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def wait_for(self, look: Callable[[], _Found | None], limit_s: float, what: str) -> _Found:
        """What `look` finds. Raises ServerError past the limit, or where the server ends first."""
        deadline_s = time.monotonic() + limit_s
        while True:
            found = look()
            if found is not None:
                return found
            if not self.running:
                hint = " (what it may have left in the background is not ended with it)" if self.code == 0 else ""
                raise ServerError(
                    f"the server ended with code {self.code} before it could {what}{hint}:\n{self.last_lines()}"
                )
            if time.monotonic() > deadline_s:
                raise ServerError(f"the server did not {what} within {limit_s:g} s:\n{self.last_lines()}")
            time.sleep(_POLL_S)

    def wait_healthy(self, address: str, limit_s: float, *, api_key: str | None = None, settle_s: float = 0.0) -> None:
        """Until /health answers 200 and the process that we started has stayed for `settle_s` more.

        Raises ServerError as `wait_for`, ConfigError where a server answers that is not the process that we started.
        """
        self.wait_for(lambda: healthy(address, api_key) or None, limit_s, "become ready")
        if not self.ended_within(settle_s):
            return
        if not accepts(address):
            raise ServerError(f"the server ended with code {self.code} once it was ready:\n{self.last_lines()}")
        raise ConfigError(
            f"{shlex.join(clean_arguments(self._command))} ended with code {self.code}, and a server answers at "
            f"{address}: one in the background, which we could not end, or another's; give a command that stays as "
            "long as its server does"
        )

    def stop(self, limit_s: float = STOP_LIMIT_S) -> int | None:
        """SIGTERM to the group, a bounded wait, then SIGKILL, which is said aloud. The exit code; None: never started.

        The whole group, because a server's worker that outlives it would keep its GPU's memory. Undisturbed.
        """
        if self._process is None:
            return None
        end_group(
            self._process,
            limit_s,
            late=lambda: self._say(f"the server did not end within {limit_s:g} s of SIGTERM; killing it"),
        )
        return self.code

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
        return "\n".join(line.rstrip() for line in self.log.splitlines()[-_LOG_LINES:]) or "(it printed nothing)"


def end_group(process: subprocess.Popen[Any], limit_s: float, *, late: Callable[[], None] = lambda: None) -> None:
    """SIGTERM to the group that `process` leads; SIGKILL, which `late` tells, where any of it is left after `limit_s`.

    Undisturbed: what a second Ctrl-C cuts short would leave processes that nobody knows of, and this ends by itself.
    """
    with undisturbed():
        if _gone_after(process, signal.SIGTERM, limit_s):
            return
        try:
            late()
        finally:
            _gone_after(process, signal.SIGKILL, _KILL_LIMIT_S)


def _gone_after(process: subprocess.Popen[Any], number: signal.Signals, limit_s: float) -> bool:
    """Signal every process of the group; whether all are gone within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    signalled = False
    while process.poll() is None or group_members(process.pid):
        if not signalled:
            with suppress(ProcessLookupError):  # the last one has just gone
                os.killpg(process.pid, number)
            signalled = True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def healthy(address: str, api_key: str | None = None) -> bool:
    """Whether /health of `address` answers 200 now."""
    try:
        return Api(address, api_key=api_key, timeout_s=_LOOK_S).get("/health").status == 200
    except ApiError:
        return False


def accepts(address: str) -> bool:
    """Whether anything takes a connection at `address`, ready or not. Raises ConfigError for no address."""
    Api(address)
    parts = urlsplit(address if "://" in address else f"http://{address}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), _LOOK_S):
            return True
    except OSError:
        return False


def group_members(group: int) -> list[int]:
    """Process ids of a process group, those that have ended and wait for their parent left out."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, second, is in parentheses and may hold anything; state, parent and group come after it.
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it has gone since it was listed
        if int(of_group) == group and state not in "ZX":
            members.append(int(path.parent.name))
    return members
