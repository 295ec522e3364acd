"""Sweeps over concurrent sequences and token budgets, and marks the best point and the knee.

The first start uses the server's default settings; every gain is relative to it. The knee is the smallest setting
within 2 % of the best output rate, among settings that meet the SLO. Larger settings cost memory and latency without
more output.
"""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.tuning import MIN_SLO_ATTAINMENT, Tuning, TuningPoint, default_point, gain
from meltcore.measure.documents.values.formatting import format_change, format_number
from meltcore.measure.experiments.tune.config import BatchingOptions
from meltcore.measure.experiments.tune.run import Tuner, make_tuning
from meltcore.measure.load.config import LoadConfig

KNEE_RATIO = 0.98  # of the best output rate
_BUDGETS = ("max_num_seqs", "max_num_batched_tokens")


def tune_batching(tuner: Tuner, options: BatchingOptions, load: LoadConfig) -> Tuning:
    """Measure every setting, and return the result with the best point and the knee."""
    points = sweep(tuner, options, load)
    best, knee = best_and_knee(points)
    finding = batching_finding(points, best, knee)
    return make_tuning("batching", tuner, load, points, finding, best_and_knee=(best, knee))


def sweep(tuner: Tuner, options: BatchingOptions, load: LoadConfig) -> list[TuningPoint]:
    """Measure the default settings, then every pair of settings, ordered by token budget and then by sequences."""
    settings: list[dict[str, int | str]] = [
        {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        for tokens in options.max_num_batched_tokens
        for seqs in options.max_num_seqs
    ] or [{"max_num_seqs": seqs} for seqs in options.max_num_seqs]
    return [tuner.measure(point_settings, load) for point_settings in ({}, *settings)]


def best_and_knee(points: Sequence[TuningPoint]) -> tuple[int | None, int | None]:
    """Return the indices of the fastest point and of the knee, among settings that ran and met the SLO."""
    rates = {index: point.output_tokens_per_s or 0.0 for index, point in enumerate(points) if _qualifies(point)}
    if not rates:
        return None, None
    best_index = max(rates, key=lambda index: rates[index])
    near_best = [index for index, rate in rates.items() if rate >= KNEE_RATIO * rates[best_index]]
    return best_index, min(
        near_best,
        key=lambda index: [int(points[index].settings[name]) for name in _BUDGETS if name in points[index].settings],
    )


def batching_finding(points: Sequence[TuningPoint], best_index: int | None, knee: int | None) -> str:
    """Return the result in one sentence, and the gain over the default settings in another."""
    if best_index is None or knee is None:
        tuned_points = [point for point in points if point.settings]
        num_ran = sum(point.ok for point in tuned_points)
        return f"No setting meets the SLO: {num_ran} of {len(tuned_points)} ran." if num_ran else "No setting ran."
    best_point, knee_point = points[best_index], points[knee]
    if best_index == knee:
        answer = (
            f"{describe(best_point.settings)} is the fastest, with no smaller setting near it: "
            f"{format_number(best_point.output_tokens_per_s)} output tok/s."
        )
    else:
        ratio = (knee_point.output_tokens_per_s or 0.0) / (best_point.output_tokens_per_s or 1.0)
        answer = (
            f"The knee is {describe(knee_point.settings)}: {format_number(knee_point.output_tokens_per_s)} output "
            "tok/s, "
            f"{100 * ratio:.1f} % of the best ({describe(best_point.settings)}: "
            f"{format_number(best_point.output_tokens_per_s)})."
        )
    default = default_point(points)
    if default is None:
        return answer
    gains = [format_change(gain(points[index], default)) for index in dict.fromkeys((knee, best_index))]
    text = gains[0] if len(gains) == 1 else f"{gains[0]} at the knee, {gains[1]} at the best"
    return f"{answer} Against the default settings ({format_number(default.output_tokens_per_s)} output tok/s): {text}."


def describe(settings: dict[str, int | str]) -> str:
    """Write {"max_num_seqs": 32, "max_num_batched_tokens": 2048} as "32 sequences, 2,048 tokens per step"."""
    units = {
        "max_num_seqs": "sequences",
        "max_num_batched_tokens": "tokens per step",
        "max_model_len": "tokens of context",
    }
    return ", ".join(
        f"{value:,} {units[name]}" if isinstance(value, int) else str(value) for name, value in settings.items()
    )


def _qualifies(point: TuningPoint) -> bool:
    # The default settings, an empty dict, are what gains are counted from and no candidate.
    meets_slo = point.slo_attainment is None or point.slo_attainment >= MIN_SLO_ATTAINMENT
    return bool(point.settings) and point.ok and meets_slo
