"""Cuts a recording into the levels of a load run, on the clock of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from meltcore.common.gpus.metrics import NOT_APPLICABLE, UNKNOWN
from meltcore.common.gpus.reader import Sample
from meltcore.measure.documents.schema import FleetLoad, GpuTimeline, GpuUse, LevelResult
from meltcore.measure.node.monitor.recording import Recording
from meltcore.measure.node.monitor.summary import bucket_means, readable_values

# NVML's utilization is left out: see metrics.UTILIZATION_NOTE.
PLOTTED_METRICS = ("sm_active_percent", "dram_bandwidth_percent", "power_w", "memory_used_bytes")
MAX_BUCKETS = 300


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
    """Set the means of each level of a load on a fleet, over the time in which its requests were sent."""
    for level in result.levels:
        start_s, end_s = level.released_s, level.released_s + min(level.send_s, level.duration_s)
        for gpu, info in enumerate(recording.start.gpus):
            samples = recording.gpu_samples(gpu, start_s, end_s)
            readings = {key: readable_values(samples, key) for key in PLOTTED_METRICS}
            means = {key: round(fmean(found), 2) for key, found in readings.items() if found}
            level.gpus.append(GpuUse(gpu=info.label, name=info.name, means=means))
    result.gpu_note = "GPUs: means over the time in which a level sends, read from NVML on this machine."
    if recording.end is None or recording.end.missed:
        missed = "was cut short" if recording.end is None else f"missed {recording.end.missed:,} intervals"
        result.gpu_note += f" The recording {missed}."
