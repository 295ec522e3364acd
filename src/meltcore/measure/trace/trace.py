"""Defines a trace: GPU activities, the host calls that launch activities, time spans, and the groups of kernels.

Times are whole nanoseconds, so sums are exact. `read.py` makes traces from files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from meltcore.measure.documents.gaps import COLLECTIVES, COPIES

Span = tuple[int, int]  # (start, end)
ActivityType = Literal["kernel", "collective", "copy"]
OTHER = "other kernels"

# A kernel belongs to the first group that has a part of its lower-case name; names such as topkGatingSoftmax or
# _best_chunk_kernel match several. From ours, vLLM's, cuBLAS, CUTLASS, FlashAttention and torch.compile.
_NAME_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (COPIES, ("memcpy", "memset")),
    (COLLECTIVES, ("nccl", "all_reduce", "allreduce", "all_gather", "reduce_scatter")),
    ("MoE", ("moe", "expert", "route", "gating")),
    (
        "sampling",
        ("sampl", "argmax", "_maximum_", "draw", "penal", "best_chunk", "topk", "top_k", "_largest_", "_pack_",
         "logprob"),
    ),
    # Our decode kernels of attention and of Gated DeltaNet have the same names, hence one group.
    (
        "attention and recurrent state",
        ("attention", "attn", "flash", "fmha", "paged", "_decode_", "_prefill_", "delta", "gdn", "mamba", "conv1d",
         "convolve", "_chunk_", "_scan_"),
    ),
    ("quantization", ("quant",)),
    (
        "GEMM",
        ("gemm", "gemv", "cublas", "cutlass", "nvjet", "xmma", "splitk", "matmul", "linear", "_split_k_"),
    ),
    ("norm and activation", ("norm", "rsqrt", "silu", "swiglu", "gelu", "act_and_mul", "_gate_", "rotary", "rope")),
    ("KV cache and embedding", ("cache", "store_kv", "embedding", "gather", "indexselect")),
)  # fmt: skip


@dataclass(frozen=True)
class Activity:
    """Work of a GPU. `correlation` identifies the call that launched it, `graph` its CUDA graph."""

    name: str
    type: ActivityType
    device: int
    stream: int
    start: int
    end: int
    correlation: int | None = None
    graph: int | None = None


@dataclass(frozen=True)
class HostEvent:
    """Work of a host thread. If `is_call`, it is a call into CUDA with its `correlation`."""

    name: str
    thread: str
    start: int
    end: int
    is_call: bool = False
    correlation: int | None = None

    @property
    def span(self) -> Span:
        """The time span of the activity: (start, end)."""
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """Activities and host events, each sorted by start."""

    activities: list[Activity]
    host: list[HostEvent]


@cache
def kernel_group(name: str) -> str:
    """Return the group of a kernel, collective or copy by its name."""
    lowercase_name = name.lower()
    return next((group for group, parts in _NAME_PARTS if any(part in lowercase_name for part in parts)), OTHER)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return sorted, disjoint spans. Overlapping and touching spans are joined, and empty spans are dropped."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of `window` that `spans` do not cover. `spans` must be sorted and disjoint."""
    uncovered: list[Span] = []
    time = window[0]
    for start, end in clip_spans(spans, window):
        if start > time:
            uncovered.append((time, start))
        time = end
    return [*uncovered, (time, window[1])] if time < window[1] else uncovered


def total_length(spans: Iterable[Span]) -> int:
    """Return the total length of disjoint spans."""
    return sum(end - start for start, end in spans)


def clip_spans(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of `spans` that lie in `window`. `spans` must be sorted and disjoint."""
    parts = []
    for index in range(max(0, bisect_right(spans, (window[0],)) - 1), len(spans)):
        start, end = spans[index]
        if start >= window[1]:
            break
        if end > window[0]:
            parts.append((max(start, window[0]), min(end, window[1])))
    return parts
