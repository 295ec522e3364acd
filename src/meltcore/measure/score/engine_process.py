"""Runs an engine as a subprocess that exchanges JSON lines over two pipes. One thread reads and writes."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from meltcore.common import process
from meltcore.common.errors import MeltcoreError
from meltcore.common.process_output import log_tail
from meltcore.protocol.json_lines import (
    Abort,
    FailedLine,
    FromEngineLine,
    Generate,
    LoadingLine,
    ReadyLine,
    RefusedLine,
    StepLine,
    decode,
    encode,
)

ENGINE_COMMAND = (sys.executable, "-m", "meltcore.engine.generation")
START_LIMIT_S = 600.0  # a model may have to be downloaded first
STALL_LIMIT_S = 60.0  # no step of any supported GPU takes a tenth of it
_EXIT_LIMIT_S = 5.0
_PIPE_BYTES = 2**20  # maximum per system call
_POLL_S = 0.5  # maximum wait before callers check the time and interruptions
_LOG_LINES = 6


class EngineError(MeltcoreError):
    """The engine died, hung, refused a request, or its tokens are inconsistent."""


class RunInterruptedError(Exception):
    """The user interrupted the run."""


class ScoredEngine:
    """A context manager: the engine runs inside the block and has ended after it.

    `config` are EngineConfig's fields. `environment` is added to ours, to select the GPU.
    """

    def __init__(
        self, config: Mapping[str, Any], log_path: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log_path = log_path
        self._unsent = bytearray(msgspec.json.encode(dict(config)) + b"\n")
        self._received = bytearray()
        self._last_line_s = time.monotonic()
        self._idle = True
        with log_path.open("wb") as log:
            self._process = process.start(
                ENGINE_COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                environment={**os.environ, **(environment or {})},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._writing = False

    def __enter__(self) -> ScoredEngine:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self, is_interrupted: Callable[[], bool], limit_s: float = START_LIMIT_S) -> ReadyLine:
        """Wait until the engine is ready, and return its ready message.

        Raises EngineError if the engine ends, reports that it cannot start, or needs more than `limit_s`. Raises
        RunInterruptedError if the user interrupts the run.
        """
        end_s = time.monotonic() + limit_s
        while True:
            if is_interrupted():
                raise RunInterruptedError
            for line in self._exchange(_POLL_S):
                if isinstance(line, ReadyLine):
                    return line
                if not isinstance(line, LoadingLine):
                    raise EngineError(f"the engine sent {_line_type(line)} before it was ready")
            if time.monotonic() > end_s:
                raise EngineError(f"the engine was not ready within {limit_s:.0f} s{self._log_tail()}")

    def send(self, message: Generate | Abort) -> None:
        """Queue a message for the engine, which the next call of `steps` writes."""
        if self._idle:
            self._idle, self._last_line_s = False, time.monotonic()
        self._unsent += encode(message) + b"\n"

    def set_idle(self) -> None:
        """Declare that no request is open. A silent engine is then no error until the next `send`."""
        self._idle = True

    def steps(self, deadline_s: float) -> list[StepLine]:
        """Return the received steps. Waits for a step until `deadline_s` (monotonic), but at most half a second.

        Raises EngineError if the engine ended, refused a request, failed, or sent nothing for too long.
        """
        lines = self._exchange(min(_POLL_S, deadline_s - time.monotonic()))
        now_s = time.monotonic()
        if lines:
            self._last_line_s = now_s
        elif now_s - self._last_line_s > STALL_LIMIT_S:
            raise EngineError(f"the engine gave no token for {STALL_LIMIT_S:g} s{self._log_tail()}")
        steps = []
        for line in lines:
            if isinstance(line, RefusedLine):
                raise EngineError(f"the engine refused request {line.id}: {line.error}")
            if not isinstance(line, StepLine):
                raise EngineError(f"the engine sent {_line_type(line)} between steps")
            if line.t_s > now_s:
                raise EngineError(f"the engine dated a step {line.t_s - now_s:.3f} s after its line had come")
            steps.append(line)
        return steps

    def stop(self) -> None:
        """Close the engine's input, which ends the engine. Kill the engine if it does not exit."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        if not process.ended_within(self._process, _EXIT_LIMIT_S):
            self._process.kill()
            self._process.wait()

    def _exchange(self, wait_s: float) -> list[FromEngineLine]:
        """Write and read for at most `wait_s`, and return the complete lines received."""
        self._watch_input()
        end_s = time.monotonic() + wait_s
        while True:
            for key, _ in self._selector.select(max(0.0, end_s - time.monotonic())):
                if key.fd == self._input:
                    self._write()
                else:
                    self._read()
            lines = self._complete_lines()
            if lines or time.monotonic() >= end_s:
                return lines

    def _watch_input(self) -> None:
        """Poll the input pipe only while there is something to write."""
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
                num_written = os.write(self._input, unsent[:_PIPE_BYTES])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent.clear()  # the engine ended, as the end of its output will show
            num_written = 0
        del self._unsent[:num_written]
        self._watch_input()

    def _read(self) -> None:
        try:
            data = os.read(self._output, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            has_ended = process.ended_within(self._process, _EXIT_LIMIT_S)
            exit_text = process.describe_exit(self._process.returncode) if has_ended else "its output closed"
            raise EngineError(f"the engine ended: {exit_text}{self._log_tail()}")
        self._received += data

    def _complete_lines(self) -> list[FromEngineLine]:
        end = self._received.rfind(b"\n") + 1
        if not end:
            return []
        data = bytes(self._received[:end])
        del self._received[:end]
        try:
            lines: list[FromEngineLine] = [decode(line) for line in data.splitlines()]
        except msgspec.MsgspecError as error:
            raise EngineError(f"the engine wrote an invalid line: {error}") from error
        failed = next((line for line in lines if isinstance(line, FailedLine)), None)
        if failed is not None:
            raise EngineError(failed.message)
        return lines

    def _log_tail(self) -> str:
        return "".join(f"\n  {line}" for line in log_tail(self._log_path, _LOG_LINES).splitlines())


def _line_type(line: FromEngineLine) -> str:
    return str(line.__struct_config__.tag)
