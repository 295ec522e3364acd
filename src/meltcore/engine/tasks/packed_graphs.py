"""Computes batches of rows of different lengths as CUDA graphs, because their kernels take less time than launches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from meltcore.engine.memory.graph_sizes import MIN_ROW_TOKENS
from meltcore.kernels.attention.packed import make_row_tiles, max_tiles
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.memory_pools import free_cached_memory, memory_pool


class PackedBatch(NamedTuple):
    """The rows of a batch on the device, with tokens one after another. Padding has zeros.

    Args:
        tokens: [values, tokens] int32, values of each token.
        rows: [values, rows] int32, values of each row.
        tiles: the tiles of queries from `make_row_tiles`.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor


class PackedGraphs:
    """CUDA graphs of a computation, one for each of `sizes`.

    A batch is padded to a number of tokens, and to rows without tokens. All graphs read one table of int32.
    """

    def __init__(
        self,
        compute: Callable[[PackedBatch], None],
        sizes: Sequence[int],
        values: tuple[int, int],
        device: torch.device,
    ) -> None:
        """Allocate the table. Until `capture` is called, batches are computed kernel by kernel.

        Args:
            compute: computes a batch. What it returns is not used, so it writes to tensors that stay.
            sizes: the numbers of tokens of the graphs, in increasing order, from `packed_sizes`.
            values: the numbers of values of a token and of a row.
            device: the device of the table.
        """
        self._compute, self._sizes, self._values = compute, sizes, values
        self._graphs: list[torch.cuda.CUDAGraph] = []
        with memory_pool("graphs"):
            self._table = torch.zeros(self._table_size(sizes[-1]), dtype=torch.int32, device=device)

    @torch.inference_mode()
    def capture(self, capturer: GraphCapturer, progress: Callable[[str, float], None]) -> None:
        """Run all sizes, then capture their graphs, the largest first, so that the others fit into its memory."""
        tokens, rows = (np.zeros((values, 1), np.int32) for values in self._values)
        for size in reversed(self._sizes):
            self._load(self._pack(size, tokens, rows, np.ones(1, np.int32)))
            self._compute(self._batch(self._table, size))
        if self._table.is_cuda:
            torch.cuda.synchronize()
        free_cached_memory(self._table.device)  # the memory of these runs belongs to the graphs
        for index, size in enumerate(reversed(self._sizes)):
            step = partial(self._compute, self._batch(self._table, size))
            self._graphs.insert(0, capturer.capture(step)[0])
            progress("capturing graphs", (index + 1) / len(self._sizes))

    @torch.inference_mode()
    def launch(self, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Compute a batch. One that is larger than all captured graphs is computed kernel by kernel.

        Args:
            tokens: [values, tokens] int32.
            rows: [values, rows] int32.
            lengths: [rows] int32, the number of tokens of each row.
        """
        needed = max(tokens.shape[1], MIN_ROW_TOKENS * len(lengths))
        index = bisect_left(self._sizes, needed)
        if index < len(self._graphs):
            self._load(self._pack(self._sizes[index], tokens, rows, lengths))
            self._graphs[index].replay()
        else:
            size = -(-needed // self._sizes[0]) * self._sizes[0]  # of aligned tables
            table = self._pack(size, tokens, rows, lengths).to(self._table.device, non_blocking=True)
            self._compute(self._batch(table, size))

    def _load(self, packed: torch.Tensor) -> None:
        self._table[: len(packed)].copy_(packed, non_blocking=True)

    def _pack(self, size: int, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Return a table on the host for a batch that is padded to `size` tokens."""
        packed = torch.zeros(self._table_size(size), dtype=torch.int32, pin_memory=self._table.is_cuda)
        batch = self._batch(packed, size)
        batch.tokens.numpy()[:, : tokens.shape[1]] = tokens
        batch.rows.numpy()[:, : rows.shape[1]] = rows
        tiles = make_row_tiles(lengths)
        batch.tiles.numpy()[: len(tiles)] = tiles
        return packed

    def _batch(self, table: torch.Tensor, size: int) -> PackedBatch:
        """Return the parts of a table for a batch of `size` tokens."""
        tokens, rows, tiles = table[: self._table_size(size)].split(self._part_sizes(size))
        token_values, row_values = self._values
        return PackedBatch(tokens.view(token_values, size), rows.view(row_values, -1), tiles.view(-1, 3))

    def _part_sizes(self, size: int) -> list[int]:
        (token_values, row_values), max_rows = self._values, size // MIN_ROW_TOKENS
        return [token_values * size, row_values * max_rows, 3 * (1 + max_tiles(size, max_rows))]

    def _table_size(self, size: int) -> int:
        return sum(self._part_sizes(size))
