"""Defines what the server knows of the messages of all engines. Tags tell them apart, so one decoder reads them all."""

from functools import cache, reduce
from operator import or_
from typing import Any

from meltcore.common.tasks import load, tasks
from meltcore.protocol.batch import BatchStats, TaskRequest
from meltcore.protocol.generation import AddRequest, EngineStats
from meltcore.protocol.shell import EngineOutputs, EngineReady, ShellFromEngine, ShellToEngine

ToEngine = AddRequest | TaskRequest | ShellToEngine
FromEngine = EngineOutputs[Any, Any] | EngineReady | ShellFromEngine


@cache
def from_engine() -> Any:
    """Return the union of the messages that an engine of any task sends, for a decoder."""
    return reduce(or_, (load(task.messages).FromEngine for task in tasks().values()))


def shared_stats(stats: EngineStats | BatchStats) -> EngineStats:
    """Return statistics as the server's shared memory holds them. Pages and tokens of a batch engine are 0."""
    if isinstance(stats, EngineStats):
        return stats
    return EngineStats(
        running=stats.running, waiting=stats.waiting, steps_total=stats.steps_total, step_s_total=stats.step_s_total
    )
