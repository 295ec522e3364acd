"""Pools of torch's caching allocator over memory that can be unmapped, one for each kind of content.

Code that allocates weights or caches marks the allocation with `memory_pool`. Only an engine that can sleep has pools.
Without one, torch allocates as usual.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch.cuda import _POOL_HANDLE

from meltcore.common.errors import MeltcoreError
from meltcore.common.sizes import size_text
from meltcore.kernels.virtual_memory import CudaMemoryDriver, VirtualMemory

# weights: may be copied to the host; kv_cache: zeros after waking; graphs: what kernels of CUDA graphs write first.
MemoryTag = Literal["weights", "kv_cache", "graphs"]
TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "graphs")

# void *(ssize_t size, int device, cudaStream_t stream) and void (void *, ssize_t size, int device, cudaStream_t stream)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

_current: ContextVar[MemoryPools | None] = ContextVar("memory_pools", default=None)
_tags_of_pools: dict[tuple[int, int], MemoryTag] = {}  # of this process, by their ids
_DEFAULT_POOL = (0, 0)


class MemoryPools:
    """The pools of one engine on one GPU. They live as long as the process."""

    def __init__(self, device: torch.device) -> None:
        """Create empty pools. Raises MeltcoreError when the GPU cannot unmap memory."""
        # torch selects a pool by the number of the device, which "cuda" alone does not name.
        self.device = device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self.memory = VirtualMemory(CudaMemoryDriver(device))
        self._pools = {tag: self._make_pool(tag) for tag in TAGS}
        _tags_of_pools.update({pool.id: tag for tag, pool in self._pools.items()})

    @contextmanager
    def building(self) -> Iterator[None]:
        """Make `memory_pool` and graph captures of this thread use these pools, also graphs captured later."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def allocating(self, tag: MemoryTag) -> Iterator[None]:
        """Return a context in which this thread allocates CUDA tensors in the pool of `tag`."""
        # While a pool is in use, torch keeps what it caches elsewhere, even when the process has spent its budget.
        torch.cuda.empty_cache()
        # The callbacks below run in the middle of an allocation: no collection may free tensors there.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.use_mem_pool(self._pools[tag], self.device):
                yield
        finally:
            if was_enabled:
                gc.enable()

    def pool_id(self, tag: MemoryTag) -> _POOL_HANDLE:
        """Return a pool's id, as captures of CUDA graphs take it."""
        return _POOL_HANDLE(self._pools[tag].id)

    @property
    def other_bytes(self) -> int:
        """Bytes of the device that torch's allocator holds outside of these pools."""
        return torch.cuda.memory_reserved(self.device) - self.memory.size()

    def _make_pool(self, tag: MemoryTag) -> torch.cuda.MemPool:
        def allocate(size: int, _device: int, _stream: int | None) -> int | None:
            try:
                return self.memory.allocate(tag, size)
            except MeltcoreError:
                return None  # torch frees what it caches, tries again, then raises OutOfMemoryError

        def free(address: int, _size: int, _device: int, _stream: int | None) -> None:
            self.memory.free(address)

        callbacks = _ALLOCATE(allocate), _FREE(free)
        allocate_address, free_address = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in callbacks)
        allocator = torch._C._cuda_customAllocator(allocate_address, free_address)
        pool = torch.cuda.MemPool(allocator)
        # The interpreter's teardown would end them in any order, while torch still calls them.
        for immortal in (*callbacks, allocator, pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(immortal))
        return pool


@contextmanager
def memory_pool(tag: MemoryTag) -> Iterator[None]:
    """Allocate CUDA tensors in the pool of `tag` while an engine that can sleep is being built, else as usual."""
    pools = _current.get()
    if pools is None:
        yield
        return
    with pools.allocating(tag):
        yield


def free_cached_memory(device: torch.device) -> None:
    """Return the memory that torch caches to the GPU, for pools and for other processes. Does nothing on a CPU.

    Call this after large temporaries, before the next tensor that stays. Such a tensor would become part of a cached
    segment, and a segment can only be returned as a whole.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_pools() -> str:
    """Return in one line what each pool of torch's allocator holds in this process.

    Pools of CUDA graphs are counted together, also in an engine that cannot sleep.
    """
    sizes: dict[str, list[int]] = {tag: [0, 0] for tag in ("default", *TAGS)}
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        pool = tuple(segment["segment_pool_id"])
        tag = "default" if pool == _DEFAULT_POOL else _tags_of_pools.get(pool, "graphs")
        sizes[tag][0] += segment["total_size"]
        sizes[tag][1] += segment["allocated_size"]
    pools = (f"{tag} {size_text(reserved)} ({size_text(allocated)})" for tag, (reserved, allocated) in sizes.items())
    return f"Reserved by torch (allocated) in each pool: {', '.join(pools)}"


def graph_pool() -> _POOL_HANDLE:
    """Return the id of a pool for CUDA graphs.

    While an engine that can sleep is being built, this is the engine's pool. Otherwise it is a new pool.
    """
    pools = _current.get()
    return torch.cuda.graph_pool_handle() if pools is None else pools.pool_id("graphs")
