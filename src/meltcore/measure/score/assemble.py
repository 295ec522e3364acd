"""Assembles the result from the runs of the devices and the monitor's recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meltcore.common.sizes import size_text
from meltcore.measure.documents.schema import Fingerprint
from meltcore.measure.documents.score import GpuScore, Score, ScoredRun, ScoreLevel, TimeSeries
from meltcore.measure.documents.served_model import public_name
from meltcore.measure.documents.values.scores import expectations, totals
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.node.monitor.recording import Recording
from meltcore.measure.score import workload
from meltcore.measure.score.counting import DRIFT_LIMIT, rates_over_time, spread
from meltcore.measure.score.device import DeviceRun
from meltcore.measure.score.plan import ScorePlan
from meltcore.measure.score.telemetry import gpu_health, power_w, time_series, utilization
from meltcore.protocol.json_lines import ReadyLine

# Requests replaced later than this leave the engine below its concurrency for a visible time.
LAG_LIMIT_MS = 25.0
_MAX_BUCKETS = 600
TOKENS = "output_tokens_per_s"


@dataclass(frozen=True)
class MonitoredRun:
    """The monitor's recording, and the (start, end) of the ladder and the sustained run."""

    recording: Recording
    span_s: tuple[float, float]


def assemble(
    runs: Sequence[DeviceRun],
    monitored: MonitoredRun | None,
    plan: ScorePlan,
    *,
    began_s: float,
    concurrencies: Sequence[int],
    planned_s: float,
    started: str,
    duration_s: float,
    fingerprint: Fingerprint,
    interrupted: bool,
) -> ScoredRun:
    """Return the result of all devices. At least one engine must have become ready."""
    ready = next(run.ready for run in runs if run.ready is not None)
    settings = dict(runs[0].device.settings)
    model = public_name(str(settings["model"]))
    devices = [_device_score(run, monitored, began_s) for run in runs]
    failures = [f"{device.label}: {device.failure}" for device in devices if device.failure]
    rates = [device.output_tokens_per_s for device in devices]
    is_complete = not failures and not interrupted
    score = Score(
        workload=plan.name,
        engine=ready.version,
        model=str(model),
        dtype=ready.dtype,
        weights=ready.weight_source,
        duration_s=planned_s,
        output_tokens_per_s=sum(rate for rate in rates if rate is not None)
        if is_complete and plan.grid is None
        else None,
        grid=plan.grid,
        prompt_file=plan.prompt_file,
        devices=devices,
        not_comparable=_comparison_obstacles(ready, runs, plan, concurrencies, is_complete),
    )
    if plan.grid is None:
        score.totals, score.expectations = totals(score), expectations(score)
    lag_reasons = [
        f"{device.label}: steps were read {device.measurer_lag_p99_ms:.0f} ms late at p99, so ended requests were "
        f"replaced late: other work kept the machine busy"
        for device in devices
        if device.measurer_lag_p99_ms is not None and device.measurer_lag_p99_ms > LAG_LIMIT_MS
    ]
    verdict: Verdict = "PARTIAL" if interrupted else "FAILED" if failures else "CLIENT_BOUND" if lag_reasons else "OK"
    return ScoredRun(
        command="bench",
        status="complete" if is_complete else "partial",
        started=started,
        duration_s=duration_s,
        fingerprint=fingerprint,
        settings={"model": model, "weights": ready.weight_source, "dtype": ready.dtype, "duration_s": planned_s},
        verdict=verdict,
        reasons=["interrupted"] * interrupted + failures + lag_reasons,
        notes=_notes(devices, ready),
        score=score,
    )


def _device_score(run: DeviceRun, monitored: MonitoredRun | None, began_s: float) -> GpuScore:
    device = run.device
    times, tokens = run.steps()
    score = GpuScore(
        name=device.name,
        label=device.label,
        uuid=device.uuid,
        memory_bytes=device.memory_bytes,
        memory_in_use_bytes=device.memory_in_use_bytes,
        engine_settings={name: _setting_value(value) for name, value in device.settings.items() if name != "model"},
        levels=run.levels,
        sustained=run.sustained,
        sweep=run.sweep,
        load_s=run.load_s,
        measurer_lag_p99_ms=run.lag_p99_ms,
        failure=run.failure,
    )
    window = None if run.sustained is None else _window(run.sustained, began_s)
    if window is not None:
        score.spread = spread(times, tokens, *window)
    if len(times):
        score.lines = _time_series(run, monitored, began_s, times, tokens)
    if monitored is not None and device.monitor_index is not None:
        score.health = gpu_health(monitored.recording, device.monitor_index, monitored.span_s, window)
        for level in [*run.levels, *([run.sustained] if run.sustained else []), *run.sweep]:
            _add_telemetry(level, monitored.recording, device.monitor_index, began_s)
    return score


