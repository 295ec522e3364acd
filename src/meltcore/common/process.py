"""Starts child processes, watches them and ends them, with their process groups, output and time limits.

Every command of Meltcore is started here. Only workers that compile kernels are forked elsewhere. By default a child
leads its own session and process group. Ctrl-C in the terminal thus reaches the parent alone, which ends its children
one by one. The module imports neither torch nor third-party packages.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, TypedDict, TypeVar, Unpack

from meltcore.common.errors import MeltcoreError
from meltcore.common.process_output import log_tail

KILL_LIMIT_S = 10.0  # for the kernel to take memory back from a killed process
STDERR = 2  # as `stdout`: the child's output joins our standard error, so that ours holds our own lines alone
_POLL_S = 0.1
_Result = TypeVar("_Result")
# Makes the error of a process that did not start: None where it ended, the limit in seconds that it exceeded otherwise.
StartFailure = Callable[[float | None], MeltcoreError]


class ProcessError(MeltcoreError):
    """Reports that a process could not be started, did not become ready, or ended unexpectedly."""


# --- starting ------------------------------------------------------------------------------------------------------


class ProcessOptions(TypedDict, total=False):
    """Options of a program that is started. Without `stdin` the program reads from /dev/null.

    `environment` is the child's whole environment. Without it, the child inherits the environment of this process.
    Unless `new_session` is False, the child leads a session and a process group.
    """

    stdin: int | IO[Any] | None
    stdout: int | IO[Any] | None
    stderr: int | IO[Any] | None
    environment: Mapping[str, str] | None
    new_session: bool


def start(command: Sequence[str], **options: Unpack[ProcessOptions]) -> subprocess.Popen[bytes]:
    """Start a program. Its pipes are unbuffered. Raises ProcessError if the program cannot be started.

    Signals are blocked during the start: an interrupt must not arrive before the parent knows the process.
    """
    with _start_errors(command), block_signals():
        return subprocess.Popen(list(command), bufsize=0, **_popen_options(options))


async def start_async(
    command: Sequence[str], *, pass_fds: Collection[int] = (), **options: Unpack[ProcessOptions]
) -> asyncio.subprocess.Process:
    """Start a program whose pipes and exit are awaited on the event loop.

    The child inherits the file descriptors `pass_fds`. Raises ProcessError if the program cannot be started.
    """
    with _start_errors(command):
        return await asyncio.create_subprocess_exec(*command, pass_fds=pass_fds, **_popen_options(options))


def _popen_options(options: ProcessOptions) -> dict[str, Any]:
    """Return the options with the names and defaults that `subprocess.Popen` takes."""
    names = {"environment": "env", "new_session": "start_new_session"}
    given = {names.get(name, name): value for name, value in options.items()}
    return {"stdin": subprocess.DEVNULL, "start_new_session": True, **given}


@contextmanager
def _start_errors(command: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProcessError(f"{command[0]} cannot be started: {error.strerror}") from error


class CompletedRun(NamedTuple):
    """Describes how a program ended.

    `returncode` is None if the program exceeded its time limit. If `is_alive`, even SIGKILL could not end it.
    """

    returncode: int | None
    stdout: bytes
    stderr: bytes
    is_alive: bool = False


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    terminate_limit_s: float = KILL_LIMIT_S,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _process: None,
) -> CompletedRun:
    """Run a program to its end. After `limit_s` or on an exception, end the program and its process group.

    Output goes through files, so that the output of a killed program is complete, and no pipe can fill up. SIGKILL
    follows SIGTERM after `terminate_limit_s`. `on_start` is called with the process once it runs. Raises ProcessError
    if the program cannot be started.
    """
    with TemporaryFile() as stdin_file, TemporaryFile() as stdout_file, TemporaryFile() as stderr_file:
        stdin_file.write(stdin)
        stdin_file.seek(0)
        process: subprocess.Popen[bytes] | None = None
        has_ended_in_time, has_group_ended = False, True
        try:
            with block_signals():  # until it is known here, an interrupt would leave it running
                process = start(
                    command, stdin=stdin_file, stdout=stdout_file, stderr=stderr_file, environment=environment
                )
                on_start(process)
            has_ended_in_time = ended_within(process, limit_s)
        finally:  # also what a program that ended by itself left in its group
            if process is not None:
                has_group_ended = end_group(process, terminate_limit_s if not has_ended_in_time else 0.0)
        stdout_file.seek(0)
        stderr_file.seek(0)
        return CompletedRun(
            process.returncode if has_ended_in_time else None,
            stdout_file.read(),
            stderr_file.read(),
            is_alive=not has_group_ended,
        )


# --- watching ------------------------------------------------------------------------------------------------------


def describe_exit(returncode: int) -> str:
    """Return how a process ended, as text: its exit status, or the signal that killed it."""
    return f"exit status {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"


def ended_within(process: subprocess.Popen[Any], limit_s: float) -> bool:
    """Wait up to `limit_s` seconds. Return whether `process` has ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    return process.returncode is not None


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on (proc(5)). The first of them is the state.

    Returns None if the process is gone.
    """
    try:
        # The second field, the name, is in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or SIGTSTP. A process in a debugger does not count."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] == "T"


def start_ticks(pid: int) -> int | None:
    """Return the time at which a process started, in clock ticks since boot. Returns None if it has ended.

    The start time distinguishes two processes that had the same id.
    """
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def group_members(group_id: int) -> list[int]:
    """Return the ids of the processes in a process group, without zombies."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = stat_fields(int(path.parent.name))
        if fields is not None and int(fields[2]) == group_id and fields[0] not in "ZX":
            members.append(int(path.parent.name))
    return members


