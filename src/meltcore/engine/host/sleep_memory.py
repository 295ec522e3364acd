"""Manages the memory of an engine that can sleep. It is released, and allocated again at the same addresses.

On a GPU weights, caches and the pools of CUDA graphs are in memory pools of their own (`kernels/memory_pools.py`). On a
CPU the weights are in host memory already: `host` releases the caches alone, `disk` both.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch
from torch import nn

from meltcore.common.errors import ConfigError, MeltcoreError, SleepError
from meltcore.common.host_memory import drop_pages, host_available_bytes
from meltcore.common.sizes import size_text
from meltcore.engine.host.sleep import SleepResult
from meltcore.kernels.graph_capture import hold_memory
from meltcore.kernels.memory_pools import MemoryPools
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.config import EngineConfig

Keep = Literal["host", "disk"]

# Returns the weights of an engine and its caches.
Tensors = Callable[[], tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]]


class SleepMemory(Protocol):
    """Releases the memory of an engine and allocates it again. Calls of `sleep` and `wake` alternate."""

    def building(self) -> AbstractContextManager[None]:
        """Return a context in which the engine allocates the memory that it can release."""

    def adopt(self, model: nn.Module) -> None:
        """Move the weights of a model that was not built in a pool into the pool. Their addresses change."""

    def memory_rows(self) -> list[MemoryRow]:
        """Return rows of the memory table for the memory that the first sleep needs."""

    def sleep(self, keep: Keep) -> SleepResult:
        """Release memory, and keep the weights in host memory or drop them.

        Raises SleepError and changes nothing on failure.
        """

    def wake(self, reload: Callable[[], None]) -> int:
        """Allocate memory again.

        If the weights were dropped, call `reload`. Return the bytes of weights that were copied. Raises SleepError if
        memory or the checkpoint is missing, and then releases what it has allocated.
        """


class GpuSleepMemory:
    """Releases and allocates the memory pools of a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Create the pools. Raises ConfigError if the GPU does not support them."""
        try:
            self._pools = MemoryPools(device)
        except MeltcoreError as error:
            raise ConfigError(f"enable_sleep_mode: {error}") from error
        self._device = self._pools.device  # with its number, which some calls of torch need
        self._keep: Keep = "host"
        self._held_bytes = 0  # by torch before the last sleep, of an engine with a budget

    @contextmanager
    def building(self) -> Iterator[None]:
        """See `SleepMemory`."""
        with self._pools.building():
            yield

    def adopt(self, model: nn.Module) -> None:
        """See `SleepMemory`. Tensors of one storage, such as an LSTM's, stay together."""
        owners: dict[int, list[torch.Tensor]] = {}
        for tensor in held_tensors(model):
            owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        # One storage after another, and the old one freed before the next: a budget cannot hold all weights twice.
        for tensors in owners.values():
            content = torch.empty(0, dtype=torch.uint8, device=self._device).set_(tensors[0].untyped_storage())
            with self._pools.allocating("weights"):
                pooled = content.clone().untyped_storage()
            for tensor in tensors:
                view = torch.empty(0, dtype=tensor.dtype, device=self._device)
                tensor.data = view.set_(pooled, tensor.storage_offset(), tensor.shape, tensor.stride())
            del content
        torch.cuda.empty_cache()

    def memory_rows(self) -> list[MemoryRow]:
        """See `SleepMemory`."""
        size = self._pools.memory.size("weights")
        return [MemoryRow("weights asleep", size, "pinned host memory, allocated at the first sleep with keep: host")]

    def sleep(self, keep: Keep) -> SleepResult:
        """See `SleepMemory`. The cache of torch's allocator is released too."""
        held_bytes = torch.cuda.memory_reserved(self._device)
        has_budget = torch.cuda.get_per_process_memory_fraction(self._device) < 1.0
        self._held_bytes = held_bytes if has_budget else 0
        self._pools.memory.sleep(("weights",) if keep == "host" else ())
        self._keep = keep
        torch.cuda.empty_cache()
        resident_bytes = self._pools.other_bytes
        return SleepResult(held_bytes - resident_bytes, resident_bytes)

    def wake(self, reload: Callable[[], None]) -> int:
        """See `SleepMemory`. Caches hold zeros."""
        memory = self._pools.memory
        copied_bytes = memory.wake(("weights",) if self._keep == "host" else ())
        try:
            hold_memory(self._held_bytes - torch.cuda.memory_reserved(self._device), self._device)
            if self._keep == "host":
                return copied_bytes
            reload()
            # Loading frees what torch caches, so that the rest of the budget must be taken again.
            hold_memory(self._held_bytes - torch.cuda.memory_reserved(self._device), self._device)
        except (MeltcoreError, OSError, torch.OutOfMemoryError) as error:
            memory.drop()
            torch.cuda.empty_cache()
            problem = "memory of its budget is missing" if self._keep == "host" else "the weights cannot be read again"
            raise SleepError(f"{problem}: {error}") from error
        return memory.size("weights")


