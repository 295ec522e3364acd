"""Formats the output of `meltcore monitor`: one line per second and GPU, and a table at the end."""

from collections.abc import Sequence
from statistics import fmean

from meltcore.common.gpus.metrics import (
    GPU_IDLE,
    METRIC_BY_KEY,
    NOT_APPLICABLE,
    UNKNOWN,
    UTILIZATION_NOTE,
    GpuMetric,
)
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuInfo
from meltcore.common.gpus.xid import describe
from meltcore.common.sizes import GIB
from meltcore.measure.node.monitor.summary import GpuSummary, HealthReport, MetricSummary, readable_values

_UNREADABLE_MARK = "?"
# Contents of a line: key, text before the number, text after it.
_COLUMNS = (
    ("temperature_c", "", " °C"),
    ("memory_temperature_c", "memory ", " °C"),
    ("power_w", "", " W"),
    ("sm_clock_mhz", "SM ", " MHz"),
    ("memory_clock_mhz", "memory ", " MHz"),
    ("memory_used_bytes", "", " GiB"),
    ("sm_active_percent", "SM active ", " %"),
    ("sm_occupancy_percent", "occupancy ", " %"),
    ("tensor_percent", "tensor ", " %"),
    ("dram_bandwidth_percent", "DRAM ", " %"),
    ("nvml_utilization_percent", "util ", " %"),
)


def gpu_line(gpu: GpuInfo, samples: Sequence[Sample], start_s: float) -> str:
    """Return one GPU's line: means of `samples` (at least one), clock reasons, and new errors in capitals.

    The time of the line counts from `start_s` (monotonic). "?" stands for a value that should be readable. Metrics that
    the GPU type lacks are left out.
    """
    parts = [f"{samples[-1].t_s - start_s:6.1f} s  {gpu.label}"]
    readable_samples = [sample for sample in samples if not sample.lost and not sample.hung]
    for key, before, after in _COLUMNS:
        value = _mean(readable_samples, key)
        if value is not None:
            parts.append(f"{before}{value}{after}")
    if any(sample.clock_reasons == UNKNOWN for sample in readable_samples):
        parts.append("clock reasons ?")
    clock_reasons = [sample.clock_reasons for sample in readable_samples if isinstance(sample.clock_reasons, list)]
    parts += sorted({reason for reasons in clock_reasons for reason in reasons if reason != GPU_IDLE})
    parts += [describe(xid) for sample in samples if isinstance(sample.xids, list) for xid in sample.xids]
    for key in ("ecc_uncorrected", "ecc_corrected"):
        counts = readable_values(readable_samples, key)
        if counts and counts[-1] > counts[0]:
            parts.append(f"{METRIC_BY_KEY[key].name}: {counts[-1] - counts[0]:.0f} NEW")
    if samples[-1].lost:
        parts.append("LOST")
    if samples[-1].hung:
        parts.append(f"NO ANSWER of the driver for {samples[-1].read_s:.1f} s")
    return "  ".join(parts)


def _mean(samples: Sequence[Sample], key: str) -> str | None:
    if all(sample.values[key] == NOT_APPLICABLE for sample in samples):
        return None
    readings = readable_values(samples, key)
    if not readings:
        return _UNREADABLE_MARK
    return f"{fmean(readings) / GIB:.1f}" if key.endswith("_bytes") else f"{fmean(readings):.0f}"


def summary_lines(gpu: GpuInfo, summary: GpuSummary, health: HealthReport) -> list[str]:
    """Return the final table: one row per metric, the clock reasons, the verdict and its reasons."""
    num_readable = summary.samples - summary.clock_reasons_unknown
    reasons = ", ".join(
        f"{reason} {100 * count / num_readable:.0f} %" for reason, count in summary.clock_reasons.items()
    )
    return [
        "",
        f"{gpu.label}: {gpu.name}, {summary.samples} samples in {summary.duration_s:.1f} s",
        f"  {'':<28}{'average':>14}{'maximum':>14}",
        *(_row(METRIC_BY_KEY[metric.key], metric) for metric in summary.metrics.values()),
        f"  {'clock reasons':<28}{reasons or ('none' if num_readable else UNKNOWN)}",
        f"  ({UTILIZATION_NOTE})",
        f"  {health.verdict}" + "".join(f"\n    {reason}" for reason in health.reasons),
    ]


def _row(metric: GpuMetric, summary: MetricSummary) -> str:
    name = f"  {metric.name:<28}"
    if summary.absent is not None:
        return f"{name}{summary.absent:>14}"
    if summary.increase is not None:
        return f"{name}{f'+{_number(summary.increase)} {metric.unit}'.rstrip():>28}"
    unit, scale = ("GiB", 1 / GIB) if metric.unit == "bytes" else (metric.unit, 1.0)
    levels = (summary.mean, summary.maximum)
    return name + "".join(f"{f'{_number(level * scale)} {unit}'.rstrip():>14}" for level in levels if level is not None)


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"