class LoggedProcess:
    """Runs a process inside a `with` block, with its output in a log file, and ends its group afterwards."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        name: str,
        report: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        stop_limit_s: float = KILL_LIMIT_S,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Store the command. The process starts when the `with` block is entered.

        `name` is the name of the process in messages, such as "the server". `report` receives lines for the user while
        the process is being stopped. `environment` is the whole environment; None inherits the environment of this
        process. SIGKILL follows SIGTERM after `stop_limit_s`. `stdin` is the file descriptor of the standard input.
        """
        self.command = list(command)
        self._log_path = log_path
        self._name = name
        self._report = report
        self._environment = os.environ if environment is None else environment
        self._stop_limit_s = stop_limit_s
        self._stdin = stdin
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the process. Raises ProcessError if it cannot start, and OSError if its log cannot be written."""
        try:
            self._log_path.write_bytes(b"")
            # To append: a log that grows too large is emptied while the process writes to it.
            with self._log_path.open("ab") as log, block_signals():  # until it is known here
                self._process = start(
                    self.command,
                    stdin=self._stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Unbuffered: what a Python program prints must reach the file before the program is killed.
                    environment={"PYTHONUNBUFFERED": "1", **self._environment},
                )
        except BaseException:
            self.stop()
            raise
        return self

    def send(self, data: bytes) -> IO[bytes]:
        """Write to the standard input of a process whose `stdin` is a pipe, and return the pipe."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        return self._process.stdin

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the process, which is also the id of its group. Raises ProcessError before the start."""
        if self._process is None:
            raise ProcessError(f"{self._name} has not been started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the process. It is None while the process runs and before the start."""
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> str:
        """All output so far."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def log_tail(self) -> str:
        """Return the last lines of the output."""
        return log_tail(self._log_path) or "(it printed nothing)"

    def wait_for(self, poll: Callable[[], _Result | None], limit_s: float, failure: str | StartFailure) -> _Result:
        """Call `poll` until it returns a value other than None, and return this value.

        `failure` is a text that completes "it did not ...", or a function that makes another error. The error is raised
        after `limit_s`, or if the process ends first. A text becomes a ProcessError with the last lines of the output.
        """
        deadline_s = time.monotonic() + limit_s
        while (result := poll()) is None:
            if not self.running or time.monotonic() > deadline_s:
                raise self._start_error(limit_s, failure)
            time.sleep(_POLL_S)
        return result

    async def wait_for_async(
        self, poll: Callable[[], Awaitable[_Result | None]], limit_s: float, failure: str | StartFailure
    ) -> _Result:
        """Await `poll` until it returns a value other than None, and return it. Raises the errors of `wait_for`."""
        deadline_s = time.monotonic() + limit_s
        while (result := await poll()) is None:
            if not self.running or time.monotonic() > deadline_s:
                raise self._start_error(limit_s, failure)
            await asyncio.sleep(_POLL_S)
        return result

    def _start_error(self, limit_s: float, failure: str | StartFailure) -> MeltcoreError:
        has_ended = not self.running
        if not isinstance(failure, str):
            return failure(None if has_ended else limit_s)
        if not has_ended:
            return ProcessError(f"{self._name} did not {failure} within {limit_s:g} s:\n{self.log_tail()}")
        hint = "" if self.returncode else " (a process that it left in the background is not ended with it)"
        return ProcessError(
            f"{self._name} ended with code {self.returncode} before it could {failure}{hint}:\n{self.log_tail()}"
        )

    def ended_within(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds. Return whether the process has ended.

        A process closes its connections before its exit is known, so callers have to wait.
        """
        return self._process is None or ended_within(self._process, limit_s)

    def stop(self, limit_s: float | None = None) -> int | None:
        """End the process group and return the exit code of the process.

        The group gets SIGTERM, and SIGKILL after `limit_s`, which is reported. None uses `stop_limit_s`. The whole
        group is ended, because a worker that outlives its server would keep its GPU's memory.
        """
        if self._process is None:
            return None
        limit_s = self._stop_limit_s if limit_s is None else limit_s
        end_group(
            self._process,
            limit_s,
            on_timeout=lambda: self._report(f"{self._name} did not end within {limit_s:g} s of SIGTERM; killing it"),
        )
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self.returncode


