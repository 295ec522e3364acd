"""What GPUs did during each level of a load run: a recording cut to the levels, on the clock of the requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meltcore.hardware.metrics import NOT_APPLICABLE, UNKNOWN
from meltcore.hardware.recording import Recording, Sample
from meltcore.results.schema import GpuTimeline, LevelResult

# NVML's utilization is not among them: see metrics.UTILIZATION_NOTE.
SHOWN = ("sm_active_percent", "dram_bandwidth_percent", "power_w", "memory_used_bytes")
MOST_BUCKETS = 300


def attach(levels: Sequence[LevelResult], recording: Recording) -> list[str]:
    """Give each level its GPUs' time lines; what a reader has to know about the recording."""
    notes = []
    for level in levels:
        if level.released_s is None:
            continue
        start_s, end_s = level.released_s, level.released_s + level.duration_s
        level.gpus = [timeline(recording, gpu, start_s, end_s) for gpu in range(len(recording.start.gpus))]
    if recording.end is None:
        notes.append("The GPU sampler did not end in order: its recording stops short.")
    elif recording.end.late:
        notes.append(f"The GPU sampler was late {recording.end.late:,} times; those moments have no reading.")
    return notes


def timeline(recording: Recording, gpu: int, start_s: float, end_s: float) -> GpuTimeline:
    """One GPU between two moments of the monotonic clock."""
    info = recording.start.gpus[gpu]
    samples = [sample for sample in recording.of(gpu, start_s, end_s) if sample.t_s < end_s]
    duration_s = max(end_s - start_s, recording.start.interval_s)
    # Two intervals at least, so that a bucket misses its samples only where the sampler did.
    bucket_s = max(2 * recording.start.interval_s, duration_s / MOST_BUCKETS)
    count = max(1, round(duration_s / bucket_s))
    places = [min(count - 1, int((sample.t_s - start_s) / bucket_s)) for sample in samples]
    values, absent = {}, {}
    for key in SHOWN:
        line = _means(samples, places, key, count)
        if any(value is not None for value in line):
            values[key] = line
        else:
            absent[key] = _why(samples, key)
    return GpuTimeline(gpu=info.label, name=info.name, bucket_s=bucket_s, values=values, absent=absent)


def mean_activity(samples: Sequence[Sample], from_s: float, to_s: float) -> float | None:
    """The mean share of SMs active, 0 to 1, within a time; None where no sample of it could tell.

    A GPU is busy at least that share of the time, so a trace that shows less has lost something.
    """
    taken = [sample.values.get("sm_active_percent", UNKNOWN) for sample in samples if from_s <= sample.t_s <= to_s]
    found = [value for value in taken if not isinstance(value, str)]
    return float(np.mean(found)) / 100 if found else None


def _means(samples: Sequence[Sample], places: Sequence[int], key: str, count: int) -> list[float | None]:
    held: list[list[float]] = [[] for _ in range(count)]
    for place, sample in zip(places, samples, strict=True):
        value = sample.values.get(key, UNKNOWN)
        if not isinstance(value, str):
            held[place].append(value)
    return [round(float(np.mean(values)), 2) if values else None for values in held]


def _why(samples: Sequence[Sample], key: str) -> str:
    words = {sample.values.get(key, UNKNOWN) for sample in samples}
    return NOT_APPLICABLE if words == {NOT_APPLICABLE} else UNKNOWN
