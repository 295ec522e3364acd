"""Decode steps as CUDA graphs: one for each padded number of sequences, all in one memory pool.

A decode step is hundreds of short kernels. Launched one by one from Python they cost the host milliseconds; replayed
as a graph, microseconds. Nothing a graph reads depends on the host but one small array.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from meltcore.models.loader import Progress

# Rows and positions of a padded batch: [sequences] int64 each. Returns the hidden states [sequences, hidden_size] and
# the greedy tokens [sequences] int64, which it also wrote into the table of last tokens.
DecodeStep = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

PADDING_ROW = 0
PADDING_POSITION = -1  # a length of nothing: attention reads no key for it, and its own goes to page 0


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    token_ids: torch.Tensor


class Decoded(NamedTuple):
    """What a replay wrote, overwritten by the next: hidden states [sequences, hidden_size] and the greedy tokens.

    Logits stay inside the graph, where all sizes share the memory for them: the sequences that need theirs compute
    them again from the hidden states.
    """

    hidden: torch.Tensor
    token_ids: torch.Tensor


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: closer together where padding would cost more, up to `max_num_seqs` itself."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, *range(96, 256, 32), *range(256, 1024, 64)]
    sizes += range(1024, max_num_seqs, 256)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class GraphPool:
    def __init__(self, step: DecodeStep, sizes: list[int], device: torch.device) -> None:
        """`step` computes eagerly what a replay will."""
        self._step = step
        self._sizes = sizes
        # What the host sends, for every size from the start: its rows, then its positions (see `_views`).
        self._inputs = torch.zeros(2 * _aligned(sizes[-1]), dtype=torch.int64, device=device)
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Record every size, the largest first, so that the smaller ones fit into the memory it took."""
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(self._sizes)):
            rows, positions = _views(self._inputs, size)
            rows.fill_(PADDING_ROW)
            positions.fill_(PADDING_POSITION)
            self._step(rows, positions)  # compiles what this size needs, outside of the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # What other threads ask of CUDA meanwhile, NCCL's own for one, does not end the recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden, token_ids = self._step(rows, positions)
            self._captured[size] = _Captured(graph, hidden, token_ids)
            progress("capturing graphs", (number + 1) / len(self._sizes))

    def replay(self, rows: list[int], positions: list[int]) -> Decoded:
        """Run a decode step for these table rows, each at its position."""
        count = len(rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        sent = torch.empty(2 * _aligned(size), dtype=torch.int64, pin_memory=True)
        rows_sent, positions_sent = (view.numpy() for view in _views(sent, size))
        rows_sent[:count], rows_sent[count:] = rows, PADDING_ROW
        positions_sent[:count], positions_sent[count:] = positions, PADDING_POSITION
        self._inputs[: len(sent)].copy_(sent, non_blocking=True)
        captured = self._captured[size]
        captured.graph.replay()
        return Decoded(captured.hidden[:count], captured.token_ids[:count])


def _aligned(size: int) -> int:
    """Entries that `size` int64 take up to the next 16 bytes: kernels are compiled for aligned arrays."""
    return size + size % 2


def _views(inputs: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the positions of a batch of `size` within an array of inputs."""
    return inputs[:size], inputs[_aligned(size) : _aligned(size) + size]
