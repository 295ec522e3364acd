"""Decides when engines may start.

An engine that measures the free memory of its GPUs must not start while another engine loads there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

WAVE = 64  # engines of a cluster that load at the same time: they read their checkpoints from the same storage


class _Start(NamedTuple):
    """An engine that loads or waits to load.

    If `measures` is true, it has no memory budget and takes all free memory.
    """

    gpus: frozenset[str]
    measures: bool
    in_cluster: bool

    def excludes(self, other: _Start) -> bool:
        return (self.measures or other.measures) and bool(self.gpus & other.gpus)


class StartGate:
    """Lets engines load in the order of their calls, and concurrently if their memory allows it.

    Engines with `memory_bytes` load concurrently. An engine without this budget takes all free memory of its GPUs, so
    it loads alone on them. An engine on a CPU never waits. Engines of a cluster start in groups of at most WAVE.
    """

    def __init__(self) -> None:
        self._starts: list[_Start] = []
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def loading(self, gpus: frozenset[str], *, has_budget: bool, in_cluster: bool = False) -> AsyncIterator[None]:
        """Wait until an engine may load on these GPUs. The engine loads during the block."""
        start = _Start(gpus, not has_budget, in_cluster)
        self._starts.append(start)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_blocked(start))
            yield
        finally:
            self._starts = [other for other in self._starts if other is not start]  # two may be equal
            async with self._changed:
                self._changed.notify_all()

    def _is_blocked(self, start: _Start) -> bool:
        for position, other in enumerate(self._starts):
            if other is start:
                return False
            if start.excludes(other) or (start.in_cluster and position + 1 >= WAVE):
                return True
        return False
