"""What `meltcore monitor` prints: a line a second and GPU, and a table at the end."""

from collections.abc import Sequence
from statistics import fmean

from meltcore.hardware.health import Health
from meltcore.hardware.metrics import BY_KEY, NOT_APPLICABLE, UNKNOWN, UTILIZATION_NOTE, Metric
from meltcore.hardware.recording import GpuInfo, Sample
from meltcore.hardware.summary import GpuSummary, MetricSummary, numbers
from meltcore.hardware.throttle import GPU_IDLE
from meltcore.hardware.xid import describe

_GIB = 2**30
_UNREADABLE = "?"
# What a line holds: key, words before and after the number.
_LINE = (
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


def line(gpu: GpuInfo, samples: Sequence[Sample], since_s: float) -> str:
    """One GPU's last second: means of `samples` (at least one), what slowed it, and any new error in capitals.

    `since_s` is the monotonic time that the line's own counts from. "?" is a value that should be readable and is not;
    what the product does not have is left out.
    """
    parts = [f"{samples[-1].t_s - since_s:6.1f} s  {gpu.label}"]
    alive = [sample for sample in samples if not sample.lost]
    for key, before, after in _LINE:
        shown = _mean(alive, key)
        if shown is not None:
            parts.append(f"{before}{shown}{after}")
    if any(sample.clock_reasons == UNKNOWN for sample in alive):
        parts.append("clock reasons ?")
    found = [sample.clock_reasons for sample in alive if isinstance(sample.clock_reasons, list)]
    parts += sorted({reason for reasons in found for reason in reasons if reason != GPU_IDLE})
    parts += [describe(xid) for sample in samples if isinstance(sample.xids, list) for xid in sample.xids]
    for key in ("ecc_uncorrected", "ecc_corrected"):
        counts = numbers(alive, key)
        if counts and counts[-1] > counts[0]:
            parts.append(f"{BY_KEY[key].name}: {counts[-1] - counts[0]:.0f} NEW")
    if samples[-1].lost:
        parts.append("LOST")
    return "  ".join(parts)


def _mean(samples: Sequence[Sample], key: str) -> str | None:
    if all(sample.values[key] == NOT_APPLICABLE for sample in samples):
        return None
    found = numbers(samples, key)
    if not found:
        return _UNREADABLE
    return f"{fmean(found) / _GIB:.1f}" if key.endswith("_bytes") else f"{fmean(found):.0f}"


def summary_lines(gpu: GpuInfo, summary: GpuSummary, health: Health) -> list[str]:
    """The table at the end: one row a metric, the clock reasons, the verdict and why."""
    lines = [
        "",
        f"{gpu.label}: {gpu.name}, {summary.samples} samples in {summary.duration_s:.1f} s",
        f"  {'':<28}{'average':>14}{'maximum':>14}",
    ]
    lines += [_row(BY_KEY[metric.key], metric) for metric in summary.metrics.values()]
    reasons = ", ".join(f"{reason} {_share(count, summary)}" for reason, count in summary.clock_reasons.items())
    lines.append(f"  {'clock reasons':<28}{reasons or ('none' if _seen(summary) else UNKNOWN)}")
    lines.append(f"  ({UTILIZATION_NOTE})")
    lines.append(f"  {health.verdict}" + "".join(f"\n    {reason}" for reason in health.reasons))
    return lines


def _row(metric: Metric, summary: MetricSummary) -> str:
    name = f"  {metric.name:<28}"
    if summary.absent is not None:
        return f"{name}{summary.absent:>14}"
    if summary.increase is not None:
        return f"{name}{f'+{_number(summary.increase)} {metric.unit}'.rstrip():>28}"
    unit, scale = ("GiB", 1 / _GIB) if metric.unit == "bytes" else (metric.unit, 1.0)
    levels = (summary.mean, summary.maximum)
    return name + "".join(f"{f'{_number(level * scale)} {unit}'.rstrip():>14}" for level in levels if level is not None)


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def _share(count: int, summary: GpuSummary) -> str:
    return f"{100 * count / _seen(summary):.0f} %"


def _seen(summary: GpuSummary) -> int:
    return summary.samples - summary.clock_reasons_unknown
