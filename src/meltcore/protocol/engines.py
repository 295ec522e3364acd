"""Joins the messages of all engines for the server. Tags distinguish them, so that one decoder reads all."""

from functools import cache, reduce
from operator import or_
from typing import Any

from meltcore.common.tasks import load, tasks
from meltcore.protocol.batch import BatchStats, TaskRequest
from meltcore.protocol.generation import AddRequest, EngineStats
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs, EngineReady

ToEngine = AddRequest | TaskRequest | CommonToEngine
FromEngine = EngineOutputs[Any, Any] | EngineReady | CommonFromEngine


@cache
def from_engine() -> Any:
    """Return the union of the message types that engines of all tasks send. A decoder takes this type."""
    return reduce(or_, (load(task.messages).FromEngine for task in tasks().values()))


def shared_stats(stats: EngineStats | BatchStats) -> EngineStats:
    """Return statistics of an engine as EngineStats. For a batch engine the numbers of pages and tokens are 0."""
    if isinstance(stats, EngineStats):
        return stats
    return EngineStats(
        running=stats.running, waiting=stats.waiting, steps_total=stats.steps_total, step_s_total=stats.step_s_total
    )
