"""An engine as a subprocess: started, spoken to over two pipes, always ended. One thread does both directions."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from meltcore.bench.lines import Abort, Failed, FromEngine, Generate, Loading, Ready, Refused, Step, decode, encode
from meltcore.errors import MeltcoreError

OWN_PROGRAM = (sys.executable, "-m", "meltcore.engine.json_lines")
START_LIMIT_S = 600.0  # a model may have to be downloaded first
STALL_LIMIT_S = 60.0  # no step of any supported GPU takes a tenth of it
_LEAVE_LIMIT_S = 5.0
_PIPE_BYTES = 2**20  # at most this many a system call
_LOOK_S = 0.5  # the longest wait before somebody may look at the clock, or at a Ctrl-C
_LOG_LINES = 6


class EngineError(MeltcoreError):
    """The engine did not do what it was asked to: it died, hung, or its tokens do not add up."""


class Stopped(Exception):
    """Somebody asked the run to end."""


class EngineProcess:
    """A context manager: inside, the engine runs; after it, it is gone whatever happened.

    `config` are EngineConfig's fields. `environment` is added to ours: which GPU to see.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = OWN_PROGRAM,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        self._log_path = log_path
        self._stall_limit_s = stall_limit_s
        self._unsent = bytearray(msgspec.json.encode(dict(config)) + b"\n")
        self._received = bytearray()
        self._heard_s = time.monotonic()
        self._idle = True
        with log_path.open("wb") as log:
            # A session of its own: a Ctrl-C in the terminal reaches us alone, and we end it in order.
            self._process = subprocess.Popen(
                list(program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._writing = False

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, stop: Callable[[], bool], limit_s: float = START_LIMIT_S) -> Ready:
        """Raises EngineError where the engine ends first, says that it cannot start, or takes longer; Stopped."""
        end_s = time.monotonic() + limit_s
        while True:
            if stop():
                raise Stopped
            for line in self._exchange(_LOOK_S):
                if isinstance(line, Ready):
                    return line
                if not isinstance(line, Loading):
                    raise EngineError(f"the engine said {type(line).__name__.lower()} before it was ready")
            if time.monotonic() > end_s:
                raise EngineError(f"the engine was not ready within {limit_s:.0f} s{self._last_lines()}")

    def send(self, message: Generate | Abort) -> None:
        """Queue a line; it goes out while `steps` is waited for."""
        if self._idle:
            self._idle, self._heard_s = False, time.monotonic()
        self._unsent += encode(message) + b"\n"

    def rest(self) -> None:
        """Nothing is open: until the next `send` the engine has nothing to say."""
        self._idle = True

    def steps(self, until_s: float) -> list[Step]:
        """What came, waiting for something until the monotonic time `until_s`, and for half a second, at most.

        Raises EngineError where the engine is gone, refuses a request, gives up or has said nothing for too long.
        """
        lines = self._exchange(min(_LOOK_S, until_s - time.monotonic()))
        now_s = time.monotonic()
        if lines:
            self._heard_s = now_s
        elif now_s - self._heard_s > self._stall_limit_s:
            raise EngineError(f"the engine gave no token for {self._stall_limit_s:g} s{self._last_lines()}")
        steps = []
        for line in lines:
            if isinstance(line, Refused):
                raise EngineError(f"the engine refused request {line.id}: {line.error}")
            if not isinstance(line, Step):
                raise EngineError(f"the engine said {type(line).__name__.lower()} between steps")
            if line.t_s > now_s:
                raise EngineError(f"the engine dated a step {line.t_s - now_s:.3f} s after its line had come")
            steps.append(line)
        return steps

    def stop(self) -> None:
        """Close its input, which ends it; kill it where that does not help."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(_LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, wait_s: float) -> list[FromEngine]:
        """Write and read what can be without waiting longer than `wait_s`; the whole lines that came."""
        self._watch_for_room()
        end_s = time.monotonic() + wait_s
        while True:
            for key, _ in self._selector.select(max(0.0, end_s - time.monotonic())):
                if key.fd == self._input:
                    self._write()
                else:
                    self._read()
            lines = self._whole_lines()
            if lines or time.monotonic() >= end_s:
                return lines

    def _watch_for_room(self) -> None:
        if bool(self._unsent) == self._writing:
            return
        if self._unsent:
            self._selector.register(self._input, selectors.EVENT_WRITE)
        else:
            self._selector.unregister(self._input)
        self._writing = bool(self._unsent)

    def _write(self) -> None:
        try:
            with memoryview(self._unsent) as unsent:
                written = os.write(self._input, unsent[:_PIPE_BYTES])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent.clear()  # it is gone, as the end of its output will say
            written = 0
        del self._unsent[:written]
        self._watch_for_room()

    def _read(self) -> None:
        try:
            text = os.read(self._output, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not text:
            raise EngineError(f"the engine ended {self._how()}{self._last_lines()}")
        self._received += text

    def _whole_lines(self) -> list[FromEngine]:
        end = self._received.rfind(b"\n") + 1
        if not end:
            return []
        text = bytes(self._received[:end])
        del self._received[:end]
        try:
            lines: list[FromEngine] = [decode(line) for line in text.splitlines()]
        except msgspec.MsgspecError as error:
            raise EngineError(f"the engine wrote a line that is none of ours: {error}") from error
        failed = next((line for line in lines if isinstance(line, Failed)), None)
        if failed is not None:
            raise EngineError(failed.message)
        return lines

    def _how(self) -> str:
        try:
            status = self._process.wait(_LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "its output"
        return f"by signal {-status}" if status < 0 else f"with exit status {status}"

    def _last_lines(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)
