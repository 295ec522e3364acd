"""The page of a GPU score: the number, what it is a number of, and whether to believe it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meltcore.report.score_charts import Curve, against_concurrency, time_lines
from meltcore.report.template import fill
from meltcore.results import wording
from meltcore.results.definitions import SCORE_DEFINITIONS
from meltcore.results.percentiles import SAMPLES_NEEDED, TOO_SMALL
from meltcore.results.schema import Distribution
from meltcore.results.score import GpuScore, MetricRow, Score, ScoredRun, ScoreLevel

HEALTH_STYLE = {"HEALTHY": "good", "DEGRADED": "bad", "UNKNOWN": "unsure"}
_COLOURS = 4
# What stands above a device's time lines, and what is said of clock reasons that are no fault.
_MEANWHILE = {"power_w": "", "temperature_c": "", "memory_temperature_c": "memory ", "sm_clock_mhz": "SM clock "}
_REASONS = {
    "SW_POWER_CAP": "clocks held by the power limit (SW_POWER_CAP, as designed)",
    "GPU_IDLE": "idle (GPU_IDLE)",
}
_GIB = 2**30


@dataclass(frozen=True)
class Chart:
    title: str
    picture: Markup
    legend: list[Curve]


def render_score(result: ScoredRun) -> str:
    """One HTML page: style and drawings inside, no script, nothing fetched."""
    score = result.score
    return fill(
        "score.html",
        result=result,
        score=score,
        started=wording.moment(result.started),
        names=_names(score.devices),
        badge=_badge(result),
        tiles=tiles(score),
        charts=charts(score.devices),
        time_lines=time_lines,
        metric_cells=_metric_cells,
        rate_range=_rate_range,
        meanwhile=meanwhile,
        percentile=_percentile,
        health_style=HEALTH_STYLE,
        words=SCORE_DEFINITIONS,
        samples_needed=SAMPLES_NEEDED,
        fingerprint=wording.fingerprint_rows(result.fingerprint),
        settings=_settings(score),
    )


def _badge(result: ScoredRun) -> tuple[str, str]:
    """(text, style): what went wrong with the run, else the GPUs' health."""
    if result.verdict != "OK":
        return result.verdict, "bad"
    if all(device.health is None for device in result.score.devices):
        return "NOT COMPARABLE", "unsure"
    return result.score.health, HEALTH_STYLE[result.score.health]


def _names(devices: Sequence[GpuScore]) -> str:
    counts = {device.name: sum(other.name == device.name for other in devices) for device in devices}
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())


def tiles(score: Score) -> list[tuple[str, str, str]]:
    """(label, figure, small print) of the sustained run; latencies of the slowest device."""
    runs = [device.sustained for device in score.devices if device.sustained is not None]
    if not runs:
        return []
    slowest = min(runs, key=lambda run: run.output_tokens_per_s)
    at_once = " and ".join(sorted({f"{run.concurrency:,}" for run in runs}))
    whose = "" if len(runs) == 1 else ", of the slowest"
    queue = ", queueing" if any(_queues(device) for device in score.devices) else ""
    found = [
        ("Requests per second", wording.number(sum(run.requests_per_s for run in runs)), f"{at_once} in flight"),
        ("Total tokens/s", wording.number(sum(run.total_tokens_per_s for run in runs)), "prompt and output"),
        (
            "TTFT p50",
            _milliseconds(slowest.ttft_ms, "p50"),
            f"p99 {_milliseconds(slowest.ttft_ms, 'p99')}{whose}{queue}",
        ),
        ("ITL p50", _milliseconds(slowest.itl_ms, "p50"), f"p99 {_milliseconds(slowest.itl_ms, 'p99')}{whose}"),
    ]
    powers = [run.power_w for run in runs if run.power_w is not None]
    if score.tokens_per_joule is not None and powers:
        found.append(("Tokens per joule", wording.number(score.tokens_per_joule), f"at {sum(powers):,.0f} W"))
    spreads = [device.spread for device in score.devices if device.spread is not None]
    if spreads:
        worst = max(spreads, key=lambda spread: spread.variation)
        change = "too short for a trend" if worst.change is None else f"last third {100 * worst.change:+.1f} %"
        found.append(("Varies over time by", f"{100 * worst.variation:.1f} %", change))
    return found


def _queues(device: GpuScore) -> bool:
    """Whether so many more were in flight than the engine runs at once that a request mostly waits for a place."""
    at_once = device.engine_settings.get("max_num_seqs")
    return device.sustained is not None and isinstance(at_once, int) and device.sustained.concurrency > 2 * at_once


