"""Computes health, energy and time series from the monitor's recording, on the clock of the measurements."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from meltcore.common.gpus.metrics import METRIC_BY_KEY, NOT_APPLICABLE, UTILIZATION_NOTE
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuInfo
from meltcore.measure.documents.score import UTILIZATION, GpuHealth, MetricRow
from meltcore.measure.node.monitor.health import judge_health
from meltcore.measure.node.monitor.recording import Recording
from meltcore.measure.node.monitor.summary import GpuSummary, bucket_means, readable_values, summarize

SERIES_KEYS = (
    "power_w",
    "temperature_c",
    "memory_temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_percent",
    "dram_bandwidth_percent",
    "nvml_utilization_percent",
)


def gpu_health(
    recording: Recording, gpu: int, run: tuple[float, float], sustained: tuple[float, float] | None
) -> GpuHealth:
    """Return the verdict of the whole run with the numbers of the sustained window (without one, of the run).

    Clocks are judged in the sustained window only, because levels of different load have different clocks.
    """
    run_summary = summarize(recording.gpu_samples(gpu, *run))
    window_summary = summarize(recording.gpu_samples(gpu, *sustained)) if sustained else run_summary
    judged_summary = msgspec.structs.replace(
        run_summary, loaded_clock_mhz=window_summary.loaded_clock_mhz if sustained else None
    )
    verdict = judge_health(judged_summary, recording.start.interval_s)
    reasons = list(verdict.reasons)
    if recording.end is None:
        reasons.append("the sampler did not exit normally: the recording is incomplete")
    is_unknown = recording.end is None and verdict.verdict == "HEALTHY"
    num_known_samples = window_summary.samples - window_summary.clock_reasons_unknown
    return GpuHealth(
        verdict="UNKNOWN" if is_unknown else verdict.verdict,
        reasons=reasons,
        metrics=_rows(window_summary),
        clock_reasons={reason: count / num_known_samples for reason, count in window_summary.clock_reasons.items()},
        samples=run_summary.samples,
        xids=None if run_summary.xids_unknown else run_summary.xids,
    )


def power_w(recording: Recording, gpu: int, start_s: float, end_s: float) -> float | None:
    """Return the mean power between two times by the energy counter, which also covers the time between samples.

    None where the counter was not read at both ends, and for a MIG device: the counter counts the whole GPU.
    """
    info: GpuInfo = recording.start.gpus[gpu]
    samples = [sample for sample in recording.gpu_samples(gpu) if not isinstance(sample.values["energy_j"], str)]
    if info.mig or not samples or samples[0].t_s > start_s or samples[-1].t_s < end_s:
        return None
    times = [sample.t_s for sample in samples]
    start_j, end_j = np.interp([start_s, end_s], times, readable_values(samples, "energy_j"))
    return float(end_j - start_j) / (end_s - start_s)


def utilization(recording: Recording, gpu: int, start_s: float, end_s: float) -> dict[str, float]:
    """Return the means of UTILIZATION between two times; a metric without any number is left out."""
    samples = recording.gpu_samples(gpu, start_s, end_s)
    return {
        key: float(np.mean(samples_of_key)) for key in UTILIZATION if (samples_of_key := readable_values(samples, key))
    }


def time_series(
    samples: Sequence[Sample], start_s: float, num_buckets: int, bucket_s: float
) -> dict[str, list[float | None]]:
    """Return the mean of each metric of SERIES per bucket; metrics without any number are left out."""
    samples = [sample for sample in samples if start_s <= sample.t_s < start_s + num_buckets * bucket_s]
    series = {key: bucket_means(samples, key, start_s, bucket_s, num_buckets) for key in SERIES_KEYS}
    return {key: means for key, means in series.items() if any(mean is not None for mean in means)}


def total_memory_bytes(samples: Sequence[Sample], host_bytes: int) -> int | None:
    """Return a GPU's memory, or the host's where both share one, or None if NVML fails to report it."""
    readings = readable_values(samples, "memory_total_bytes")
    if readings:
        return int(readings[0])
    is_shared = any(sample.values["memory_total_bytes"] == NOT_APPLICABLE for sample in samples)
    return host_bytes if is_shared else None


def memory_in_use_bytes(samples: Sequence[Sample]) -> int | None:
    """Return the memory in use at the first sample that reports it, or None if no sample does."""
    readings = readable_values(samples, "memory_used_bytes")
    return int(readings[0]) if readings else None


def _rows(summary: GpuSummary) -> list[MetricRow]:
    return [
        MetricRow(
            key=row.key,
            name=METRIC_BY_KEY[row.key].name,
            unit=METRIC_BY_KEY[row.key].unit,
            mean=row.mean,
            maximum=row.maximum,
            increase=row.increase,
            absent=row.absent,
            note=UTILIZATION_NOTE if row.key == "nvml_utilization_percent" else "",
        )
        for row in summary.metrics.values()
    ]
