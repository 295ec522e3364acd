"""GPU scores side by side, best first, and why some must not stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.report.documents import read_document
from meltcore.results.runfolder import RESULT_FILE
from meltcore.results.schema import RunResult
from meltcore.results.score import Score, ScoredRun
from meltcore.results.wording import duration


@dataclass(frozen=True)
class Entry:
    """One result and what to call it."""

    name: str
    run: ScoredRun

    @property
    def score(self) -> Score:
        return self.run.score

    @property
    def hardware(self) -> str:
        """ "NVIDIA H200", "8 × NVIDIA H200"; unlike ones with a plus between."""
        names = [device.name for device in self.score.devices]
        counted = dict.fromkeys(names)
        return " + ".join(name if names.count(name) == 1 else f"{names.count(name)} × {name}" for name in counted)


# What must agree between results, and the word for several unlike ones.
_SAME: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("workload versions", lambda score: score.workload),
    ("engine versions", lambda score: score.engine),
    ("precisions", lambda score: score.dtype),
    ("weights", lambda score: score.weights),
    # A folder is known by its own name alone, which is what a hub id ends with.
    ("models", lambda score: score.model.rpartition("/")[2].lower()),
)


def read_entry(path: str) -> Entry:
    """A result by its file or its run folder. Raises ConfigError for one that is none, or no GPU score."""
    place = Path(path)
    if place.is_dir() and not (place / RESULT_FILE).exists():
        raise ConfigError(
            f"{path} holds no {RESULT_FILE}: a run that ended before it could write one, or no run at all"
        )
    document = read_document(place / RESULT_FILE if place.is_dir() else place)
    run = document.content
    if not isinstance(run, ScoredRun):
        what = f"a result of meltcore {run.command}" if isinstance(run, RunResult) else f"a {document.kind or 'card'}"
        raise ConfigError(f"{path} is {what}, not of meltcore bench")
    return Entry(place.resolve().parent.name if place.name == RESULT_FILE else place.stem, run)


def ranked(entries: Sequence[Entry], *, force: bool = False) -> list[Entry]:
    """Best first. Raises ConfigError for results that do not compare, unless `force`."""
    against = reasons_not_to_rank(entries)
    if against and not force:
        raise ConfigError(
            f"these results do not rank: {'; '.join(against)}. --force draws them all the same, and marks the chart"
        )
    with_score = [entry for entry in entries if entry.score.output_tokens_per_s is not None]
    if not with_score:
        raise ConfigError("none of these results has a score")
    return sorted(with_score, key=lambda entry: -(entry.score.output_tokens_per_s or 0.0))


def reasons_not_to_rank(entries: Sequence[Entry]) -> list[str]:
    """Why these numbers say nothing about each other; empty where they do."""
    reasons = [f"{entry.name}: {reason}" for entry in entries for reason in entry.score.not_comparable]
    for words, fact in _SAME:
        found = _named_by(entries, partial(_of_score, fact))
        if len(found) > 1:
            reasons.append(f"the {words} differ: {_listed(found)}")
    return reasons


def _of_score(fact: Callable[[Score], str], entry: Entry) -> str:
    return fact(entry.score)


def _named_by(entries: Sequence[Entry], fact: Callable[[Entry], str]) -> dict[str, list[str]]:
    """The names of the entries that share each value."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        found.setdefault(fact(entry), []).append(entry.name)
    return found


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in found.items())


def cautions(entries: Sequence[Entry]) -> list[str]:
    """What does not forbid the ranking and may still explain a difference."""
    notes = []
    durations = _named_by(entries, lambda entry: duration(entry.score.duration_s))
    if len(durations) > 1:
        listed = _listed(durations)
        notes.append(f"The runs were not equally long, and a short one may be over before a GPU is warm: {listed}.")
    counts = _named_by(entries, lambda entry: str(len(entry.score.devices)))
    if len(counts) > 1:
        notes.append(f"A score is of all GPUs of its run together, and their numbers differ: {_listed(counts)}.")
    for package in ("torch", "triton"):
        versions = {entry.run.fingerprint.versions.get(package, "none") for entry in entries}
        if len(versions) > 1:
            notes.append(f"{package} was not the same: {', '.join(sorted(versions))}.")
    for entry in entries:
        if entry.score.health == "DEGRADED":
            notes.append(f"{entry.name}: a GPU was DEGRADED; its score is not that of a healthy one.")
        if any(device.shared for device in entry.score.devices):
            notes.append(f"{entry.name}: other programs held memory of a GPU, so its score may be too low.")
        if entry.run.verdict == "CLIENT_BOUND":
            notes.append(f"{entry.name}: the measurer was too late, so its score is too low.")
    return notes
