"""Memory patterns: does every cell of the tested device memory keep walking bits, its address and random words?"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from meltcore.common.sizes import size_text
from meltcore.measure.documents.node import NOT_APPLICABLE
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.judge import Judgment
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, Setting

if TYPE_CHECKING:
    import torch

    Fill = Callable[[torch.Tensor, int, int], None]

# Of the memory that is free. A GPU that shares the host's memory must leave the host enough to run.
_SHARE, _UNIFIED_SHARE = 0.8, 0.25
_CHUNK_BYTES = 2**30
_WORD_BYTES, _WORD_BITS = 8, 64


class PatternsCheck(MeasuredCheck):
    """Writes patterns over most of the free memory of all GPUs concurrently, then reads all of it back."""

    name = "patterns"
    title = "Memory patterns"
    unit = "GB/s verified"
    seconds = (0.0, 10.0, 120.0)
    setup_s = 15.0  # allocating; and at least one pass of all patterns is made
    is_recorded = True  # until `adjust` has judged the words
    has_expectations = False

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request."""
        is_unified = any(gpu.facts.get("memory_bytes") == NOT_APPLICABLE for gpu in context.snapshot.gpus)
        settings: dict[str, Setting] = {
            "share": _UNIFIED_SHARE if is_unified else _SHARE,
            "chunk_bytes": _CHUNK_BYTES,
            "seconds": self.request_s(context),
        }
        return [ProbeRequest(key="patterns/memory", gpus=context.gpu_indices, per_gpu=True, settings=settings)]

    def adjust(self, context: CertifyContext, results: Sequence[ProbeResult], judgments: list[Judgment]) -> None:
        """Fail GPUs with wrong words, and say how much memory was tested for how long."""
        details = {result.gpus: result.details for result in results}
        for judgment in judgments:
            row, detail = judgment.row, details.get(tuple(judgment.row.gpus), {})
            if row.verdict not in ("RECORDED", "INVALID"):
                continue
            num_wrong, tested_bytes, passes = (int(detail.get(key, -1)) for key in ("wrong", "bytes", "passes"))
            if num_wrong < 0 or tested_bytes <= 0 or passes <= 0:
                judgment.set_verdict("UNKNOWN", "NO_READING", "the probe did not report what it tested")
                continue
            total_bytes = context.snapshot.gpus[row.gpus[0]].number("memory_bytes")
            share = f" ({100 * tested_bytes / total_bytes:.0f} % of its memory)" if total_bytes else ""
            tested = f"{size_text(tested_bytes)}{share} in {int(detail.get('ms', 0)) / 1e3:.0f} s, passes: {passes}"
            if num_wrong:
                judgment.set_verdict("FAIL", "WRONG_RESULT", f"{num_wrong:,} words of memory are wrong: {tested}")
            elif row.verdict == "RECORDED":
                row.verdict, row.note = "PASS", f"{tested}, every word right"


def _patterns() -> "Iterator[Fill]":
    """Yield functions that fill a chunk of int64 words, given the chunk's number and the number of the pass."""
    for bit in range(_WORD_BITS):
        word = 1 << bit if bit < _WORD_BITS - 1 else -(1 << bit)
        yield partial(_fill_word, word)
        yield partial(_fill_word, ~word)
    yield _fill_addresses
    yield _fill_random


def _fill_word(word: int, chunk: "torch.Tensor", _index: int, _pass_index: int) -> None:
    chunk.fill_(word)


def _fill_addresses(chunk: "torch.Tensor", index: int, pass_index: int) -> None:
    import torch

    first = index * chunk.numel() + pass_index
    torch.arange(first, first + chunk.numel(), out=chunk)


def _fill_random(chunk: "torch.Tensor", index: int, pass_index: int) -> None:
    import torch

    chunk.random_(generator=torch.Generator(device=chunk.device).manual_seed(1_000_003 * pass_index + index))


class TestedMemory:
    """Most of the free memory of one GPU, as chunks of int64 words, and a further chunk for the expected words."""

    def __init__(self, device: int, share: float, chunk_bytes: int) -> None:
        import torch

        free_bytes, _ = torch.cuda.mem_get_info(device)
        words = chunk_bytes // _WORD_BYTES
        count = max(1, int(share * free_bytes) // chunk_bytes - 1)
        self.chunks = [torch.empty(words, dtype=torch.int64, device=f"cuda:{device}") for _ in range(count)]
        self._expected = torch.empty_like(self.chunks[0])
        self._wrong = torch.zeros((), dtype=torch.int64, device=f"cuda:{device}")

    def write(self, fill: "Fill", pass_index: int) -> None:
        """Enqueue the writing of a pattern to all chunks."""
        for index, chunk in enumerate(self.chunks):
            fill(chunk, index, pass_index)

    def verify(self, fill: "Fill", pass_index: int) -> None:
        """Enqueue the comparison of all chunks with the pattern."""
        for index, chunk in enumerate(self.chunks):
            fill(self._expected, index, pass_index)
            self._wrong += (chunk != self._expected).sum()

    def num_wrong(self) -> int:
        """Return the number of words that differed."""
        return int(self._wrong)


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the GB/s of each GPU whose words were written and verified, on all GPUs concurrently.

    All patterns are one pass. Passes go on until the time is over. Settings: share (of the free memory), chunk_bytes,
    seconds.
    """
    import torch

    settings = request.settings
    memories = {
        device: TestedMemory(device, float(settings["share"]), int(settings["chunk_bytes"])) for device in request.gpus
    }
    start_s, passes, num_patterns = time.monotonic(), 0, 0
    while passes == 0 or time.monotonic() - start_s < float(settings["seconds"]):
        for fill in _patterns():
            # All is written before any is read, so that a write that changes another word is seen.
            for memory in memories.values():
                memory.write(fill, passes)
            for memory in memories.values():
                memory.verify(fill, passes)
            for device in memories:
                torch.cuda.synchronize(device)
            num_patterns += 1
        passes += 1
    elapsed_s = max(time.monotonic() - start_s, 1e-3)
    for device, memory in memories.items():
        tested_bytes = sum(chunk.nbytes for chunk in memory.chunks)
        details: dict[str, str | int] = {
            "wrong": memory.num_wrong(), "bytes": tested_bytes, "passes": passes, "ms": round(1e3 * elapsed_s),
        }  # fmt: skip
        rate_gbps = num_patterns * tested_bytes / elapsed_s / 1e9
        yield ProbeResult(key=request.key, gpus=(device,), samples=[rate_gbps], details=details)
