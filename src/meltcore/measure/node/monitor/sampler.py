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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
from pynvml import NVMLError

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.files import file_errors
from meltcore.common.gpus.driver import START_LIMIT_S, NoDriverError, Nvml, NvmlWithTimeout
from meltcore.common.gpus.metrics import METRIC_BY_KEY, UNKNOWN, Absent
from meltcore.common.gpus.reader import MIN_GPM_WINDOW_S, GpuReader, Sample
from meltcore.common.gpus.select import GpuDevice, select_gpus
from meltcore.common.gpus.xid import XidWatch
from meltcore.common.process import end_group, ended_within, start, start_call
from meltcore.measure.node.monitor.recording import RecordingEnd, RecordingStart, decode_line, encode_line

# The program that runs `main`. Tests set another, which reads scripted GPUs (tests/doubles/fake_gpu.py).
SAMPLER_COMMAND: Sequence[str] = (sys.executable, "-m", "meltcore.measure.node.monitor.sampler")
# A driver call on a dying GPU may never return; the sampler gets this long to stop.
_STOP_LIMIT_S = 5.0
# A reading takes milliseconds. GPUs whose reading takes longer than this delay the samples of no other.
_READ_LIMIT_S = 0.5
_EVENT_LIMIT_S = 2.0
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
        timed = NvmlWithTimeout(nvml)
        gpus = select_gpus(timed, settings.gpus, split_mig=settings.split_mig)
        driver = timed.driver()
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
    with suppress(NVMLError):  # a hanging driver must not keep this process
        timed.close()


class _SampledGpu:
    """Reads one GPU on a thread of its own, so that a driver call that hangs delays no other GPU."""

    def __init__(self, nvml: Nvml, gpu: GpuDevice, gpu_index: int) -> None:
        self._nvml, self._gpu, self._index = nvml, gpu, gpu_index
        self._reader: GpuReader | None = None
        self._xids: list[int] | Absent = []
        self.call: Future[Sample | None] | None = None
        self.was_late = False
        self.begin([])  # makes the reader, whose first GPM window starts then

    def begin(self, xids: list[int] | Absent) -> None:
        """Start a reading if none is under way. The next sample has `xids` and those that no sample has had yet."""
        if isinstance(self._xids, list) and isinstance(xids, list):
            self._xids = self._xids + xids
        elif not self._xids or isinstance(xids, list):
            self._xids = xids
        if self.call is None:
            self._begin_s = time.monotonic()
            self.call = start_call(self._read)

    def _read(self) -> Sample | None:
        if self._reader is not None:
            return self._reader.read(self._index, [])
        self._reader = GpuReader(self._nvml, self._gpu)
        return None

    def take(self) -> Sample | None:
        """Return the sample of the reading if the driver has answered, else a sample that says for how long it hangs.

        Returns None if the driver may still answer in time.
        """
        assert self.call is not None
        now_s = time.monotonic()
        if self.call.done():
            sample, self.call = self.call.result(), None
            if sample is None:
                return None  # the reader was made
            if self.was_late:
                sample.t_s = now_s  # samples of hung calls were written meanwhile, and samples are in order
            sample.xids, self._xids = self._xids, []
            return sample
        if now_s - self._begin_s < _READ_LIMIT_S:
            return None
        self.was_late = True
        xids, self._xids = self._xids, []
        return Sample(
            t_s=now_s,
            gpu=self._index,
            read_s=now_s - self._begin_s,
            values=dict.fromkeys(METRIC_BY_KEY, UNKNOWN),
            clock_reasons=UNKNOWN,
            xids=xids,
            hung=True,
        )


def record(
    nvml: Nvml, gpus: Sequence[GpuDevice], interval_s: float, file: BinaryIO, stopping: threading.Event
) -> RecordingEnd:
    """Write a sample of each GPU every `interval_s` until `stopping` is set or every GPU is lost. Return the last line.

    Samples are due at multiples of the interval after the first sample. If reading takes longer than the interval, due
    times are skipped and counted as missed. A GPU whose reading has once exceeded its limit is not waited for again.
    """
    watch = XidWatch(NvmlWithTimeout(nvml, _EVENT_LIMIT_S), gpus)
    sampled = {gpu_index: _SampledGpu(nvml, gpu, gpu_index) for gpu_index, gpu in enumerate(gpus)}
    _await_answers(sampled.values())
    for gpu in sampled.values():
        gpu.take()  # its reader
    due_s = time.monotonic() + MIN_GPM_WINDOW_S  # by then the first GPM windows are long enough
    num_missed = 0
    while sampled and not stopping.wait(max(0.0, due_s - time.monotonic())):
        xids = watch.take()
        for gpu_index, gpu in sampled.items():
            gpu.begin(xids[gpu_index])
        _await_answers(sampled.values())
        for gpu_index, gpu in list(sampled.items()):
            sample = gpu.take()
            if sample is None:
                continue
            # One unbuffered write per line: a reader of the file sees whole lines, also after a crash.
            file.write(encode_line(sample) + b"\n")
            if sample.lost:
                del sampled[gpu_index]
        num_late = max(0, int((time.monotonic() - due_s) / interval_s))
        num_missed += num_late
        due_s += (num_late + 1) * interval_s
    return RecordingEnd(
        t_s=time.monotonic(),
        missed=num_missed,
        cpu_s=time.process_time(),
        reason="stopped" if sampled else "all GPUs lost",
    )


def _await_answers(sampled: Iterable[_SampledGpu]) -> None:
    """Wait until the driver has answered about every GPU that has answered in time so far, at most _READ_LIMIT_S."""
    wait([gpu.call for gpu in sampled if gpu.call is not None and not gpu.was_late], _READ_LIMIT_S)


def _create(path: str) -> BinaryIO:
    with file_errors("write", path):
        return Path(path).open("wb", buffering=0)


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
