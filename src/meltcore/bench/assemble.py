"""From the devices' runs and the monitor's recording to the result that is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meltcore.bench import workload
from meltcore.bench.device import DeviceRun
from meltcore.bench.lines import Ready
from meltcore.bench.numbers import DRIFT_LIMIT, rates_over_time, spread
from meltcore.bench.telemetry import health, lines, power_w
from meltcore.bench.workload import Precision
from meltcore.hardware.recording import Recording
from meltcore.results.schema import Fingerprint, Verdict
from meltcore.results.score import GpuScore, Lines, Score, ScoredRun, ScoreLevel
from meltcore.results.wording import gibibytes

# A place that is filled so late stands empty for a share of the time that shows (as in load/selfcheck.py).
LAG_LIMIT_MS = 25.0
_MOST_BUCKETS = 600
TOKENS = "output_tokens_per_s"


@dataclass(frozen=True)
class Watched:
    """The monitor's recording, and when the ladder began and all was over."""

    recording: Recording
    run: tuple[float, float]


def assemble(
    runs: Sequence[DeviceRun],
    watched: Watched | None,
    precision: Precision,
    *,
    began_s: float,
    levels: Sequence[int],
    planned_s: float,
    started: str,
    duration_s: float,
    fingerprint: Fingerprint,
    interrupted: bool,
) -> ScoredRun:
    """The whole result. At least one engine was ready."""
    ready = next(run.ready for run in runs if run.ready is not None)
    settings = dict(runs[0].device.settings)
    model = (
        Path(str(settings["model"])).name if str(settings["model"]).startswith(("/", "~", ".")) else settings["model"]
    )
    devices = [_device(run, watched, began_s) for run in runs]
    failures = [f"{device.label}: {device.failure}" for device in devices if device.failure]
    rates = [device.output_tokens_per_s for device in devices]
    complete = not failures and not interrupted
    score = Score(
        workload=precision.name,
        engine=ready.version,
        model=str(model),
        dtype=ready.dtype,
        weights=ready.weights,
        duration_s=planned_s,
        output_tokens_per_s=sum(rate for rate in rates if rate is not None) if complete else None,
        devices=devices,
        not_comparable=_not_comparable(ready, runs, precision, levels, complete),
    )
    late = [
        f"{device.label}: the measurer read steps {device.measurer_lag_p99_ms:.0f} ms late at p99, so ended requests "
        f"were replaced late: the machine was too busy with other things"
        for device in devices
        if device.measurer_lag_p99_ms is not None and device.measurer_lag_p99_ms > LAG_LIMIT_MS
    ]
    verdict: Verdict = "PARTIAL" if interrupted else "FAILED" if failures else "CLIENT_BOUND" if late else "OK"
    return ScoredRun(
        command="bench",
        status="complete" if complete else "partial",
        started=started,
        duration_s=duration_s,
        fingerprint=fingerprint,
        settings={"model": model, "weights": ready.weights, "dtype": ready.dtype, "duration_s": planned_s},
        verdict=verdict,
        reasons=["interrupted"] * interrupted + failures + late,
        notes=_notes(devices, ready),
        score=score,
    )


def _device(run: DeviceRun, watched: Watched | None, began_s: float) -> GpuScore:
    device = run.device
    times, tokens = run.steps()
    score = GpuScore(
        name=device.name,
        label=device.label,
        uuid=device.uuid,
        memory_bytes=device.memory_bytes,
        memory_in_use_bytes=device.memory_in_use_bytes,
        engine_settings={name: _plain(value) for name, value in device.settings.items() if name != "model"},
        levels=run.levels,
        sustained=run.sustained,
        load_s=run.load_s,
        measurer_lag_p99_ms=run.lag_p99_ms,
        failure=run.failure,
    )
    window = None if run.sustained is None else _window(run.sustained, began_s)
    if window is not None:
        score.spread = spread(times, tokens, *window)
    if len(times):
        score.lines = _lines(run, watched, began_s, times, tokens)
    if watched is not None and device.position is not None:
        score.health = health(watched.recording, device.position, watched.run, window)
        for level in [*run.levels, *([run.sustained] if run.sustained else [])]:
            _add_power(level, watched.recording, device.position, began_s)
    return score


def _window(level: ScoreLevel, began_s: float) -> tuple[float, float]:
    return began_s + level.start_s + level.ramp_s, began_s + level.end_s


def _add_power(level: ScoreLevel, recording: Recording, position: int, began_s: float) -> None:
    level.power_w = power_w(recording, position, *_window(level, began_s))
    if level.power_w:
        level.tokens_per_joule = level.output_tokens_per_s / level.power_w


def _lines(run: DeviceRun, watched: Watched | None, began_s: float, times: np.ndarray, tokens: np.ndarray) -> Lines:
    """Whole buckets of a second, or longer ones where there would be too many: half a one would look like a stall."""
    took_s = float(times[-1]) - began_s
    bucket_s = max(1.0, float(np.ceil(took_s / _MOST_BUCKETS)))
    end_s = began_s + bucket_s * max(1, int(took_s / bucket_s))
    rates = rates_over_time(times, tokens, began_s, end_s, bucket_s)
    values: dict[str, list[float | None]] = {TOKENS: [round(rate, 1) for rate in rates]}
    if watched is not None and run.device.position is not None:
        samples = watched.recording.of(run.device.position, began_s)
        values |= lines(samples, began_s, len(rates), bucket_s)
    return Lines(bucket_s=bucket_s, values=values)


def _not_comparable(
    ready: Ready, runs: Sequence[DeviceRun], precision: Precision, levels: Sequence[int], complete: bool
) -> list[str]:
    """Why this result ranks with nothing."""
    reasons = []
    if any(run.device.position is None for run in runs):
        reasons.append("measured on a CPU: the score is one of GPUs")
    if ready.parameters != workload.PARAMETERS:
        reasons.append(f"the model has {ready.parameters:,} parameters; Qwen3-0.6B has {workload.PARAMETERS:,}")
    if ready.dtype != precision.dtype:
        reasons.append(f"computed in {ready.dtype}, not {precision.dtype}")
    if tuple(levels) != workload.LEVELS:
        reasons.append(f"the ladder was {', '.join(f'{level:,}' for level in levels)}")
    if not complete:
        reasons.append("the run did not get to its end")
    return reasons


def _notes(devices: Sequence[GpuScore], ready: Ready) -> list[str]:
    notes = []
    if ready.weights == "dummy":
        notes.append("Random weights: the speed is that of the real ones, the answers mean nothing.")
    for device in devices:
        if device.shared and device.memory_in_use_bytes is not None:
            notes.append(
                f"{device.label}: {gibibytes(device.memory_in_use_bytes)} of its memory were in use before the run: "
                f"other programs shared it, and the score may be too low."
            )
        if device.spread is not None and device.spread.drifts and device.spread.change is not None:
            notes.append(
                f"{device.label}: the rate fell by {-100 * device.spread.change:.1f} % from the first to the last "
                f"third of the sustained window (limit {100 * DRIFT_LIMIT:.0f} %): it does not hold its speed."
            )
        cut = [f"{level.concurrency:,}" for level in device.levels if level.ramp_cut]
        if cut:
            notes.append(
                f"{device.label}: at {', '.join(cut)} at once half of the time was over before as many requests had "
                f"ended as run at once; a longer --duration leaves the ramp out altogether."
            )
    return notes


def _plain(value: object) -> int | str:
    return value if isinstance(value, int) else ", ".join(value) if isinstance(value, list) else str(value)
