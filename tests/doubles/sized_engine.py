"""Makes engines of a plan by their sizes alone."""

from __future__ import annotations

from meltcore.engine.memory.memory_needs import PlannedEngine
from meltcore.fleet.plan.context_memory import ASSUMED


def sized_engine(
    model: str,
    replica: int,
    size_bytes: int,
    gpus: int,
    only: tuple[int, ...] = (),
    sleeps: bool = False,
    resident_bytes: int = ASSUMED.process_bytes(),
) -> PlannedEngine:
    """Return an engine that takes `size_bytes`, with `resident_bytes`, on each of its GPUs, or on the host."""
    needs = PlannedEngine("generation", size_bytes - resident_bytes, [], None, 1, "test")
    return needs._replace(
        model=model, replica=replica, gpus=gpus, only=only, sleeps=sleeps, resident_bytes=resident_bytes
    )
