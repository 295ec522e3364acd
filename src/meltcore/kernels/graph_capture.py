"""Captures launches as CUDA graphs that run one after another and share memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from meltcore.kernels.memory_pools import graph_pool

_Outputs = TypeVar("_Outputs")
_Kept = TypeVar("_Kept")


_ROUNDING_BYTES = 2 * 2**20  # of a large allocation, upwards


def hold_memory(num_bytes: int, device: torch.device | None = None) -> None:
    """Make torch take free memory of a GPU into its cache, so that other processes cannot take it.

    `device` None means the current GPU. Less than twice the allocator's rounding is left. Raises torch.OutOfMemoryError
    if the GPU has less free memory.
    """
    if num_bytes >= 2 * _ROUNDING_BYTES:
        torch.empty(num_bytes - _ROUNDING_BYTES, dtype=torch.uint8, device=device or "cuda")


class GraphCapturer:
    """Captures graphs that run one after another on one stream, so they share the memory of one pool."""

    def __init__(self) -> None:
        self._pool = graph_pool()
        stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
        self._stream = stream()  # one for all: cuBLAS keeps a workspace per stream

    def capture(self, step: Callable[[], _Outputs]) -> tuple[torch.cuda.CUDAGraph, _Outputs]:
        """Return a graph of `step`, and the outputs of `step`.

        The step must have run before, since loading a kernel may end a capture. The earlier run must have had the same
        sizes. Triton compiles other kernels for other sizes and alignments. cuBLAS selects kernels by the number of
        tokens, and NCCL by bytes. Neither reports its selection, and CUDA loads each kernel at its first launch.

        Unlike torch.cuda.graph, this method does not wait for the device. It does not free all cached memory either,
        which the next step would have to allocate again.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # "thread_local": CUDA calls of other threads, such as NCCL's, do not end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = step()
            finally:
                graph.capture_end()
        return graph, outputs


class GraphCache(Generic[_Kept]):
    """Keeps the captured graphs of the most recently used shapes."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` shapes."""
        self._limit = limit
        self._capturer = GraphCapturer()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[GraphCapturer], _Kept]) -> _Kept:
        """Return the value for a shape.

        A missing value is made. A full cache then drops the least recently used value.
        """
        if key not in self._kept:
            if len(self._kept) >= self._limit:
                self._kept.popitem(last=False)
            if torch.cuda.is_available() and torch.cuda.get_per_process_memory_fraction() < 1.0:
                # An engine with a budget holds all of it in torch's cache, which a capture cannot take or free.
                held_bytes = torch.cuda.memory_reserved()
                torch.cuda.empty_cache()
                self._kept[key] = make(self._capturer)
                hold_memory(held_bytes - torch.cuda.memory_reserved())
            else:
                self._kept[key] = make(self._capturer)
        self._kept.move_to_end(key)
        return self._kept[key]
