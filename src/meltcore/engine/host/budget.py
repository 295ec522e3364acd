"""Keeps an engine process within its budget of GPU memory, and the memory within the process.

The budget is a promise both ways. Torch's allocator refuses allocations beyond it, so that no engine takes another
engine's memory. And what the plan sets aside for steps is allocated at the start and kept: another process cannot take
it, and the driver shows what was planned from then on.
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
    """The part of an engine's interface that a budget needs."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of its budget that it does not allocate by torch."""


_Engine = TypeVar("_Engine", bound=BudgetedEngine)


def build_within_budget(
    config: EngineConfig, build: Callable[[Callable[[str, float], None]], _Engine]
) -> Callable[[Callable[[str, float], None]], _Engine]:
    """Return `build` for an engine whose process neither exceeds its budget nor gives a part of it away."""

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
    """Build an engine. Raises torch.OutOfMemoryError that says what each pool of memory holds."""
    try:
        return build(progress)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{error} {describe_pools()}") from error


def limit_memory(config: EngineConfig, device: torch.device) -> None:
    """Let torch allocate at most the budget on a GPU. Without one it does nothing.

    Call it before anything is allocated. What exceeds it raises torch.OutOfMemoryError, once the cache has been freed.
    """
    if not has_budget(config, device):
        return
    assert config.memory_bytes is not None
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    # Unlike the other calls, this one refuses a device without a number; None is the current device.
    number = device if device.index is not None else None
    torch.cuda.set_per_process_memory_fraction(min(1.0, config.memory_bytes / total_bytes), number)


def hold_budget(config: EngineConfig, device: torch.device, outside_bytes: int = 0) -> None:
    """Allocate what is left of the budget and keep it in torch's cache, where steps find it.

    `outside_bytes` of the budget are not allocated by torch, such as CUDA graphs. Raises ConfigError when more than the
    budget is allocated already, or when the GPU has no memory left for it.
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
