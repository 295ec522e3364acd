"""Decode steps as CUDA graphs: one for each padded number of sequences, all in one memory pool.

A decode step is hundreds of short kernels. Launched one by one from Python they cost the host milliseconds; replayed
as a graph, microseconds. Nothing a graph reads depends on the host but one small array, and what it chose lies in the
host's memory when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from meltcore.engine.batch import NewPages
from meltcore.kernels.decode_tables import end_step, take_changes
from meltcore.models.loader import Progress

# Rows and positions of a padded batch: [sequences] int64 each. Returns the hidden states [sequences, hidden_size] and
# the greedy tokens [sequences] int64.
DecodeStep = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

PADDING_ROW = 0
PADDING_POSITION = -1  # a length of nothing: attention reads no key for it, and its own goes to page 0

# Steps whose tokens the host can still read: a step is launched before the one in front of it has been read, never two.
_SLOTS = 4


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    token_ids: torch.Tensor


class Decoded(NamedTuple):
    """What a replay writes, overwritten by the next: hidden states [sequences, hidden_size] and the greedy tokens; and
    those tokens in the host's memory, once the device has passed this point and for two replays more.

    Logits stay inside the graph, where all sizes share the memory for them: the sequences that need theirs compute
    them again from the hidden states.
    """

    hidden: torch.Tensor
    token_ids: torch.Tensor
    on_host: torch.Tensor


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: closer together where padding would cost more, up to `max_num_seqs` itself."""
    sizes = [1, 2, 4, 8, 10, 12, 16, 24, 32, 48, *range(64, 128, 8), *range(128, 256, 16), *range(256, 512, 32)]
    sizes += [*range(512, 1024, 64), *range(1024, max_num_seqs, 256)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class _Outbox:
    """Pinned memory that a kernel reads. torch's own pool, which knows of copies only, would hand it out too early."""

    def __init__(self, entries: int) -> None:
        self._pieces = [(_pinned(entries), torch.cuda.Event()) for _ in range(_SLOTS)]
        self._taken = 0

    def take(self, entries: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """[entries] int64, and the event to record once the kernel that reads it is launched."""
        index = self._taken % _SLOTS
        self._taken += 1
        piece, read = self._pieces[index]
        read.synchronize()
        if len(piece) < entries:
            piece = _pinned(entries)
            self._pieces[index] = piece, read
        return piece[:entries], read


class GraphPool:
    def __init__(self, step: DecodeStep, sizes: list[int], last_tokens: torch.Tensor, page_table: torch.Tensor) -> None:
        """`step` computes eagerly what a replay will. last_tokens: [rows] int64, where it finds each row's token and
        where those it chose go; page_table: [rows, pages of a sequence] int64."""
        self._step = step
        self._sizes = sizes
        self._last_tokens, self._page_table = last_tokens, page_table
        device = page_table.device
        # What the host sends, for every size from the start: its rows, then its positions (see `_views`).
        self._inputs = torch.zeros(2 * _aligned(sizes[-1]), dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._ring = _pinned(_SLOTS, sizes[-1])
        self._outbox = _Outbox(5 * _aligned(sizes[-1]))
        self._replays = 0
        self._expected: tuple[list[int], list[int]] = [], []  # the rows and positions that the device has now
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Record every size, the largest first, so that the smaller ones fit into the memory it took."""
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(self._sizes)):
            rows, positions = _views(self._inputs, size)
            rows.fill_(PADDING_ROW)
            positions.fill_(PADDING_POSITION)
            self._whole_step(rows, positions)  # compiles what this size needs, outside of the recording
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # What other threads ask of CUDA meanwhile, NCCL's own for one, does not end the recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden, token_ids = self._whole_step(rows, positions)
            self._captured[size] = _Captured(graph, hidden, token_ids)
            progress("capturing graphs", (number + 1) / len(self._sizes))
        self._send([], [], NewPages([0], [0], [0]))  # compiled now, not in the first step: it changes nothing
        self._steps.zero_()
        torch.cuda.synchronize()

    def replay(self, rows: list[int], positions: list[int], new_pages: NewPages) -> Decoded:
        """Run a decode step for these table rows, each at its position, after `new_pages` are in the table."""
        if new_pages.rows or (rows, positions) != self._expected:
            self._send(rows, positions, new_pages)
        self._expected = rows, [position + 1 for position in positions]
        count = len(rows)
        captured = self._captured[self._size(count)]
        captured.graph.replay()
        slot = self._replays % _SLOTS
        self._replays += 1
        return Decoded(captured.hidden[:count], captured.token_ids[:count], self._ring[slot, :count])

    def _whole_step(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, token_ids = self._step(rows, positions)
        end_step(token_ids, rows, positions, self._last_tokens, self._steps, self._ring)
        return hidden, token_ids

    def _send(self, rows: list[int], positions: list[int], new_pages: NewPages) -> None:
        count, added = len(rows), len(new_pages.rows)
        size = self._size(count)
        inputs = self._inputs[: 2 * _aligned(size)]
        sent, read = self._outbox.take(len(inputs) + 3 * added)
        rows_sent, positions_sent = (view.numpy() for view in _views(sent, size))
        rows_sent[:count], rows_sent[count:] = rows, PADDING_ROW
        positions_sent[:count], positions_sent[count:] = positions, PADDING_POSITION
        sent.numpy()[len(inputs) :] = [*new_pages.rows, *new_pages.columns, *new_pages.pages]
        take_changes(sent, inputs, self._page_table, added)
        read.record()

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]


def _aligned(size: int) -> int:
    """Entries that `size` int64 take up to the next 16 bytes: kernels are compiled for aligned arrays."""
    return size + size % 2


def _views(inputs: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the positions of a batch of `size` within an array of inputs."""
    return inputs[:size], inputs[_aligned(size) : _aligned(size) + size]


def _pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, pin_memory=True)