class CpuSleepMemory:
    """Releases the pages of an engine's tensors in host memory. Their addresses stay valid."""

    def __init__(self, tensors: Tensors, available_bytes: Callable[[], int] = host_available_bytes) -> None:
        """Manage the tensors of the engine. `tensors` returns them once the engine is built."""
        self._tensors = tensors
        self._available_bytes = available_bytes
        self._keep: Keep = "host"

    def building(self) -> AbstractContextManager[None]:
        """See `SleepMemory`."""
        return nullcontext()

    def adopt(self, model: nn.Module) -> None:
        """Do nothing, because the engine's tensors show where the memory is."""

    def memory_rows(self) -> list[MemoryRow]:
        """See `SleepMemory`."""
        return []

    def sleep(self, keep: Keep) -> SleepResult:
        """See `SleepMemory`. Weights stay where they are unless they are dropped."""
        self._keep = keep
        freed_bytes = self._drop()
        weights, _ = self._storages()
        return SleepResult(freed_bytes, 0 if keep == "disk" else sum(storage.nbytes() for storage in weights))

    def wake(self, reload: Callable[[], None]) -> int:
        """See `SleepMemory`. Caches hold zeros."""
        weights, caches = self._storages()
        dropped = [*caches, *(weights if self._keep == "disk" else ())]
        needed_bytes, available_bytes = sum(storage.nbytes() for storage in dropped), self._available_bytes()
        if needed_bytes > available_bytes:
            raise SleepError(
                f"waking takes {size_text(needed_bytes)} of host memory, and {size_text(available_bytes)} "
                "are available; let another model sleep, then wake this one again"
            )
        if self._keep == "host":
            return 0
        try:
            reload()
        except (MeltcoreError, OSError) as error:
            self._drop()
            raise SleepError(f"the weights cannot be read again: {error}") from error
        return sum(storage.nbytes() for storage in weights)

    def _storages(self) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
        weights, caches = self._tensors()
        return _storages(weights), _storages(caches)

    def _drop(self) -> int:
        """Release the pages of the tensors that sleep. Return the number of released bytes.

        Only whole pages are released. Bytes of the caches in other pages become zeros.
        """
        weights, caches = self._storages()
        for storage in caches:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            for partial_page in (content[: mmap.PAGESIZE], content[-mmap.PAGESIZE :]):
                partial_page.zero_()
        dropped = [*caches, *(weights if self._keep == "disk" else ())]
        return sum(drop_pages(storage.data_ptr(), storage.nbytes()) for storage in dropped)


def make_sleep_memory(config: EngineConfig, device: torch.device, tensors: Tensors) -> SleepMemory | None:
    """Return the memory of an engine that can sleep. Returns None without enable_sleep_mode.

    `tensors` returns the engine's tensors when the engine goes to sleep. Raises ConfigError if a sleep mode is not
    supported on the device.
    """
    if not config.enable_sleep_mode:
        return None
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"enable_sleep_mode: an engine of one GPU can sleep; got --tensor-parallel-size "
            f"{config.tensor_parallel_size}"
        )
    return GpuSleepMemory(device) if device.type == "cuda" else CpuSleepMemory(tensors)


def require_memory(memory: SleepMemory | None) -> SleepMemory:
    """Return `memory`. Raises SleepError if the engine was started without a sleep mode."""
    if memory is None:
        raise SleepError("the engine was started without enable_sleep_mode")
    return memory


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors. A storage that several tensors share occurs once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in storages}.values())
