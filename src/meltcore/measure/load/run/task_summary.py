"""Computes the metrics of a level of translation, transcription or synthesis, defined in definitions.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meltcore.measure.documents.schema import LevelResult, Task, TaskLoad
from meltcore.measure.documents.values.percentiles import distribution
from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.run.timeline import MS_PER_S, TokenTimes

_NO_WORK = TaskWork()


def work_of(record: RequestRecord, task: Task) -> float:
    """Return what a complete answer has done: sentences of translation, else seconds of audio."""
    work = record.work or _NO_WORK
    return float(work.sentences) if task == "translation" else work.audio_s


def work_times(records: Sequence[RequestRecord], task: Task) -> TokenTimes:
    """Return the times at which work was done: all that of an answer at its end."""
    return TokenTimes(
        np.array([record.ended_s for record in records], dtype=np.float64),
        np.array([work_of(record, task) for record in records], dtype=np.float64),
    )


def task_load(task: Task, complete_records: Sequence[RequestRecord], duration_s: float) -> TaskLoad:
    """Return the metrics of a level from its complete answers."""
    work = sum(work_of(record, task) for record in complete_records)
    load = TaskLoad(task=task, work=work, work_per_s=_per_second(work, duration_s))
    if task == "translation":
        has_token_counts = all(record.saw_usage for record in complete_records) and bool(complete_records)
        load.source_unit = "token" if has_token_counts else "character"
        load.source = sum(
            record.prompt_tokens if has_token_counts else (record.work or _NO_WORK).source_chars
            for record in complete_records
        )
        load.source_per_s = _per_second(load.source, duration_s)
    if task == "synthesis":
        load.first_audio_ms = distribution([first_audio_ms(record) for record in complete_records])
        load.real_time_factor = distribution(
            [(record.ended_s - record.intended_s) / work_of(record, task) for record in complete_records]
        )
    else:
        load.empty_answers = sum(not record.first_text_s for record in complete_records)
    return load


def first_audio_ms(record: RequestRecord) -> float:
    """Return the time from the intended start of a request for speech to the first sample of its audio."""
    return (record.first_text_s - record.intended_s) * MS_PER_S


def task_notes(level: LevelResult, load: TaskLoad) -> list[str]:
    """Return a note on answers without text. Of transcription there is none: clips may hold no speech."""
    if load.task != "translation" or not load.empty_answers:
        return []
    return [
        f"{load.empty_answers} of {level.succeeded} answers have an empty translation: such a sentence may have "
        f"cost less than one with text"
    ]


def _per_second(work: float, duration_s: float) -> float:
    return work / duration_s if duration_s > 0 else 0.0
