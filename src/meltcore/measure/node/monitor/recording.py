"""Defines the recording of the sampler: one JSON line at the start, one per sample and GPU, and one at the end.

Times are `time.monotonic()` seconds. All processes of a machine share this clock. So a recording can be cut into the
levels of a load run.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.files import file_errors
from meltcore.common.gpus.metrics import NOT_APPLICABLE, UNKNOWN
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuInfo
from meltcore.measure.documents.schema import FleetLoad, GpuTimeline, GpuUse, LevelResult
from meltcore.measure.node.monitor.summary import bucket_means, readable_values

# NVML's utilization is left out: see metrics.UTILIZATION_NOTE.
PLOTTED_METRICS = ("sm_active_percent", "dram_bandwidth_percent", "power_w", "memory_used_bytes")
MAX_BUCKETS = 300


class RecordingStart(msgspec.Struct, kw_only=True, tag="start"):
    """The first line of a recording. `started` is UTC in ISO 8601, read at `t_s` of the monotonic clock."""

    t_s: float
    started: str
    interval_s: float
    driver: str
    gpus: list[GpuInfo]


class RecordingEnd(msgspec.Struct, kw_only=True, tag="end"):
    """The last line of a sampler that exited normally, after `cpu_s` of processor time.

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
    """The contents of a sampler's file. `end` is None if the sampler died or still runs."""

    start: RecordingStart
    samples: list[Sample]
    end: RecordingEnd | None = None

    def gpu_samples(self, gpu: int, from_s: float = float("-inf"), to_s: float = float("inf")) -> list[Sample]:
        """Return the samples of one GPU (an index into start.gpus) taken between two times."""
        return [sample for sample in self.samples if sample.gpu == gpu and from_s <= sample.t_s <= to_s]


def read_recording(path: Path | str) -> Recording:
    """Read a sampler's file, but for an incomplete last line after a crash. Raises ConfigError for another file."""
    with file_errors("read", path):
        text = Path(path).read_bytes()
    try:
        lines = [decode_line(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a recording of meltcore monitor: {error}") from error
    if not lines or not isinstance(lines[0], RecordingStart):
        raise ConfigError(f"{path} is not a recording of meltcore monitor: its first line is not a start")
    end_lines = [line for line in lines if isinstance(line, RecordingEnd)]
    samples = [line for line in lines if isinstance(line, Sample)]
    return Recording(start=lines[0], samples=samples, end=end_lines[-1] if end_lines else None)


def attach_gpu_timelines(levels: Sequence[LevelResult], recording: Recording) -> list[str]:
    """Set the GPU timelines of each level. Returns notes about gaps in the recording."""
    for level in levels:
        if level.released_s is not None:
            start_s, end_s = level.released_s, level.released_s + level.duration_s
            level.gpus = [timeline(recording, gpu, start_s, end_s) for gpu in range(len(recording.start.gpus))]
    if recording.end is None:
        return ["The GPU sampler did not end in order: its recording is cut short."]
    if recording.end.missed:
        return [f"The GPU sampler missed {recording.end.missed:,} intervals; they have no reading."]
    return []


def timeline(recording: Recording, gpu: int, start_s: float, end_s: float) -> GpuTimeline:
    """Return one GPU's bucket means between two times of the monotonic clock."""
    info = recording.start.gpus[gpu]
    samples = [sample for sample in recording.gpu_samples(gpu, start_s, end_s) if sample.t_s < end_s]
    duration_s = max(end_s - start_s, recording.start.interval_s)
    # Two intervals at least, so that a bucket is empty only where the sampler took no sample.
    bucket_s = max(2 * recording.start.interval_s, duration_s / MAX_BUCKETS)
    count = max(1, round(duration_s / bucket_s))
    values, absent = {}, {}
    for key in PLOTTED_METRICS:
        means = bucket_means(samples, key, start_s, bucket_s, count)
        if any(mean is not None for mean in means):
            values[key] = means
        else:
            reasons = {sample.values.get(key, UNKNOWN) for sample in samples}
            absent[key] = NOT_APPLICABLE if reasons == {NOT_APPLICABLE} else UNKNOWN
    return GpuTimeline(gpu=info.label, name=info.name, bucket_s=bucket_s, values=values, absent=absent)


def mean_sm_activity(samples: Sequence[Sample], from_s: float, to_s: float) -> float | None:
    """Return the mean fraction of active SMs between two times, or None if no sample has it.

    A GPU is busy at least this fraction of the time, so a trace that shows less is missing kernels.
    """
    readings = readable_values((sample for sample in samples if from_s <= sample.t_s <= to_s), "sm_active_percent")
    return fmean(readings) / 100 if readings else None


def attach_gpu_means(result: FleetLoad, recording: Recording) -> None:
    """Add each GPU's mean metrics to every level, over the time in which the level's requests were sent."""
    for level in result.levels:
        start_s, end_s = level.released_s, level.released_s + min(level.send_s, level.duration_s)
        for gpu, info in enumerate(recording.start.gpus):
            samples = recording.gpu_samples(gpu, start_s, end_s)
            readings = {key: readable_values(samples, key) for key in PLOTTED_METRICS}
            means = {key: round(fmean(values), 2) for key, values in readings.items() if values}
            level.gpus.append(GpuUse(gpu=info.label, name=info.name, means=means))
    result.gpu_note = "GPUs: means over the time in which a level sends, read from NVML on this machine."
    if recording.end is None or recording.end.missed:
        missed = "was cut short" if recording.end is None else f"missed {recording.end.missed:,} intervals"
        result.gpu_note += f" The recording {missed}."