# --- ending --------------------------------------------------------------------------------------------------------


def end_group(
    process: subprocess.Popen[Any],
    limit_s: float,
    *,
    on_timeout: Callable[[], None] = lambda: None,
    kill_limit_s: float = KILL_LIMIT_S,
) -> bool:
    """End the group that `process` leads: SIGTERM, then SIGKILL after `limit_s`. Return whether all processes ended.

    `on_timeout` is called before SIGKILL. The result is False only if a process cannot be killed within `kill_limit_s`,
    for example in a driver call. SIGINT and SIGTERM to this process wait meanwhile, because a second Ctrl-C would leave
    processes without a parent.
    """
    with block_signals():
        if _wait_group_ended(process, signal.SIGTERM, limit_s):
            return True
        try:
            on_timeout()
        finally:
            has_group_ended = _wait_group_ended(process, signal.SIGKILL, kill_limit_s)
        return has_group_ended


def signal_group(group_id: int, signum: signal.Signals) -> None:
    """Send a signal to every process of a group. Does nothing if the group is gone."""
    with suppress(ProcessLookupError):
        os.killpg(group_id, signum)


async def end_async(process: asyncio.subprocess.Process, limit_s: float) -> None:
    """Wait until `process`, which was told to exit, has ended. If it still runs after `limit_s`, kill it."""
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        await kill_async(process)


async def kill_async(process: asyncio.subprocess.Process) -> None:
    """Kill `process`, discard its unread output, and wait up to KILL_LIMIT_S until it has ended.

    asyncio returns from `process.wait()` only once stdout is at its end. It stops reading a pipe whose reader falls
    behind, so without the discarding it would wait forever for a process whose output no task reads any more.
    """
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_LIMIT_S):
            if process.stdout is not None:
                with suppress(RuntimeError):  # another task reads it
                    await process.stdout.read()
            await process.wait()


def _wait_group_ended(process: subprocess.Popen[Any], signum: signal.Signals, limit_s: float) -> bool:
    """Signal every process of the group, and return whether all have ended within `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    is_signalled = False
    while process.poll() is None or group_members(process.pid):
        if not is_signalled:
            signal_group(process.pid, signum)
            is_signalled = True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which no process listens.

    The kernel assigns other ports first, so the port stays free until a server that starts now binds it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- time limits and signals ---------------------------------------------------------------------------------------


def start_call(function: Callable[[], _Result]) -> Future[_Result]:
    """Call `function` on a thread that does not delay the end of the process, and return the future of its result."""
    call: Future[_Result] = Future()
    call.set_running_or_notify_cancel()  # so that it cannot be cancelled

    def run_call() -> None:
        try:
            call.set_result(function())
        except BaseException as error:  # raised again on the caller's thread
            call.set_exception(error)

    threading.Thread(target=run_call, daemon=True).start()
    return call


def call_with_timeout(limit_s: float, function: Callable[[], _Result]) -> _Result:
    """Return the result of `start_call`, or raise its error. Raises TimeoutError after `limit_s`."""
    call = start_call(function)
    if not wait([call], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return call.result()


@contextmanager
def block_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block is left. Outside the main thread this does nothing.

    Python runs signal handlers on the main thread only, so no other thread is ever interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous_handlers: dict[signal.Signals, Any] = {}
    for signum in (signal.SIGINT, signal.SIGTERM):
        previous_handlers[signum] = signal.signal(signum, lambda signum, _frame: pending.append(signum))
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)
        for pending_signum in pending:
            signal.raise_signal(pending_signum)


@contextmanager
def without_collection() -> Iterator[None]:
    """Suspend garbage collection in a block that creates many objects which stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def loading_modules() -> Iterator[None]:
    """Import modules without garbage collection, then exempt their objects from every later collection.

    The import of torch and the engine takes 1.6 s of CPU time, and 2.1 s with collections (2026-11-27).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
