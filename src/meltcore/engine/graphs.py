"""Decode steps as CUDA graphs: one for each padded number of sequences, all in one memory pool.

A decode step is hundreds of short kernels. Launched one by one from Python they cost the host milliseconds; replayed
as a graph, microseconds. Nothing a graph reads depends on the host but two small arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from meltcore.engine.transfer import to_device
from meltcore.models.loader import Progress

# Rows and positions of a padded batch: [sequences] int64 each. Returns hidden states [sequences, hidden_size].
DecodeStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Logits = Callable[[torch.Tensor], torch.Tensor]

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
    def __init__(self, step: DecodeStep, logits: Logits, last_token: torch.Tensor, sizes: list[int]) -> None:
        """`step` and `logits` compute eagerly; `last_token` [rows] int64 is updated by each replay."""
        self._step = step
        self._logits = logits
        self._last_token = last_token
        self._sizes = sizes
        device = last_token.device
        self._rows = torch.full((sizes[-1],), PADDING_ROW, dtype=torch.int64, device=device)
        self._positions = torch.full((sizes[-1],), PADDING_POSITION, dtype=torch.int64, device=device)
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Record every size, the largest first, so that the smaller ones fit into the memory it took."""
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(self._sizes)):
            self._decode(size)  # compiles what this size needs, outside of the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden, token_ids = self._decode(size)
            self._captured[size] = _Captured(graph, hidden, token_ids)
            progress("capturing graphs", (number + 1) / len(self._sizes))

    def replay(self, rows: list[int], positions: list[int]) -> Decoded:
        """Run a decode step for these table rows, each at its position."""
        count = len(rows)
        size = next(size for size in self._sizes if size >= count)
        padding = size - count
        self._rows[:size].copy_(self._sent(rows + [PADDING_ROW] * padding), non_blocking=True)
        self._positions[:size].copy_(self._sent(positions + [PADDING_POSITION] * padding), non_blocking=True)
        captured = self._captured[size]
        captured.graph.replay()
        return Decoded(captured.hidden[:count], captured.token_ids[:count])

    def _decode(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, positions = self._rows[:size], self._positions[:size]
        hidden = self._step(rows, positions)
        token_ids = self._logits(hidden).argmax(-1)
        self._last_token.index_copy_(0, rows, token_ids)
        return hidden, token_ids

    def _sent(self, values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self._last_token.device)
