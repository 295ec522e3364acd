"""Defines the interface to the machine: NVML, programs, the clock and files. Tests replace it by a scripted double."""

import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from meltcore.common.gpus.driver import Nvml
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuDevice
from meltcore.common.process import CompletedRun, run, signal_group
from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings

_HOST_PROCESSES = "pid:[4026531836]"  # the kernel's fixed number of the first namespace
# Of struct timex on 64-bit Linux, as longs: modes, offset, freq, maxerror (us), esterror, status (int), ...
_TIMEX_LONGS, _TIME_ERROR, _STA_UNSYNC = 26, 5, 0x40
_LOG_RECORD_BYTES, _MAX_LOG_RECORDS = 8192, 1_000_000
_TERMINATE_LIMIT_S = 60.0  # a program that started a server stops it first, which takes up to 45 s


class Telemetry(Protocol):
    """Samples of the GPUs, taken while checks run."""

    def since(self, from_s: float) -> list[list[Sample]] | None:
        """Return the samples of each GPU since `from_s`, or None if the sampler has died."""

    def close(self) -> None:
        """End the sampling."""


class Node:
    """The machine of this process: NVML, programs, the clock and files."""

    def __init__(self, nvml: Nvml) -> None:
        self.nvml = nvml
        self._started: list[subprocess.Popen[bytes]] = []

    def now_s(self) -> float:
        """Return the time on the clock of the samples."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        time.sleep(seconds)

    def read(self, path: Path) -> str | None:
        """Return the content of a file, or None if it cannot be read."""
        try:
            return path.read_text()
        except OSError:
            return None

    def names(self, folder: Path) -> list[str] | None:
        """Return the names of the entries of a folder: none if it does not exist, None if it cannot be read."""
        try:
            return [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError:
            return None

    def sees_host_processes(self) -> bool:
        """Return whether /proc shows the processes of the host, and not those of a container."""
        try:
            return str(Path("/proc/self/ns/pid").readlink()) == _HOST_PROCESSES
        except OSError:
            return False

    def clock_error_s(self) -> float | None:
        """Return the kernel's bound on the error of the clock in seconds.

        Returns infinity for a clock that is not synchronized, and None if the kernel does not say.
        """
        timex = (ctypes.c_long * _TIMEX_LONGS)()  # field 0 is `modes`: 0 only reads
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
        if state < 0:
            return None
        is_unsynchronized = state == _TIME_ERROR or int(timex[5]) & _STA_UNSYNC
        return math.inf if is_unsynchronized else timex[3] / 1e6

    def kernel_log(self) -> str | None:
        """Return the kernel's log since its oldest record, or None if this user or container may not read it."""
        records: list[bytes] = []
        try:
            file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            while len(records) < _MAX_LOG_RECORDS:
                try:
                    records.append(os.read(file, _LOG_RECORD_BYTES))
                except BrokenPipeError:  # the record was overwritten meanwhile; the next read goes on after it
                    continue
        except BlockingIOError:  # the end of the log
            return b"".join(records).decode(errors="replace")
        except OSError:
            return None
        finally:
            os.close(file)
        return b"".join(records).decode(errors="replace")

    def run(self, command: Sequence[str], stdin: bytes, environment: Mapping[str, str], limit_s: float) -> CompletedRun:
        """Run a program, or end its process group after `limit_s`, and return its output.

        `environment` is added to ours.
        """
        return run(
            command,
            limit_s=limit_s,
            stdin=stdin,
            environment={**os.environ, **environment},
            terminate_limit_s=_TERMINATE_LIMIT_S,
            on_start=self._started.append,
        )

    def terminate_programs(self) -> None:
        """Send SIGTERM to all programs that run in any thread, so that `run` returns."""
        for process in self._started:
            if process.poll() is None:
                signal_group(process.pid, signal.SIGTERM)

    def telemetry(self, path: Path, gpus: Sequence[GpuDevice], interval_s: float) -> Telemetry:
        """Start sampling into a file and return the running sampling. Raises the errors that `Monitor` raises."""
        uuids = ",".join(gpu.info.uuid for gpu in gpus)
        return _MonitorTelemetry(Monitor(SamplerSettings(path=str(path), gpus=uuids, interval_s=interval_s)), len(gpus))


def last_line(completed: CompletedRun) -> str:
    """Return the last line that a program wrote to standard error, for messages."""
    lines = completed.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "no message"


class _MonitorTelemetry:
    def __init__(self, monitor: Monitor, gpus: int) -> None:
        self._monitor = monitor
        self._gpus = gpus
        self._samples: list[Sample] = []

    def since(self, from_s: float) -> list[list[Sample]] | None:
        """Return the samples of each GPU from `from_s` on. Drop earlier samples, because a soak runs for days."""
        new_samples = self._monitor.new_samples()
        if not self._monitor.is_running and self._monitor.end is None:
            return None  # it died, and may have missed the event that matters
        self._samples = [sample for sample in [*self._samples, *new_samples] if sample.t_s >= from_s]
        return [[sample for sample in self._samples if sample.gpu == gpu_index] for gpu_index in range(self._gpus)]

    def close(self) -> None:
        self._monitor.stop()
