"""Decode steps as CUDA graphs: one per padded batch size, all in one memory pool.

A decode step is hundreds of short kernels. Launching them one by one from Python costs the host milliseconds. Replaying
them as a graph costs microseconds. A graph reads nothing from the host but one small array, and the sampled tokens are
in pinned host memory when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from meltcore.engine.core.batch import NewPages
from meltcore.engine.worker.transfer import STAGING_SLOTS, StagingBuffer, align_entries, pinned_zeros
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.sampling.resample import StepTokens
from meltcore.kernels.step_io import apply_updates, finish_step
from meltcore.models.checkpoints.checkpoint import Progress

# From rows and positions of a padded batch, [sequences] int64 each, to logits [sequences, vocab] and greedy tokens
# [sequences] int64.
DecodeStep = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Replaces the greedy tokens of a step with these logits [sequences, vocab].
Resample = Callable[[torch.Tensor, StepTokens], None]

PADDING_ROW = 0
PADDING_POSITION = -1  # an empty sequence: attention reads no key for it, and its own key goes to page 0


class CapturedGraph(NamedTuple):
    """A graph and its outputs: greedy tokens, and logits (decode step) or hidden states (step with prompts).

    `sampling` is the graph of a decode step that replaces its greedy tokens, if there is one.
    """

    graph: torch.cuda.CUDAGraph
    values: torch.Tensor
    token_ids: torch.Tensor
    sampling: torch.cuda.CUDAGraph | None = None


class DecodeOutput(NamedTuple):
    """Outputs of a replay: logits [sequences, vocab] and greedy tokens [sequences]. The next replay overwrites them.

    `host_token_ids` are the same tokens in host memory. They are valid once the device has passed this point, and stay
    valid during the next two replays.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor
    host_token_ids: torch.Tensor


class DecodeGraphs:
    """The graphs of pure decode steps."""

    def __init__(
        self,
        step: DecodeStep,
        sizes: list[int],
        last_tokens: torch.Tensor,
        page_table: torch.Tensor,
        resample: Resample | None = None,
    ) -> None:
        """Allocate the inputs that all captured sizes share.

        All sizes share one memory for the logits of `step`: separate memory would take gigabytes.

        Args:
            step: computes eagerly what a replay will compute.
            sizes: the batch sizes to capture.
            last_tokens: [rows] int64. The step reads and writes each row's newest token there.
            page_table: [rows, pages of a sequence] int64.
            resample: replaces greedy tokens, in a graph of its own. None captures no such graphs.
        """
        self._step, self._resample = step, resample
        self._sizes = sizes
        self._last_tokens, self._page_table = last_tokens, page_table
        device = page_table.device
        # What the host sends, at the same address for every size: rows, then positions (see `_views`).
        self._inputs = torch.zeros(2 * align_entries(sizes[-1]), dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._ring = pinned_zeros(STAGING_SLOTS, sizes[-1])
        self._staging = StagingBuffer(5 * align_entries(sizes[-1]))
        self._replays = 0
        self._device_state: tuple[list[int], list[int]] = [], []  # the rows and positions that the device has now
        self._captured: dict[int, CapturedGraph] = {}

    @torch.inference_mode()
    def warm_up_steps(self, batch_sizes: list[int]) -> None:
        """Launch padded steps of these sizes, and an update of the inputs.

        Kernels may be skipped (`compile_ahead`). Sampled tokens are then invalid, so the next step does not read them.
        """
        for num_rows in batch_sizes:
            rows, positions = self._padding(num_rows)
            logits, _ = self._step(rows, positions)
            token_ids = torch.zeros_like(rows)
            self._end_step(token_ids, rows, positions)
            self._eager_sampling(logits, token_ids, rows, positions)
        self._warm_up_send()

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Capture every size, the largest first, so that the smaller ones fit into its memory."""
        capturer = GraphCapturer()
        for index, size in enumerate(reversed(self._sizes)):
            rows, positions = self._padding(size)
            self._eager_step(rows, positions)
            torch.cuda.synchronize()
            graph, outputs = capturer.capture(partial(self._eager_step, rows, positions))
            self._captured[size] = CapturedGraph(graph, *outputs)
            if self._resample is not None:
                sampling = partial(self._eager_sampling, *outputs, rows, positions)
                sampling()
                self._captured[size] = CapturedGraph(graph, *outputs, capturer.capture(sampling)[0])
            progress("capturing graphs", (index + 1) / len(self._sizes))
        self._warm_up_send()
        self._steps.zero_()
        torch.cuda.synchronize()

    def replay(self, rows: list[int], positions: list[int], new_pages: NewPages) -> DecodeOutput:
        """Run a decode step for these rows, each at its position, after writing `new_pages` to the page table."""
        if new_pages.rows or (rows, positions) != self._device_state:
            self._send(rows, positions, new_pages)
        self._device_state = rows, [position + 1 for position in positions]
        num_rows = len(rows)
        captured = self._captured[self._size(num_rows)]
        captured.graph.replay()
        slot = self._replays % STAGING_SLOTS
        self._replays += 1
        return DecodeOutput(captured.values[:num_rows], captured.token_ids[:num_rows], self._ring[slot, :num_rows])

    def replay_sampling(self, num_rows: int) -> None:
        """Replace greedy tokens of the newest replay, which had this many rows, by the tokens of `resample`."""
        sampling = self._captured[self._size(num_rows)].sampling
        assert sampling is not None
        sampling.replay()

    def _padding(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows and positions of a step of padding only."""
        rows, positions = _views(self._inputs, num_rows)
        return rows.fill_(PADDING_ROW), positions.fill_(PADDING_POSITION)

    def _warm_up_send(self) -> None:
        """Compile the kernels of `_send` before the first step."""
        self._send([], [], NewPages([0], [0], [0]))

    def _eager_step(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, token_ids = self._step(rows, positions)
        self._end_step(token_ids, rows, positions)
        return logits, token_ids

    def _eager_sampling(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        if self._resample is not None:
            self._resample(logits, StepTokens(token_ids, rows, positions, self._last_tokens, self._steps, self._ring))

    def _end_step(self, token_ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        finish_step(token_ids, rows, positions, self._last_tokens, self._steps, self._ring)

    def _send(self, rows: list[int], positions: list[int], new_pages: NewPages) -> None:
        num_rows, num_new_pages = len(rows), len(new_pages.rows)
        size = self._size(num_rows)
        inputs = self._inputs[: 2 * align_entries(size)]
        staging_buffer, read_event = self._staging.take(len(inputs) + 3 * num_new_pages)
        staged_rows, staged_positions = (view.numpy() for view in _views(staging_buffer, size))
        staged_rows[:num_rows], staged_rows[num_rows:] = rows, PADDING_ROW
        staged_positions[:num_rows], staged_positions[num_rows:] = positions, PADDING_POSITION
        staging_buffer.numpy()[len(inputs) :] = [*new_pages.rows, *new_pages.columns, *new_pages.pages]
        apply_updates(staging_buffer, inputs, self._page_table, num_new_pages)
        read_event.record()

    def _size(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)]


def _views(inputs: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and the positions of a batch of `size` within the input array."""
    return inputs[:size], inputs[align_entries(size) : align_entries(size) + size]
