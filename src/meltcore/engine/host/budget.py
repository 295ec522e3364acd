"""Keeps an engine process within its budget of GPU memory, and keeps the budget for the process.

The budget works in both directions. Torch's allocator refuses allocations beyond the budget, so no engine takes another
engine's memory. The memory that the plan reserves for steps is allocated at the start and kept. So another process
cannot take it, and the driver always shows the planned size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text
from meltcore.engine.host.device import choose_device, has_budget
from meltcore.kernels.graph_capture import hold_memory
from meltcore.kernels.memory_pools import describe_pools
from meltcore.settings.config import EngineConfig


class BudgetedEngine(Protocol):
    """Defines the part of an engine's interface that a budget needs."""

    @property
    def outside_bytes(self) -> int:
        """The bytes of the engine's budget that torch does not allocate."""


_Engine = TypeVar("_Engine", bound=BudgetedEngine)


def build_within_budget(
    config: EngineConfig, build: Callable[[Callable[[str, float], None]], _Engine]
) -> Callable[[Callable[[str, float], None]], _Engine]:
    """Return a function that calls `build` for an engine with a budget.

    The engine's process neither exceeds the budget nor leaves a part of it to other processes.
    """

    def build_limited(progress: Callable[[str, float], None]) -> _Engine:
        if config.memory_bytes is None:
            return _build(build, progress)
        device = choose_device(config.device, num_ranks=config.tensor_parallel_size)
        limit_memory(config, device)
        engine = _build(build, progress)
        hold_budget(config, device, engine.outside_bytes)
        return engine

    return build_limited


def _build(build: Callable[[Callable[[str, float], None]], _Engine], progress: Callable[[str, float], None]) -> _Engine:
    """Build an engine. If memory is not enough, raises torch.OutOfMemoryError with the contents of each memory pool."""
    try:
        return build(progress)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{error} {describe_pools()}") from error


def limit_memory(config: EngineConfig, device: torch.device) -> None:
    """Limit torch's allocations on a GPU to the budget. Does nothing without a budget.

    Call this before anything is allocated. An allocation beyond the budget raises torch.OutOfMemoryError after torch
    has freed its cache.
    """
    if not has_budget(config, device):
        return
    assert config.memory_bytes is not None
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    # Unlike the other calls, this one refuses a device without a number; None is the current device.
    number = device if device.index is not None else None
    torch.cuda.set_per_process_memory_fraction(min(1.0, config.memory_bytes / total_bytes), number)


def hold_budget(config: EngineConfig, device: torch.device, outside_bytes: int = 0) -> None:
    """Allocate the rest of the budget and keep it in torch's cache, where steps find it.

    `outside_bytes` of the budget are not allocated by torch, for example CUDA graphs. Raises ConfigError if more than
    the budget is allocated already, or if the GPU does not have enough free memory.
    """
    if not has_budget(config, device):
        return
    assert config.memory_bytes is not None
    torch.cuda.synchronize(device)
    missing_bytes = config.memory_bytes - outside_bytes - torch.cuda.memory_reserved(device)
    if missing_bytes < 0:
        torch.cuda.empty_cache()
        missing_bytes = config.memory_bytes - outside_bytes - torch.cuda.memory_reserved(device)
    if missing_bytes < -outside_bytes:
        raise ConfigError(
            f"{config.model} needs {size_text(-missing_bytes)} more than its budget of "
            f"{size_text(config.memory_bytes)}: raise --memory, or lower --max-num-seqs"
        )
    if missing_bytes < 0:  # torch is within the budget, and what it planned for graphs may be more than they took
        print(f"meltcore: {config.model} may exceed its budget by {size_text(-missing_bytes)}", file=sys.stderr)
    try:
        hold_memory(missing_bytes, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no {size_text(missing_bytes)} left of the budget of {config.model}: "
            "another process uses its memory"
        ) from error
