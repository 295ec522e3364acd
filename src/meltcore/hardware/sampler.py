"""The sampler: a process of its own that reads GPUs at a fixed interval and writes a recording.

It talks over its standard streams: in comes one JSON line of Setup, out goes one of Started or Failed; the end of the
standard input means stop, so a parent that dies leaves no sampler behind. The recording goes to a file, so that a busy
parent cannot slow the sampler down.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from pynvml import NVMLError

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.hardware.fake import FakeGpu, FakeNvml
from meltcore.hardware.gpm import MIN_WINDOW_S
from meltcore.hardware.nvml import NoDriverError, Nvml
from meltcore.hardware.reader import GpuReader
from meltcore.hardware.recording import End, Start, encode_line
from meltcore.hardware.select import Gpu, select_gpus
from meltcore.hardware.xid import XidWatch

# A driver call on a dying GPU may never return; after a stop it gets this long.
LEAVE_S = 5.0


class Setup(msgspec.Struct, kw_only=True, frozen=True):
    """`gpus` as of --gpu, None for what CUDA_VISIBLE_DEVICES says. `in_slices`: as of select.select_gpus.

    `fake`: a scripted machine instead of this one.
    """

    path: str
    gpus: str | None = None
    in_slices: bool = False
    interval_s: float = 0.1
    fake: list[FakeGpu] | None = None


class Started(msgspec.Struct, tag="started"):
    start: Start


class Failed(msgspec.Struct, tag="failed"):
    """`no_driver`: there is no NVIDIA driver, as opposed to a setting that cannot work."""

    message: str
    no_driver: bool


def main() -> None:
    """The process's whole life."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    stopping = threading.Event()
    threading.Thread(target=_leave_with_the_parent, args=(stopping,), daemon=True).start()
    try:
        nvml = Nvml() if setup.fake is None else FakeNvml(setup.fake)
        gpus = select_gpus(nvml, setup.gpus, in_slices=setup.in_slices)
        driver = nvml.driver()
        file = _create(setup.path)
    except (MeltcoreError, NVMLError) as error:
        _answer(Failed(str(error), no_driver=isinstance(error, NoDriverError)))
        return
    start = Start(
        t_s=time.monotonic(),
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        interval_s=setup.interval_s,
        driver=driver,
        gpus=[gpu.info for gpu in gpus],
    )
    with file:
        file.write(encode_line(start) + b"\n")
        _answer(Started(start))
        end = record(nvml, gpus, setup.interval_s, file, stopping)
        file.write(encode_line(end) + b"\n")
    nvml.close()


def record(nvml: Nvml, gpus: Sequence[Gpu], interval_s: float, file: BinaryIO, stopping: threading.Event) -> End:
    """Write a sample of each GPU every `interval_s` until `stopping` is set or no GPU is left.

    Samples stay on the grid of the first: where the readings take longer than the interval, moments are left out and
    counted, never made up for.
    """
    watch = XidWatch(nvml, gpus)
    readers: dict[int, GpuReader] = {position: GpuReader(nvml, gpu) for position, gpu in enumerate(gpus)}
    due_s = time.monotonic() + MIN_WINDOW_S  # by then the first GPM windows are long enough
    late = 0
    while not stopping.wait(max(0.0, due_s - time.monotonic())):
        news = watch.take()
        for position, reader in list(readers.items()):
            sample = reader.read(position, news[position])
            # One unbuffered write a line: a reader of the file, or a crash, sees whole lines.
            file.write(encode_line(sample) + b"\n")
            if sample.lost:
                del readers[position]
        if not readers:
            break
        missed = max(0, int((time.monotonic() - due_s) / interval_s))
        late += missed
        due_s += (missed + 1) * interval_s
    why: Literal["asked", "every GPU lost"] = "asked" if readers else "every GPU lost"
    return End(t_s=time.monotonic(), late=late, cpu_s=time.process_time(), why=why)


def _create(path: str) -> BinaryIO:
    try:
        return Path(path).open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _answer(answer: Started | Failed) -> None:
    sys.stdout.buffer.write(encode_line(answer) + b"\n")
    sys.stdout.buffer.flush()


def _leave_with_the_parent(stopping: threading.Event) -> None:
    """Set `stopping` at the end of the standard input; leave by force where a driver call hangs after that."""
    os.read(0, 1)
    stopping.set()
    time.sleep(LEAVE_S)
    os._exit(1)
