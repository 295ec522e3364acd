"""Steps padded as for a graph, which are computed without a capture."""

from __future__ import annotations

import torch

from meltcore.engine.core.batch import Batch, MtpInputs, NewPages
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.prefill_graphs import GraphBucket, PaddedInputs, input_entries, pad


def padded(batch: Batch, size: GraphBucket, mtp: MtpInputs | None = None) -> PaddedInputs:
    entries = torch.full((input_entries(size),), -77)
    pad(batch, size, PaddedInputs.views(entries.numpy(), size), mtp)
    return PaddedInputs.views(entries, size)


class Uncaptured:
    """Padded steps as a graph would compute them, one after the other."""

    def __init__(self, runner: ModelRunner, sizes: list[GraphBucket]) -> None:
        self._runner, self._sizes = runner, sizes
        self.used: list[GraphBucket] = []

    def bucket_for(self, batch: Batch) -> GraphBucket | None:
        return next((size for size in self._sizes if size.holds(batch)), None)

    def holds_windows(self, num_windows: int, num_tokens: int) -> bool:
        return any(size.draft_windows >= num_windows and size.tokens >= num_tokens for size in self._sizes)

    def replay(
        self, batch: Batch, size: GraphBucket, new_pages: NewPages, mtp: MtpInputs | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._runner.page_tables.write(new_pages)
        self.used.append(size)
        self._inputs = padded(batch, size, mtp)
        hidden, self._token_ids = self._runner._padded_step(self._inputs, size)
        count = len(batch.last_tokens)
        return hidden[:count], self._token_ids[:count]

    def inputs(self, size: GraphBucket) -> PaddedInputs:
        assert size == self.used[-1]
        return self._inputs

    def replay_drafting(self, size: GraphBucket, num_windows: int, token_ids: torch.Tensor) -> torch.Tensor:
        assert token_ids.data_ptr() == self._token_ids.data_ptr(), "a graph reads these"
        return self._runner._padded_drafts(self.inputs(size), size, self._token_ids)[:num_windows]
