"""Computes batches of a text encoder as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meltcore.engine.memory.graph_sizes import MIN_ROW_TOKENS, packed_sizes
from meltcore.engine.tasks.packed_graphs import PackedBatch, PackedGraphs
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.memory_pools import memory_pool
from meltcore.models.tasks.encoder import RowBatch, TextEncoder


class TextEncoderGraphs:
    """CUDA graphs of a text encoder, one for each of `packed_sizes`.

    All graphs write one table of results, so a batch is copied before the graph of the next one runs.
    """

    def __init__(self, model: TextEncoder, batch_tokens: int) -> None:
        """Allocate the tables."""
        sizes, config = packed_sizes(batch_tokens), model.config
        self._model = model
        # Of a token: its id, its row in the table of positions, and its type. Of a row: its first token, its length.
        self._graphs = PackedGraphs(self._compute, sizes, (3, 2), model.device)
        with memory_pool("graphs"):
            shape = sizes[-1] // MIN_ROW_TOKENS, 1 if config.is_reranker else config.hidden_size
            self._results = torch.empty(shape, dtype=torch.float32, device=model.device)

    def capture(self, progress: Callable[[str, float], None]) -> None:
        """Capture the graphs of all sizes."""
        self._graphs.capture(GraphCapturer(), progress)

    def launch(self, token_ids: np.ndarray, lengths: np.ndarray, second_starts: np.ndarray | None) -> torch.Tensor:
        """Return the results of rows, [rows, values] float32. The next launch overwrites them.

        Args:
            token_ids: [tokens] int32.
            lengths: [rows] int32.
            second_starts: [rows] int32, as `PoolingModel.forward` has them. None means that no row is a pair.
        """
        config = self._model.config
        starts = lengths.cumsum(dtype=np.int32) - lengths
        positions = np.arange(len(token_ids), dtype=np.int32) - starts.repeat(lengths)
        tokens = np.stack([token_ids, positions + config.first_position, np.zeros_like(positions)])
        if second_starts is not None and config.num_types > 1:
            tokens[2] = positions >= second_starts.repeat(lengths)
        self._graphs.launch(tokens, np.stack([starts, lengths]), lengths)
        return self._results[: len(lengths)]

    def _compute(self, batch: PackedBatch) -> None:
        self._results[: batch.rows.shape[1]] = self._model.compute(RowBatch(batch.tokens, batch.rows, batch.tiles))
