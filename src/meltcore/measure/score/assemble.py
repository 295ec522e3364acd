"""Assembles the result from the runs of the devices and the monitor's recording.

Health, energy and time series come from the recording, which has the same clock as the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from meltcore.common.gpus.metrics import METRIC_BY_KEY, NOT_APPLICABLE, UTILIZATION_NOTE
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import GpuInfo
from meltcore.common.sizes import size_text
from meltcore.measure.documents.schema import Fingerprint
from meltcore.measure.documents.score import (
    UTILIZATION,
    GpuHealth,
    GpuScore,
    MetricRow,
    Score,
    ScoredRun,
    ScoreLevel,
    TimeSeries,
)
from meltcore.measure.documents.served_model import public_name
from meltcore.measure.documents.values.scores import expectations, totals
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.node.monitor.recording import Recording
from meltcore.measure.node.monitor.summary import GpuSummary, bucket_means, judge_health, readable_values, summarize
from meltcore.measure.score import workload
from meltcore.measure.score.counting import DRIFT_LIMIT, rates_over_time, spread
from meltcore.measure.score.device import DeviceRun
from meltcore.measure.score.plan import ScorePlan
from meltcore.protocol.json_lines import ReadyLine

# Requests replaced later than this leave the engine below its concurrency for a visible time.
LAG_LIMIT_MS = 25.0
_MAX_BUCKETS = 600
TOKENS = "output_tokens_per_s"
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
    ready_message = next(run.ready_message for run in runs if run.ready_message is not None)
    settings = dict(runs[0].device.settings)
    model = public_name(str(settings["model"]))
    devices = [_device_score(run, monitored, began_s) for run in runs]
    failures = [f"{device.label}: {device.failure}" for device in devices if device.failure]
    rates = [device.output_tokens_per_s for device in devices]
    is_complete = not failures and not interrupted
    score = Score(
        workload=plan.name,
        engine=ready_message.version,
        model=str(model),
        dtype=ready_message.dtype,
        weights=ready_message.weight_source,
        duration_s=planned_s,
        output_tokens_per_s=sum(rate for rate in rates if rate is not None)
        if is_complete and plan.grid is None
        else None,
        grid=plan.grid,
        prompt_file=plan.prompt_file,
        devices=devices,
        not_comparable=_comparison_obstacles(ready_message, runs, plan, concurrencies, is_complete),
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
        settings={
            "model": model,
            "weights": ready_message.weight_source,
            "dtype": ready_message.dtype,
            "duration_s": planned_s,
        },
        verdict=verdict,
        reasons=["interrupted"] * interrupted + failures + lag_reasons,
        notes=_notes(devices, ready_message),
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
        load_s=run.startup_s,
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
    """Return time series in whole buckets of at least one second. A partial last bucket would look like a stall."""
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


def gpu_health(
    recording: Recording, gpu: int, run: tuple[float, float], sustained: tuple[float, float] | None
) -> GpuHealth:
    """Return the verdict of the whole run, with the numbers of the sustained window if there is one.

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

    Returns None if the counter was not read at both ends, and for a MIG device, because the counter is of the whole
    GPU.
    """
    info: GpuInfo = recording.start.gpus[gpu]
    samples = [sample for sample in recording.gpu_samples(gpu) if not isinstance(sample.values["energy_j"], str)]
    if info.mig or not samples or samples[0].t_s > start_s or samples[-1].t_s < end_s:
        return None
    times = [sample.t_s for sample in samples]
    start_j, end_j = np.interp([start_s, end_s], times, readable_values(samples, "energy_j"))
    return float(end_j - start_j) / (end_s - start_s)


def utilization(recording: Recording, gpu: int, start_s: float, end_s: float) -> dict[str, float]:
    """Return the means of the metrics UTILIZATION between two times. A metric without any number is left out."""
    samples = recording.gpu_samples(gpu, start_s, end_s)
    return {
        key: float(np.mean(samples_of_key)) for key in UTILIZATION if (samples_of_key := readable_values(samples, key))
    }


def time_series(
    samples: Sequence[Sample], start_s: float, num_buckets: int, bucket_s: float
) -> dict[str, list[float | None]]:
    """Return the mean of each metric of SERIES_KEYS per bucket. A metric without any number is left out."""
    samples = [sample for sample in samples if start_s <= sample.t_s < start_s + num_buckets * bucket_s]
    series = {key: bucket_means(samples, key, start_s, bucket_s, num_buckets) for key in SERIES_KEYS}
    return {key: means for key, means in series.items() if any(mean is not None for mean in means)}


def total_memory_bytes(samples: Sequence[Sample], host_bytes: int) -> int | None:
    """Return a GPU's memory, or the host's memory if the GPU shares it.

    Returns None if NVML fails to report the memory.
    """
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
