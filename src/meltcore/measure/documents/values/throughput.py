"""The throughput of a level in the unit of its task: output tokens, sentences, or seconds of audio, per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meltcore.measure.documents.schema import LevelResult, Steady, Task, TimelinePoint
from meltcore.measure.documents.values.formatting import format_load, format_number


@dataclass(frozen=True)
class ThroughputUnit:
    """The words for the throughput of a task: a title, the unit, and the unit where a table is narrow."""

    title: str
    unit: str
    short_unit: str


_UNITS: dict[Task | None, ThroughputUnit] = {
    None: ThroughputUnit("Output tokens per second", "output tok/s", "tok/s"),
    "translation": ThroughputUnit("Sentences per second", "sentences/s", "sent/s"),
    "transcription": ThroughputUnit("RTFx: audio seconds transcribed per second", "RTFx", "RTFx"),
    "synthesis": ThroughputUnit("Audio seconds per second", "audio s/s", "audio s/s"),
}


def task_of(level: LevelResult) -> Task | None:
    """Return the task of a level; None for generation."""
    return None if level.task is None else level.task.task


def by_task(levels: Sequence[LevelResult]) -> dict[Task | None, list[LevelResult]]:
    """Return the levels of each task, in the order of the first of each."""
    groups: dict[Task | None, list[LevelResult]] = {}
    for level in levels:
        groups.setdefault(task_of(level), []).append(level)
    return groups


def throughput_unit(level: LevelResult) -> ThroughputUnit:
    """Return the words for the throughput of a level."""
    return _UNITS[task_of(level)]


def throughput(level: LevelResult) -> float:
    """Return the throughput of a whole level."""
    return level.output_tokens_per_s if level.task is None else level.task.work_per_s


def rate_of(part: Steady | TimelinePoint) -> float:
    """Return the throughput of a part of a level."""
    return part.output_tokens_per_s if part.work_per_s is None else part.work_per_s


def throughput_text(level: LevelResult) -> str:
    """Format the throughput and load of a level: "4,200 output tok/s, concurrency 400"."""
    return f"{format_number(throughput(level))} {throughput_unit(level).unit}, {format_load(level)}"
