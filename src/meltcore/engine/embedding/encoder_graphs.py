"""Computes batches of a text encoder as CUDA graphs, because its kernels take less time than their launches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from meltcore.engine.embedding.memory import MIN_ROW_TOKENS, graph_sizes
from meltcore.kernels.attention.packed import make_row_tiles, max_tiles
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.memory_pools import free_cached_memory, memory_pool
from meltcore.models.configs.encoder_config import EncoderConfig
from meltcore.models.tasks.encoder import RowBatch, TextEncoder


class TextEncoderGraphs:
    """CUDA graphs of a text encoder, one for each of `graph_sizes`.

    A batch is padded to a number of tokens, and to rows without tokens. All graphs read one table of int32 and write
    one table of results, so a batch is copied before the graph of the next one runs.
    """

    def __init__(self, model: TextEncoder, batch_tokens: int) -> None:
        """Allocate the tables. `capture` must be called before `launch`."""
        self._model, self._sizes = model, graph_sizes(batch_tokens)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        most_tokens, config = self._sizes[-1], model.config
        with memory_pool("graphs"):
            self._table = torch.zeros(_table_size(most_tokens), dtype=torch.int32, device=model.device)
            shape = most_tokens // MIN_ROW_TOKENS, 1 if config.is_reranker else config.hidden_size
            self._values = torch.empty(shape, dtype=torch.float32, device=model.device)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, float], None]) -> None:
        """Run all sizes, then capture their graphs, the largest first, so that the others fit into its memory."""
        empty = np.zeros(1, np.int32)
        for size in reversed(self._sizes):
            self._load(size, empty, empty + 1, None)
            self._compute(size)
        torch.cuda.synchronize()
        free_cached_memory(self._table.device)  # the memory of these runs belongs to the graphs
        capturer = GraphCapturer()
        for index, size in enumerate(reversed(self._sizes)):
            self._graphs.insert(0, capturer.capture(partial(self._compute, size))[0])
            progress("capturing graphs", (index + 1) / len(self._sizes))

    def launch(self, token_ids: np.ndarray, lengths: np.ndarray, second_starts: np.ndarray | None) -> torch.Tensor:
        """Return the results of rows, [rows, values] float32. The next launch overwrites them.

        Args:
            token_ids: [tokens] int32.
            lengths: [rows] int32.
            second_starts: [rows] int32, as `PoolingModel.forward` has them. None means that no row is a pair.
        """
        index = bisect_left(self._sizes, max(len(token_ids), MIN_ROW_TOKENS * len(lengths)))
        self._load(self._sizes[index], token_ids, lengths, second_starts)
        self._graphs[index].replay()
        return self._values[: len(lengths)]

    def _load(self, size: int, token_ids: np.ndarray, lengths: np.ndarray, second_starts: np.ndarray | None) -> None:
        """Copy a batch that is padded to `size` tokens into the table."""
        packed = torch.zeros(_table_size(size), dtype=torch.int32, pin_memory=self._table.is_cuda)
        _pack_rows(packed.numpy(), self._model.config, size, token_ids, lengths, second_starts)
        self._table[: len(packed)].copy_(packed, non_blocking=True)

    def _compute(self, size: int) -> None:
        """Compute what is in the table, as a batch of `size` tokens."""
        max_rows = size // MIN_ROW_TOKENS
        parts = self._table[: _table_size(size)].split([3 * size, 2 * max_rows, 3 * (1 + max_tiles(size, max_rows))])
        indices, rows, tiles = parts[0].view(3, size), parts[1].view(2, max_rows), parts[2].view(-1, 3)
        self._values[:max_rows] = self._model.compute(RowBatch(indices, rows, tiles))


def _table_size(size: int) -> int:
    max_rows = size // MIN_ROW_TOKENS
    return 3 * size + 2 * max_rows + 3 * (1 + max_tiles(size, max_rows))


def _pack_rows(
    table: np.ndarray,
    config: EncoderConfig,
    size: int,
    token_ids: np.ndarray,
    lengths: np.ndarray,
    second_starts: np.ndarray | None,
) -> None:
    """Write the indices, the rows and the tiles of `RowBatch` into a table of zeros. See `TextEncoderGraphs.launch`."""
    num_tokens, num_rows, max_rows = len(token_ids), len(lengths), size // MIN_ROW_TOKENS
    indices, rows = table[: 3 * size].reshape(3, size), table[3 * size :][: 2 * max_rows].reshape(2, max_rows)
    rows[0, :num_rows], rows[1, :num_rows] = lengths.cumsum() - lengths, lengths
    positions = np.arange(num_tokens, dtype=np.int32) - rows[0, :num_rows].repeat(lengths)
    indices[0, :num_tokens], indices[1, :num_tokens] = token_ids, positions + config.first_position
    if second_starts is not None and config.num_types > 1:
        indices[2, :num_tokens] = positions >= second_starts.repeat(lengths)
    tiles = make_row_tiles(lengths).ravel()
    table[3 * size + 2 * max_rows :][: len(tiles)] = tiles
