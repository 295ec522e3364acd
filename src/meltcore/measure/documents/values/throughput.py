"""The throughput of a level: output tokens per second, or the work of its task per second."""

from __future__ import annotations

from meltcore.measure.documents.schema import LevelResult, Steady, TimelinePoint


def throughput(level: LevelResult) -> float:
    """Return the throughput of a whole level."""
    return level.output_tokens_per_s if level.task is None else level.task.work_per_s


def rate_of(part: Steady | TimelinePoint) -> float:
    """Return the throughput of a part of a level."""
    return part.output_tokens_per_s if part.work_per_s is None else part.work_per_s


def steady_throughput(level: LevelResult) -> float:
    """Return the throughput of the steady window, or of the whole level if there is none.

    In the steady window no connection has stopped yet.
    """
    return throughput(level) if level.steady is None else rate_of(level.steady)
