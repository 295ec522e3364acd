"""What the GPU did meanwhile: from the monitor's recording to health, energy and time lines, on the same clock."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from meltcore.hardware.health import judge_summary
from meltcore.hardware.metrics import BY_KEY, NOT_APPLICABLE, UTILIZATION_NOTE
from meltcore.hardware.recording import GpuInfo, Recording, Sample
from meltcore.hardware.summary import GpuSummary, numbers, summarise
from meltcore.results.score import Health, MetricRow

LINES = (
    "power_w",
    "temperature_c",
    "memory_temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_percent",
    "dram_bandwidth_percent",
)


def health(recording: Recording, gpu: int, run: tuple[float, float], sustained: tuple[float, float] | None) -> Health:
    """The verdict of the whole run and the numbers of the sustained window (of the run, where there is none).

    Clocks are judged in the sustained window alone: levels of unlike load may well have unlike clocks.
    """
    whole = summarise(recording.of(gpu, *run))
    window = summarise(recording.of(gpu, *sustained)) if sustained else whole
    judged = msgspec.structs.replace(whole, loaded_clock_mhz=window.loaded_clock_mhz if sustained else None)
    verdict = judge_summary(judged, recording.start.interval_s)
    reasons = list(verdict.reasons)
    if recording.end is None:
        reasons.append("the sampler did not end in order: the recording stops short")
    unsure = recording.end is None and verdict.verdict == "HEALTHY"
    seen = window.samples - window.clock_reasons_unknown
    return Health(
        verdict="UNKNOWN" if unsure else verdict.verdict,
        reasons=reasons,
        metrics=_rows(window),
        clock_reasons={reason: count / seen for reason, count in window.clock_reasons.items()},
        samples=whole.samples,
        xids=None if whole.xids_unknown else whole.xids,
    )


def power_w(recording: Recording, gpu: int, start_s: float, end_s: float) -> float | None:
    """Mean power between two moments by the energy counter, which misses nothing between two samples.

    None where it is not to be read at both ends, and for a MIG slice: the counter is its whole board's.
    """
    info: GpuInfo = recording.start.gpus[gpu]
    samples = [sample for sample in recording.of(gpu) if not isinstance(sample.values["energy_j"], str)]
    if info.mig or not samples or samples[0].t_s > start_s or samples[-1].t_s < end_s:
        return None
    times = [sample.t_s for sample in samples]
    start_j, end_j = np.interp([start_s, end_s], times, numbers(samples, "energy_j"))
    return float(end_j - start_j) / (end_s - start_s)


def lines(samples: Sequence[Sample], start_s: float, buckets: int, bucket_s: float) -> dict[str, list[float | None]]:
    """The mean of each metric of LINES in each bucket; a metric that never gave a number is left out."""
    places = [int((sample.t_s - start_s) // bucket_s) for sample in samples]
    found: dict[str, list[float | None]] = {}
    for key in LINES:
        held: list[list[float]] = [[] for _ in range(buckets)]
        for place, sample in zip(places, samples, strict=True):
            value = sample.values[key]
            if 0 <= place < buckets and not isinstance(value, str):
                held[place].append(value)
        if any(held):
            found[key] = [round(float(np.mean(values)), 2) if values else None for values in held]
    return found


def total_memory_bytes(samples: Sequence[Sample], host_bytes: int) -> int | None:
    """A GPU's memory: the host's where the two share one; None where NVML should say and does not."""
    found = numbers(samples, "memory_total_bytes")
    if found:
        return int(found[0])
    shared = any(sample.values["memory_total_bytes"] == NOT_APPLICABLE for sample in samples)
    return host_bytes if shared else None


def memory_in_use_bytes(samples: Sequence[Sample]) -> int | None:
    """Of the first sample that says; None where none does."""
    found = numbers(samples, "memory_used_bytes")
    return int(found[0]) if found else None


def _rows(summary: GpuSummary) -> list[MetricRow]:
    return [
        MetricRow(
            key=row.key,
            name=BY_KEY[row.key].name,
            unit=BY_KEY[row.key].unit,
            mean=row.mean,
            maximum=row.maximum,
            increase=row.increase,
            absent=row.absent,
            note=UTILIZATION_NOTE if row.key == "nvml_utilization_percent" else "",
        )
        for row in summary.metrics.values()
    ]
