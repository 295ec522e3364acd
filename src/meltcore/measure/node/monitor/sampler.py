"""Runs the sampler, a separate process that reads GPUs at a fixed interval into a recording, and its handle `Monitor`.

The sampler reads SamplerSettings as one JSON line from standard input, and answers with one line of SamplerStarted or
SamplerFailed. It stops at the end of standard input, and so ends with its parent. Samples go to a file, so a busy
parent cannot delay the sampler.
"""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
from pynvml import NVMLError

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.gpus.driver import START_LIMIT_S, NoDriverError, Nvml
from meltcore.common.gpus.reader import MIN_GPM_WINDOW_S, GpuReader, Sample
from meltcore.common.gpus.select import GpuDevice, select_gpus
from meltcore.common.gpus.xid import XidWatch
from meltcore.common.process import end_group, ended_within, start
from meltcore.measure.node.monitor.recording import RecordingEnd, RecordingStart, decode_line, encode_line

# The program that runs `main`. Tests set another, which reads scripted GPUs (tests/doubles/fake_gpu.py).
SAMPLER_COMMAND: Sequence[str] = (sys.executable, "-m", "meltcore.measure.node.monitor.sampler")
# A driver call on a dying GPU may never return; the sampler gets this long to stop.
_STOP_LIMIT_S = 5.0
_KILL_TIMEOUT_S = 2.0


class SamplerSettings(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of the sampler process.

    `gpus` is the value of --gpu, or None for CUDA_VISIBLE_DEVICES. With `split_mig`, MIG devices replace their GPU.
    """

    path: str
    gpus: str | None = None
    split_mig: bool = False
    interval_s: float = 0.1


class SamplerStarted(msgspec.Struct, tag="started"):
    """The first line of the recording, once sampling starts."""

    start: RecordingStart


class SamplerFailed(msgspec.Struct, tag="failed"):
    """Reports that the sampler cannot start: there is no NVIDIA driver (`no_driver`), or a setting is invalid."""

    message: str
    no_driver: bool


class Monitor:
    """A running sampler. Use it as a context manager: leaving it ends the process.

    `end` is None until the sampler's last line was read. It stays None if the sampler crashed or was killed.
    `recording.read_recording` reads the whole file afterwards.
    """

    start: RecordingStart
    end: RecordingEnd | None

    def __init__(self, settings: SamplerSettings) -> None:
        """Start the sampler.

        Raises NoDriverError without an NVIDIA driver. Raises ConfigError for GPUs that do not exist or a file that
        cannot be written. Raises MeltcoreError if the sampler does not start.
        """
        self.path = Path(settings.path)
        self.end = None
        self._read_bytes = 0
        self._process = start(SAMPLER_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.start = self._handshake(settings)
        except BaseException:
            self._end_sampler()
            raise

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_sampler()

    @property
    def pid(self) -> int:
        """The process id of the sampler."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the sampler runs. It ends by itself only when every GPU is lost."""
        return self._process.poll() is None

    def new_samples(self) -> list[Sample]:
        """Return the samples that were written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(complete_lines)
        lines = [decode_line(line) for line in complete_lines.splitlines()]
        self.end = next((line for line in lines if isinstance(line, RecordingEnd)), self.end)
        return [line for line in lines if isinstance(line, Sample)]

    def stop(self) -> list[Sample]:
        """End the sampler, set `end`, and return the samples that `new_samples` has not returned yet."""
        self._end_sampler()
        return self.new_samples()

    def _handshake(self, settings: SamplerSettings) -> RecordingStart:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, as the missing line will show
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        if not select.select([self._process.stdout], [], [], START_LIMIT_S)[0]:
            raise MeltcoreError(f"the GPU sampler did not start within {START_LIMIT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise MeltcoreError("the GPU sampler ended before it had started; its error is printed above")
        answer = msgspec.json.decode(line, type=SamplerStarted | SamplerFailed)
        if isinstance(answer, SamplerFailed):
            raise (NoDriverError if answer.no_driver else ConfigError)(answer.message)
        return answer.start

    def _end_sampler(self) -> None:
        """Stop the sampler, then kill it. Raises MeltcoreError if the kernel holds it in a driver call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if not ended_within(self._process, _STOP_LIMIT_S + _KILL_TIMEOUT_S) and not end_group(
            self._process, 0.0, kill_limit_s=_KILL_TIMEOUT_S
        ):
            raise MeltcoreError(f"the GPU sampler, process {self.pid}, hangs in the driver and cannot be ended")
        self._process.stdout.close()


def main(connect: Callable[[], Nvml] = Nvml) -> None:
    """Run the sampler process. `connect` opens the connection to NVML."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=SamplerSettings)
    stopping = threading.Event()
    threading.Thread(target=_stop_with_parent, args=(stopping,), daemon=True).start()
    try:
        nvml = connect()
        gpus = select_gpus(nvml, settings.gpus, split_mig=settings.split_mig)
        driver = nvml.driver()
        file = _create(settings.path)
    except (MeltcoreError, NVMLError) as error:
        _send(SamplerFailed(str(error), no_driver=isinstance(error, NoDriverError)))
        return
    first = RecordingStart(
        t_s=time.monotonic(),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        interval_s=settings.interval_s,
        driver=driver,
        gpus=[gpu.info for gpu in gpus],
    )
    with file:
        file.write(encode_line(first) + b"\n")
        _send(SamplerStarted(first))
        file.write(encode_line(record(nvml, gpus, settings.interval_s, file, stopping)) + b"\n")
    nvml.close()


def record(
    nvml: Nvml, gpus: Sequence[GpuDevice], interval_s: float, file: BinaryIO, stopping: threading.Event
) -> RecordingEnd:
    """Write a sample of each GPU every `interval_s` until `stopping` is set or every GPU is lost. Return the last line.

    Samples are due at multiples of the interval after the first sample. If reading takes longer than the interval, due
    times are skipped and counted as missed.
    """
    watch = XidWatch(nvml, gpus)
    readers: dict[int, GpuReader] = {gpu_index: GpuReader(nvml, gpu) for gpu_index, gpu in enumerate(gpus)}
    due_s = time.monotonic() + MIN_GPM_WINDOW_S  # by then the first GPM windows are long enough
    num_missed = 0
    while readers and not stopping.wait(max(0.0, due_s - time.monotonic())):
        xids = watch.take()
        for gpu_index, reader in list(readers.items()):
            sample = reader.read(gpu_index, xids[gpu_index])
            # One unbuffered write per line: a reader of the file sees whole lines, also after a crash.
            file.write(encode_line(sample) + b"\n")
            if sample.lost:
                del readers[gpu_index]
        num_late = max(0, int((time.monotonic() - due_s) / interval_s))
        num_missed += num_late
        due_s += (num_late + 1) * interval_s
    return RecordingEnd(
        t_s=time.monotonic(),
        missed=num_missed,
        cpu_s=time.process_time(),
        reason="stopped" if readers else "all GPUs lost",
    )


def _create(path: str) -> BinaryIO:
    try:
        return Path(path).open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _send(answer: SamplerStarted | SamplerFailed) -> None:
    sys.stdout.buffer.write(encode_line(answer) + b"\n")
    sys.stdout.buffer.flush()


def _stop_with_parent(stopping: threading.Event) -> None:
    """Set `stopping` at the end of standard input. Kill the process if a driver call hangs after that."""
    os.read(0, 1)
    stopping.set()
    time.sleep(_STOP_LIMIT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
