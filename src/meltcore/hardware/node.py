"""The one seam to the machine: NVML, other programs, the clock, the system's files. `fake_node.FakeNode` scripts it."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

from meltcore.hardware.monitor import Monitor
from meltcore.hardware.nvml import Nvml
from meltcore.hardware.recording import Sample
from meltcore.hardware.sampler import Setup
from meltcore.hardware.select import Gpu

_LEAVE_S = 60.0  # of a program that is asked to end: one that started a server stops it first, in up to 45 s
_AFTER_KILL_S = 5.0  # a process that the kernel holds in a driver call outlives its killing


@dataclass(frozen=True)
class Ran:
    """How a program ended. `code` is None where it was killed for taking too long; `alive` where even that failed."""

    code: int | None
    stdout: bytes
    stderr: bytes
    alive: bool = False

    @property
    def last_words(self) -> str:
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it said nothing"


class Telemetry(Protocol):
    """What the GPUs did, sampled beside whatever runs."""

    def since(self, from_s: float) -> list[list[Sample]] | None:
        """Samples of each GPU from a moment on; None where the sampler is gone."""

    def close(self) -> None:
        """End it."""


class Node:
    """This machine."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self._running: set[int] = set()  # process groups

    def now_s(self) -> float:
        """On the clock of the samples."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def read(self, path: Path) -> str | None:
        try:
            return path.read_text()
        except OSError:
            return None

    def run(self, command: Sequence[str], stdin: bytes, environment: Mapping[str, str], limit_s: float) -> Ran:
        """Run a program to its end, or end it and all it started at the limit. `environment` is added to ours.

        Output goes through files, so that what a killed program had written is not lost, and none can fill a pipe.
        """
        with TemporaryFile() as question, TemporaryFile() as out, TemporaryFile() as err:
            question.write(stdin)
            question.seek(0)
            process = subprocess.Popen(
                command,
                stdin=question,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            self._running.add(process.pid)
            try:
                code, alive = _wait(process, limit_s)
            finally:
                self._running.discard(process.pid)
            out.seek(0)
            err.seek(0)
            return Ran(code, out.read(), err.read(), alive)

    def end_programs(self) -> None:
        """Ask all that run now, in whatever thread, to end; `run` then returns."""
        for group in list(self._running):
            _signal_group(group, signal.SIGTERM)

    def telemetry(self, path: Path, gpus: Sequence[Gpu], interval_s: float) -> Telemetry:
        """Start sampling into a file. Raises what Monitor raises."""
        uuids = ",".join(gpu.info.uuid for gpu in gpus)
        return _Sampling(Monitor(Setup(path=str(path), gpus=uuids, interval_s=interval_s)), len(gpus))


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> tuple[int | None, bool]:
    """(its exit status, None where the limit passed; whether it is still there)."""
    try:
        return process.wait(limit_s), False
    except subprocess.TimeoutExpired:
        _ask_to_leave(process)
    except BaseException:
        _ask_to_leave(process)
        raise
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # also what a program that ended by itself left behind
    try:
        process.wait(_AFTER_KILL_S)
    except subprocess.TimeoutExpired:
        return None, True
    return None, False


def _ask_to_leave(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, on which a program that started others in sessions of their own ends these; then some patience."""
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


class _Sampling:
    def __init__(self, monitor: Monitor, gpus: int) -> None:
        self._monitor = monitor
        self._gpus = gpus
        self._samples: list[Sample] = []

    def since(self, from_s: float) -> list[list[Sample]] | None:
        """Samples before that moment are dropped: a soak runs for days."""
        new = self._monitor.new_samples()
        if not self._monitor.running and self._monitor.end is None:
            return None  # it died, and what it did not see may be what mattered
        self._samples = [sample for sample in [*self._samples, *new] if sample.t_s >= from_s]
        return [[sample for sample in self._samples if sample.gpu == position] for position in range(self._gpus)]

    def close(self) -> None:
        self._monitor.stop()
