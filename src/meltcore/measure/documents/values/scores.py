"""Computes totals and expectations of a GPU score, and compares a score with references that the package ships.

The expectations judge the sustained window by utilization, temperature and stability. Every JSON file of
`bundled/scores` is a reference, so a new file adds one (scripts/reference_score.py makes it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.files import read_document
from meltcore.measure.documents.runfolder import RESULT_FILE
from meltcore.measure.documents.score import (
    ANY_KERNEL,
    SM_ACTIVE,
    GpuScore,
    ReferenceRatio,
    Score,
    ScoredRun,
    Totals,
    WindowExpectation,
)
from meltcore.measure.documents.values.formatting import format_counts, format_number
from meltcore.measure.documents.verdicts import CheckVerdict

_SUFFIX = ".json"
# What must agree between two scores, and the plural of its name.
COMPARABILITY_FIELDS: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("workload versions", lambda score: score.workload),
    ("precisions", lambda score: score.dtype),
    ("weights", lambda score: score.weights),
    # A folder is known by its own name alone, which is what a hub id ends with.
    ("models", lambda score: score.model.rpartition("/")[2].lower()),
)
MIN_SM_ACTIVE_PERCENT = 90.0
TEMPERATURE_LIMIT_C = 85.0
# The standard deviation of the rates of intervals of 10 s, as a fraction of their mean.
VARIATION_LIMIT = 0.05


@dataclass(frozen=True)
class NamedScore:
    """A result with its name; `is_reference` is True for references that the package ships."""

    name: str
    run: ScoredRun
    is_reference: bool = False

    @property
    def score(self) -> Score:
        """The GPU score of the run, with its workload, model and devices."""
        return self.run.score

    @property
    def hardware(self) -> str:
        """The GPUs as text: "NVIDIA H200", "8 × NVIDIA H200". Different GPU types are joined by a plus sign."""
        return format_counts([device.name for device in self.score.devices], " + ")


def shipped_references(folder: Path | None = None) -> list[NamedScore]:
    """Return every reference of the package, or of `folder`, sorted by name. Raises ConfigError for an invalid file."""
    folder = folder or Path(str(resources.files("meltcore") / "bundled" / "scores"))
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    return [NamedScore(file.stem, read_document(file, ScoredRun), is_reference=True) for file in files]


def read_score(path: str) -> NamedScore:
    """Read a result from its file or run folder. Raises ConfigError if it is not a GPU score."""
    score_path = Path(path)
    if score_path.is_dir() and not (score_path / RESULT_FILE).exists():
        raise ConfigError(
            f"{path} holds no {RESULT_FILE}: a run that ended before it could write one, or no run at all"
        )
    run = read_document(score_path, ScoredRun, name=RESULT_FILE)
    return NamedScore(score_path.resolve().parent.name if score_path.name == RESULT_FILE else score_path.stem, run)


def find_reference(name: str) -> NamedScore:
    """Return the shipped reference `name`, or else the result in the file or run folder `name`.

    Raises ConfigError if neither exists, and for a result without a score.
    """
    shipped = {reference.name: reference for reference in shipped_references()}
    if name in shipped:
        return shipped[name]
    if not Path(name).exists():
        raise ConfigError(f"--reference {name}: no such file, and the shipped references are {', '.join(shipped)}")
    named_score = read_score(name)
    if named_score.score.output_tokens_per_s is None:
        raise ConfigError(f"--reference {name}: this result has no score")
    return named_score


def differences(score: Score, reference: Score) -> list[str]:
    """Return the reasons why two scores are not comparable, or an empty list if they are.

    Scores of different engine versions are comparable, because references are not measured again for each version.
    """
    reasons = [*score.not_comparable, *(f"the reference: {reason}" for reason in reference.not_comparable)]
    for name, fact in COMPARABILITY_FIELDS:
        if fact(score) != fact(reference):
            reasons.append(f"the {name} differ: {fact(score)}, {fact(reference)}")
    return reasons


def ratios(score: Score, chosen_reference: NamedScore | None) -> list[ReferenceRatio]:
    """Return a list with the ratio of a score to `chosen_reference`.

    If `chosen_reference` is None, the list has the ratios to all comparable shipped references.
    """
    if chosen_reference is not None:
        return [_ratio(score, chosen_reference)]
    return [ratio for reference in shipped_references() if not (ratio := _ratio(score, reference)).reasons]


def ratio_line(ratio: ReferenceRatio) -> str:
    """Format a ratio as one line, or the reasons why there is no ratio."""
    rate = format_number(ratio.output_tokens_per_s)
    name = f"{ratio.hardware} ({ratio.name}: {rate} output tok/s, engine {ratio.engine})"
    if ratio.ratio is None:
        return f"No ratio to {name}: {'; '.join(ratio.reasons)}"
    per_gpu = "" if ratio.per_gpu is None else f", {ratio.per_gpu:.2f} × per GPU"
    return f"{ratio.ratio:.2f} × {name}{per_gpu}"


def _ratio(score: Score, reference: NamedScore) -> ReferenceRatio:
    rate, reference_rate = score.output_tokens_per_s, reference.score.output_tokens_per_s
    assert reference_rate, "a reference has a score"
    reasons = differences(score, reference.score)
    if rate is None and not reasons:
        reasons = ["this run has no score"]
    ratio = None if reasons or rate is None else rate / reference_rate
    gpu_counts = len(score.devices), len(reference.score.devices)
    return ReferenceRatio(
        name=reference.name,
        hardware=reference.hardware,
        engine=reference.score.engine,
        output_tokens_per_s=reference_rate,
        ratio=ratio,
        per_gpu=None if ratio is None or gpu_counts[0] == gpu_counts[1] else ratio * gpu_counts[1] / gpu_counts[0],
        reasons=reasons,
    )


def totals(score: Score) -> Totals:
    """Return the sums over all counted windows of all devices."""
    windows = [level for device in score.devices for level in device.levels]
    sustained = [device.sustained for device in score.devices if device.sustained is not None]
    counted_levels = [*windows, *sustained]
    return Totals(
        generations=sum(level.finished for level in counted_levels),
        sustained_generations=sum(level.finished for level in sustained),
        prompt_tokens=sum(level.prompt_tokens for level in counted_levels),
        output_tokens=sum(level.output_tokens for level in counted_levels),
    )


def totals_line(sums: Totals) -> str:
    """Format totals as one sentence."""
    return (
        f"Generations: {sums.generations:,} completed requests ({sums.sustained_generations:,} in the sustained "
        f"window), {sums.prompt_tokens:,} prompt tokens and {sums.output_tokens:,} output tokens in all counted "
        "windows."
    )


def expectations(score: Score) -> list[WindowExpectation]:
    """Return the three expectations with their verdicts, each by the device with the worst value.

    An expectation is NOT MEASURED if a device lacks the value and no device fails. The expectations change neither the
    score nor the health verdict.
    """
    return [_judge_utilization(score.devices), _judge_temperature(score.devices), _judge_stability(score.devices)]


def _judge_utilization(devices: Sequence[GpuScore]) -> WindowExpectation:
    sm_active = [_sustained_mean(device, SM_ACTIVE) for device in devices]
    measured = [value for value in sm_active if value is not None]
    observed_text = f"{min(measured):.1f} %" if measured else "not measured"
    nvml_utilization = [value for device in devices if (value := _sustained_mean(device, ANY_KERNEL)) is not None]
    if nvml_utilization:
        observed_text += f" (NVML GPU utilization {format_number(min(nvml_utilization))} %, which is not judged)"
    return WindowExpectation(
        name="utilization",
        expected=f"above {MIN_SM_ACTIVE_PERCENT:g} %",
        seen=observed_text,
        verdict=_verdict([None if value is None else value > MIN_SM_ACTIVE_PERCENT for value in sm_active]),
        rule="mean SM activity (GPM) of the sustained window",
    )


def _judge_temperature(devices: Sequence[GpuScore]) -> WindowExpectation:
    temperatures_c = [_highest_temperature_c(device) for device in devices]
    measured = [value for value in temperatures_c if value is not None]
    return WindowExpectation(
        name="temperature",
        expected=f"below {TEMPERATURE_LIMIT_C:g} °C",
        seen=f"{max(measured):g} °C" if measured else "not measured",
        verdict=_verdict([None if value is None else value < TEMPERATURE_LIMIT_C for value in temperatures_c]),
        rule="highest GPU temperature of the sustained window",
    )


def _judge_stability(devices: Sequence[GpuScore]) -> WindowExpectation:
    spreads = [device.spread if device.sustained is not None else None for device in devices]
    measured = [spread for spread in spreads if spread is not None and spread.change is not None]
    observed_text = "not measured"
    if measured:
        change = min(spread.change for spread in measured if spread.change is not None)
        observed_text = (
            f"varies by {100 * max(spread.variation for spread in measured):.1f} %, last third {100 * change:+.1f} %"
        )
    elif any(spreads):
        observed_text = "not measured: the sustained window is too short for a trend"
    return WindowExpectation(
        name="throughput",
        expected="stable",
        seen=observed_text,
        verdict=_verdict(
            [
                None
                if spread is None or spread.change is None
                else spread.variation <= VARIATION_LIMIT and not spread.drifts
                for spread in spreads
            ]
        ),
        rule=f"rates of intervals of 10 s in the sustained window: standard deviation at most "
        f"{100 * VARIATION_LIMIT:g} % of the mean, last third at most 3 % below the first",
    )


def _verdict(outcomes: Sequence[bool | None]) -> CheckVerdict:
    return "FAIL" if False in outcomes else "NOT MEASURED" if None in outcomes or not outcomes else "PASS"


def _sustained_mean(device: GpuScore, key: str) -> float | None:
    return None if device.sustained is None else device.mean_utilization(device.sustained, key)


def _highest_temperature_c(device: GpuScore) -> float | None:
    if device.health is None or device.sustained is None:
        return None
    return next((row.maximum for row in device.health.metrics if row.key == "temperature_c"), None)
