"""The sampler from outside: start it, follow its recording, and see it end whatever happens."""

import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.hardware.nvml import NoDriverError
from meltcore.hardware.recording import End, Sample, Start, decode_line
from meltcore.hardware.sampler import LEAVE_S, Failed, Setup, Started

_START = "from meltcore.hardware.sampler import main; main()"
_START_LIMIT_S = 60.0  # NVML takes several seconds on a machine of eight GPUs without persistence mode
_KILL_AFTER_S = 2.0


class Monitor:
    """A running sampler. Use it as a context manager: leaving ends the process.

    Raises NoDriverError without an NVIDIA driver, ConfigError for GPUs that are not there or a file that cannot be
    written, MeltcoreError where the sampler does not start. `end` stays None until the sampler's last line was read,
    and for good where it did not leave in order. `recording.read_recording` reads the whole file afterwards.
    """

    start: Start
    end: End | None

    def __init__(self, setup: Setup) -> None:
        self.path = Path(setup.path)
        self.end = None
        self._read_bytes = 0
        # A session of its own: Ctrl-C and a signal to our process group reach us alone, and we end it in order.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.start = self._greet(setup)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """False once the sampler has left, which it does by itself only when every GPU is lost."""
        return self._process.poll() is None

    def new_samples(self) -> list[Sample]:
        """Samples written since the last call; after `stop`, the last ones."""
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        lines = [decode_line(line) for line in whole.splitlines()]
        self.end = next((line for line in lines if isinstance(line, End)), self.end)
        return [line for line in lines if isinstance(line, Sample)]

    def stop(self) -> list[Sample]:
        """End the sampler and return the samples not yet handed out; `end` says how it left."""
        self._end()
        return self.new_samples()

    def _greet(self, setup: Setup) -> Start:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it is gone already, as the missing answer will say
            self._process.stdin.write(msgspec.json.encode(setup) + b"\n")
        limit_s = time.monotonic() + _START_LIMIT_S
        while not select.select([self._process.stdout], [], [], 0.5)[0]:
            if time.monotonic() > limit_s:
                raise MeltcoreError(f"the GPU sampler did not start within {_START_LIMIT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise MeltcoreError("the GPU sampler ended before it had started; its error stands above")
        answer = msgspec.json.decode(line, type=Started | Failed)
        if isinstance(answer, Failed):
            raise (NoDriverError if answer.no_driver else ConfigError)(answer.message)
        return answer.start

    def _end(self) -> None:
        """Ask, then kill. Raises MeltcoreError where even that does not help: the kernel holds it in a driver call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S + _KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process.stdout.close()

    def _kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired as error:
            raise MeltcoreError(f"the GPU sampler, process {self.pid}, hangs in the driver and cannot end") from error