def meanwhile(device: GpuScore) -> str:
    """What the GPU did in the sustained window, in a line; empty where nothing was read."""
    if device.health is None or device.sustained is None:
        return ""
    rows = {row.key: row for row in device.health.metrics}
    parts = [
        f"{name}{_reading(row.mean)} {row.unit} (at most {_reading(row.maximum)})"
        for key, name in _MEANWHILE.items()
        if (row := rows.get(key)) is not None and row.mean is not None
    ]
    parts += [
        f"{_REASONS.get(reason, f'clocks held by {reason}')} in {wording.percent(share)} of the samples"
        for reason, share in device.health.clock_reasons.items()
    ]
    return f"In the sustained window: {', '.join(parts)}." if parts else ""


def charts(devices: Sequence[GpuScore]) -> list[Chart]:
    measured = [device for device in devices if len(device.levels) > 1]
    if not measured:
        return []
    rates = [
        Curve(device.label, place % _COLOURS + 1, _points(device, lambda level: level.output_tokens_per_s))
        for place, device in enumerate(measured)
    ]
    first = measured[0]
    whose = "" if len(devices) == 1 else f", {first.label}"
    wanted = [
        ("Output tokens per second", "tok/s", False, rates),
        (f"Time to first token{whose}", "ms", True, _latencies(first, "ttft_ms")),
        (f"Inter-token latency{whose}", "ms", True, _latencies(first, "itl_ms")),
        (
            f"Tokens per joule{whose}",
            "tok/J",
            False,
            [Curve("tokens per joule", 3, _points(first, lambda level: level.tokens_per_joule))],
        ),
    ]
    found = []
    for title, unit, log_y, curves in wanted:
        drawn = against_concurrency(curves, unit=unit, log_y=log_y, label=f"{title} against concurrency")
        if drawn is not None:
            found.append(Chart(title, drawn, [curve for curve in curves if curve.points] if len(curves) > 1 else []))
    return found


def _points(device: GpuScore, value: Callable[[ScoreLevel], float | None]) -> list[tuple[int, float]]:
    return [(level.concurrency, found) for level in device.levels if (found := value(level)) is not None]


def _latencies(device: GpuScore, field: str) -> list[Curve]:
    return [
        Curve("p50", 1, _points(device, lambda level: getattr(level, field).p50)),
        Curve("p99", 2, _points(device, lambda level: getattr(level, field).p99)),
    ]


def _milliseconds(distribution: Distribution, name: str) -> str:
    """A percentile with its unit; seconds from ten on, where milliseconds would not fit their tile."""
    found = wording.percentile(distribution, name)
    if found in (TOO_SMALL, wording.NOT_MEASURED):
        return found
    value_ms = getattr(distribution, name)
    return f"{found} ms" if value_ms < 10_000 else f"{value_ms / 1000:.1f} s"


def _percentile(distribution: Distribution, name: str) -> Markup | str:
    """As wording.percentile, with "n too small" set back so that the numbers stand out."""
    found = wording.percentile(distribution, name)
    return Markup('<span class="faint">n&lt;</span>') if found == TOO_SMALL else found


def _metric_cells(row: MetricRow) -> tuple[str, str, str]:
    """(mean, maximum, unit) of one metric; a counter's growth stands as the mean with a plus."""
    scale, unit = (1 / _GIB, "GiB") if row.unit == "bytes" else (1.0, row.unit)
    if row.absent is not None:
        return row.absent, "", ""
    if row.increase is not None:
        return f"+{wording.number(row.increase * scale)}", "", unit
    mean, maximum = (None if value is None else value * scale for value in (row.mean, row.maximum))
    return _reading(mean), _reading(maximum), unit


def _reading(value: float | None) -> str:
    """As wording.number, and a whole number without decimals: 16 lanes."""
    return f"{value:,.0f}" if value is not None and value == int(value) else wording.number(value)


def _rate_range(device: GpuScore) -> str:
    if device.spread is None:
        return ""
    rates = device.spread.rates
    return (
        f"{len(rates)} pieces of {device.spread.bucket_s:.0f} s: {wording.number(min(rates))} to "
        f"{wording.number(max(rates))} output tokens/s"
    )


def _settings(score: Score) -> list[tuple[str, str]]:
    first = score.devices[0]
    rows = [
        ("Workload", score.workload),
        ("Model", f"{score.model}, {score.weights} weights, {score.dtype}"),
        ("Engine", f"meltcore {score.engine}"),
        ("Asked for", wording.duration(score.duration_s)),
    ]
    return rows + [(name, wording.setting(value)) for name, value in first.engine_settings.items()]