def _window(level: ScoreLevel, began_s: float) -> tuple[float, float]:
    return began_s + level.start_s + level.ramp_s, began_s + level.end_s


def _add_telemetry(level: ScoreLevel, recording: Recording, gpu_index: int, began_s: float) -> None:
    window = _window(level, began_s)
    level.utilization = utilization(recording, gpu_index, *window)
    level.power_w = power_w(recording, gpu_index, *window)
    if level.power_w:
        level.tokens_per_joule = level.output_tokens_per_s / level.power_w


def _time_series(
    run: DeviceRun, monitored: MonitoredRun | None, began_s: float, times: np.ndarray, tokens: np.ndarray
) -> TimeSeries:
    """Return time series in whole buckets of at least one second; a partial last bucket would look like a stall."""
    duration_s = float(times[-1]) - began_s
    bucket_s = max(1.0, float(np.ceil(duration_s / _MAX_BUCKETS)))
    end_s = began_s + bucket_s * max(1, int(duration_s / bucket_s))
    rates = rates_over_time(times, tokens, began_s, end_s, bucket_s)
    values: dict[str, list[float | None]] = {TOKENS: [round(rate, 1) for rate in rates]}
    if monitored is not None and run.device.monitor_index is not None:
        samples = monitored.recording.gpu_samples(run.device.monitor_index, began_s)
        values |= time_series(samples, began_s, len(rates), bucket_s)
    return TimeSeries(bucket_s=bucket_s, values=values)


def _comparison_obstacles(
    ready: ReadyLine, runs: Sequence[DeviceRun], plan: ScorePlan, concurrencies: Sequence[int], is_complete: bool
) -> list[str]:
    """Return the reasons why this result is not comparable with others."""
    reasons = []
    if any(run.device.monitor_index is None for run in runs):
        reasons.append("measured on a CPU: the score is one of GPUs")
    if ready.num_parameters != workload.NUM_PARAMETERS and plan.prompt_file is None:
        reasons.append(f"the model has {ready.num_parameters:,} parameters; Qwen3-0.6B has {workload.NUM_PARAMETERS:,}")
    if ready.dtype != plan.precision.dtype:
        reasons.append(f"computed in {ready.dtype}, not {plan.precision.dtype}")
    if plan.grid is not None:
        reasons.append("a sweep has no score and ranks with nothing")
    elif tuple(concurrencies) != workload.LEVELS:
        reasons.append(f"the ladder was {', '.join(f'{level:,}' for level in concurrencies)}")
    if not is_complete:
        reasons.append("the run is incomplete")
    return reasons


def _notes(devices: Sequence[GpuScore], ready: ReadyLine) -> list[str]:
    notes = []
    if ready.weight_source == "dummy":
        notes.append("Random weights: the speed equals that of real ones, the answers mean nothing.")
    for device in devices:
        if device.is_shared and device.memory_in_use_bytes is not None:
            notes.append(
                f"{device.label}: {size_text(device.memory_in_use_bytes)} of its memory were in use before the run "
                f"by other programs, so the score may be too low."
            )
        if device.spread is not None and device.spread.drifts and device.spread.change is not None:
            notes.append(
                f"{device.label}: the rate fell by {-100 * device.spread.change:.1f} % from the first to the last "
                f"third of the sustained window (limit {100 * DRIFT_LIMIT:.0f} %): its speed is not sustained."
            )
        cut_levels = [f"{level.concurrency:,}" for level in device.levels if level.ramp_cut]
        if cut_levels:
            notes.append(
                f"{device.label}: at concurrency {', '.join(cut_levels)} half of the time passed before the ramp was "
                "over; "
                f"a longer --duration leaves the ramp out completely."
            )
    return notes


def _setting_value(value: object) -> bool | int | str:
    return value if isinstance(value, int) else ", ".join(value) if isinstance(value, list) else str(value)
