"""The recording of the sampler: one JSON line at the start, one per sample and GPU, one at the end.

Times are `time.monotonic()` seconds. All processes of a machine share this clock, so samples align with measurements
of other processes.
"""

from pathlib import Path
from typing import Literal

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuInfo


class RecordingStart(msgspec.Struct, kw_only=True, tag="start"):
    """The first line of a recording. `started` is UTC in ISO 8601, read at `t_s` of the monotonic clock."""

    t_s: float
    started: str
    interval_s: float
    driver: str
    gpus: list[GpuInfo]


class RecordingEnd(msgspec.Struct, kw_only=True, tag="end"):
    """Last line of a sampler that ended in order, after `cpu_s` of processor time.

    `missed` counts intervals without a sample, because earlier readings took longer than the interval.
    """

    t_s: float
    missed: int
    cpu_s: float
    reason: Literal["stopped", "all GPUs lost"]


Line = RecordingStart | Sample | RecordingEnd
encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode


class Recording(msgspec.Struct, kw_only=True):
    """The contents of a sampler's file. `end` is None where the sampler died or still runs."""

    start: RecordingStart
    samples: list[Sample]
    end: RecordingEnd | None = None

    def gpu_samples(self, gpu: int, from_s: float = float("-inf"), to_s: float = float("inf")) -> list[Sample]:
        """Return the samples of one GPU (an index into start.gpus) taken between two times."""
        return [sample for sample in self.samples if sample.gpu == gpu and from_s <= sample.t_s <= to_s]


def read_recording(path: Path | str) -> Recording:
    """Read a sampler's file; an incomplete last line, left by a crash, is ignored. Raises ConfigError."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        lines = [decode_line(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a recording of meltcore monitor: {error}") from error
    if not lines or not isinstance(lines[0], RecordingStart):
        raise ConfigError(f"{path} is not a recording of meltcore monitor: its first line is not a start")
    end_lines = [line for line in lines if isinstance(line, RecordingEnd)]
    samples = [line for line in lines if isinstance(line, Sample)]
    return Recording(start=lines[0], samples=samples, end=end_lines[-1] if end_lines else None)
