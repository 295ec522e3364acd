"""Reads reference results that the package ships, and compares a score with a reference.

Every JSON file of `bundled/scores` is a reference, so a new file adds one (scripts/reference_score.py makes it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.files import read_document
from meltcore.measure.documents.runfolder import RESULT_FILE
from meltcore.measure.documents.score import ReferenceRatio, Score, ScoredRun
from meltcore.measure.documents.values.formatting import format_counts, format_number

_SUFFIX = ".json"
# What must agree between two scores, and the plural of its name.
COMPARABILITY_FIELDS: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("workload versions", lambda score: score.workload),
    ("precisions", lambda score: score.dtype),
    ("weights", lambda score: score.weights),
    # A folder is known by its own name alone, which is what a hub id ends with.
    ("models", lambda score: score.model.rpartition("/")[2].lower()),
)


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
    """Return every reference of the package, or of `folder`, in the order of their names. Raises ConfigError."""
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
    """Return the shipped reference `name`, or the result in the file or run folder of that path.

    Raises ConfigError if there is neither, and for a result without a score.
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

    The engine versions may differ: a reference keeps the version with which it was measured, and the ratio names it.
    """
    reasons = [*score.not_comparable, *(f"the reference: {reason}" for reason in reference.not_comparable)]
    for name, fact in COMPARABILITY_FIELDS:
        if fact(score) != fact(reference):
            reasons.append(f"the {name} differ: {fact(score)}, {fact(reference)}")
    return reasons


def ratios(score: Score, chosen_reference: NamedScore | None) -> list[ReferenceRatio]:
    """Return the ratio of a score to `chosen_reference`.

    With None, return ratios to all comparable shipped references.
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
