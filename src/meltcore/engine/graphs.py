"""Decode steps as CUDA graphs: one for each padded number of sequences, all in one memory pool.

A decode step is hundreds of short kernels. Launched one by one from Python they cost the host milliseconds; replayed
as a graph, microseconds. Nothing a graph reads depends on the host but one small array, and what it chose lies in the
host's memory when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from meltcore.engine.batch import NewPages
from meltcore.engine.outbox import PIECES, Outbox, aligned, pinned
from meltcore.kernels.decode_tables import end_step, take_changes
from meltcore.models.loader import Progress

# Rows and positions of a padded batch: [sequences] int64 each. Returns the logits [sequences, tokens] and the greedy
# tokens [sequences] int64.
DecodeStep = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

PADDING_ROW = 0
PADDING_POSITION = -1  # a length of nothing: attention reads no key for it, and its own goes to page 0


class Captured(NamedTuple):
    """A graph, and what a replay of it writes: of a decode step logits, of one with prompts hidden states, and the
    greedy tokens."""

    graph: torch.cuda.CUDAGraph
    values: torch.Tensor
    token_ids: torch.Tensor


class Decoded(NamedTuple):
    """What a replay writes, overwritten by the next: logits [sequences, tokens] and the greedy tokens; and those tokens
    in the host's memory, once the device has passed this point and for two replays more."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    on_host: torch.Tensor


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending: closer together where padding would cost more, up to `max_num_seqs` itself."""
    sizes = [1, 2, 4, 8, 10, 12, 16, 24, 32, 48, *range(64, 128, 8), *range(128, 256, 16), *range(256, 512, 32)]
    sizes += [*range(512, 1024, 64), *range(1024, max_num_seqs, 256)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class Recorder:
    """Records graphs that follow each other on one stream, so they share the memory of one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all: the library keeps a workspace for each

    def record(self, step: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Captured:
        """A graph of `step`, which must have run before: what is compiled in a recording ends it.

        As torch.cuda.graph does, but that waits for the device, and gives all cached memory back, which the next step
        has to ask for again.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # What other threads ask of CUDA meanwhile, NCCL's own for one, does not end the recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                values, token_ids = step()
            finally:
                graph.capture_end()
        return Captured(graph, values, token_ids)


class GraphPool:
    def __init__(self, step: DecodeStep, sizes: list[int], last_tokens: torch.Tensor, page_table: torch.Tensor) -> None:
        """`step` computes eagerly what a replay will, and has one place for the logits of all sizes, which would take
        gigabytes if each had its own. last_tokens: [rows] int64, where it finds each row's token and where those it
        chose go; page_table: [rows, pages of a sequence] int64."""
        self._step = step
        self._sizes = sizes
        self._last_tokens, self._page_table = last_tokens, page_table
        device = page_table.device
        # What the host sends, for every size from the start: its rows, then its positions (see `_views`).
        self._inputs = torch.zeros(2 * aligned(sizes[-1]), dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._ring = pinned(PIECES, sizes[-1])
        self._outbox = Outbox(5 * aligned(sizes[-1]))
        self._replays = 0
        self._expected: tuple[list[int], list[int]] = [], []  # the rows and positions that the device has now
        self._captured: dict[int, Captured] = {}

    @torch.inference_mode()
    def rehearse(self, counts: list[int]) -> None:
        """Go through the launches of steps of so much padding, and of telling the device of one.

        Kernels may be left out: what was chosen may be no token, and is kept from the next step.
        """
        for count in counts:
            rows, positions = self._padding(count)
            self._step(rows, positions)
            self._end_step(torch.zeros_like(rows), rows, positions)
        self._tell_nothing()

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Record every size, the largest first, so that the smaller ones fit into the memory it took."""
        recorder = Recorder()
        for number, size in enumerate(reversed(self._sizes)):
            rows, positions = self._padding(size)
            self._whole_step(rows, positions)
            torch.cuda.synchronize()
            self._captured[size] = recorder.record(partial(self._whole_step, rows, positions))
            progress("capturing graphs", (number + 1) / len(self._sizes))
        self._tell_nothing()
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
        slot = self._replays % PIECES
        self._replays += 1
        return Decoded(captured.values[:count], captured.token_ids[:count], self._ring[slot, :count])

    def _padding(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows and positions of a step of nothing else."""
        rows, positions = _views(self._inputs, count)
        return rows.fill_(PADDING_ROW), positions.fill_(PADDING_POSITION)

    def _tell_nothing(self) -> None:
        """What `_send` needs is compiled by this, and not in the first step."""
        self._send([], [], NewPages([0], [0], [0]))

    def _whole_step(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, token_ids = self._step(rows, positions)
        self._end_step(token_ids, rows, positions)
        return logits, token_ids

    def _end_step(self, token_ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        end_step(token_ids, rows, positions, self._last_tokens, self._steps, self._ring)

    def _send(self, rows: list[int], positions: list[int], new_pages: NewPages) -> None:
        count, added = len(rows), len(new_pages.rows)
        size = self._size(count)
        inputs = self._inputs[: 2 * aligned(size)]
        sent, read = self._outbox.take(len(inputs) + 3 * added)
        rows_sent, positions_sent = (view.numpy() for view in _views(sent, size))
        rows_sent[:count], rows_sent[count:] = rows, PADDING_ROW
        positions_sent[:count], positions_sent[count:] = positions, PADDING_POSITION
        sent.numpy()[len(inputs) :] = [*new_pages.rows, *new_pages.columns, *new_pages.pages]
        take_changes(sent, inputs, self._page_table, added)
        read.record()

    def _size(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]


def _views(inputs: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the positions of a batch of `size` within an array of inputs."""
    return inputs[:size], inputs[aligned(size) : aligned(size) + size]
