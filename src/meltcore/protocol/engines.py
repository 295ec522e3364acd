"""Joins the messages of all engines for the server. Tags distinguish them, so that one decoder reads all."""

from functools import cache, reduce
from operator import or_
from typing import Any

from meltcore.common.tasks import load, tasks
from meltcore.protocol.batch import BatchStats, TaskRequest
from meltcore.protocol.generation import AddRequest, EngineStats
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs, EngineReady

ToEngine = AddRequest | TaskRequest | CommonToEngine
_SHARED_FIELDS = [name for name in BatchStats.__struct_fields__ if name in EngineStats.__struct_fields__]
FromEngine = EngineOutputs[Any, Any] | EngineReady | CommonFromEngine


@cache
def from_engine() -> Any:
    """Return the union of the message types that engines of all tasks send. A decoder takes this type."""
    return reduce(or_, (load(task.messages).FromEngine for task in tasks().values()))


def shared_stats(stats: EngineStats | BatchStats) -> EngineStats:
    """Return statistics of an engine as EngineStats. For a batch engine the numbers of pages and tokens are 0."""
    if isinstance(stats, EngineStats):
        return stats
    shared = {name: getattr(stats, name) for name in _SHARED_FIELDS}
    return EngineStats(**dict[str, Any](shared))
