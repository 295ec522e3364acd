"""Proposes the drafts of speculative decoding, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from meltcore.engine.core.batch import Windows
from meltcore.engine.core.request import Request
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.transfer import to_device_together
from meltcore.kernels.sampling.drafts import (
    DraftTables,
    NgramSizes,
    SyntheticAcceptance,
    accept_and_propose,
    start_histories,
)
from meltcore.settings.speculation import SpeculativeConfig


class Drafter:
    """Accepts the drafts of a step, and looks up the next ones in the histories of the sequences (n-gram)."""

    def __init__(self, config: SpeculativeConfig, sizes: ModelRunnerConfig, seed: int, device: torch.device) -> None:
        """Allocate a history for each row of a model runner of these sizes."""
        self._device, self.max_drafts = device, config.num_speculative_tokens
        self._tables = DraftTables.allocate(sizes.max_num_seqs + 1, sizes.max_model_len, self.max_drafts, device)
        self._lookup: NgramSizes | None = NgramSizes(config.prompt_lookup_max, config.prompt_lookup_min)
        self._synthetic = None
        if config.synthetic_acceptance_length is not None:
            self._synthetic = SyntheticAcceptance.of_length(
                config.synthetic_acceptance_length, self.max_drafts, seed, device
            )

    def propose(self, windows: Windows, token_ids: torch.Tensor) -> torch.Tensor:
        """Accept the drafts that precede the sampled `token_ids` [rows], and propose the next ones.

        Returns [requests, 2 + drafts] int64: how many of its tokens each request gets, how many drafts, and the drafts.
        """
        requests = [windows.requests[row] for row in windows.first_rows[:-1]]
        self._start([request for request in requests if request.num_in_history != len(request.token_ids)])
        rows, first_rows, max_drafts = to_device_together(
            [[request.row for request in requests], windows.first_rows, self._most_drafts(requests)], self._device
        )
        return accept_and_propose(self._tables, rows, first_rows, token_ids, max_drafts, self._lookup, self._synthetic)

    def used_rows(self, windows: Windows, outcomes: torch.Tensor) -> torch.Tensor:
        """Return whether the sampled token of each row counts, by the result of `propose`: [rows] bool."""
        [first_rows] = to_device_together([windows.first_rows], self._device)
        rows = torch.arange(len(windows.requests), device=self._device)
        index = torch.repeat_interleave(first_rows.diff(), output_size=len(rows))
        return rows - first_rows[index] < outcomes[index, 0]

    def _most_drafts(self, requests: Sequence[Request]) -> list[int]:
        return [self.max_drafts * request.sampling.speculative_decoding for request in requests]

    def _start(self, requests: list[Request]) -> None:
        """Write the histories of sequences that were started, or that had a step without a drafter."""
        if requests:
            first_tokens = list(accumulate((len(request.token_ids) for request in requests), initial=0))
            token_ids = np.concatenate([np.frombuffer(request.token_ids, np.uint32) for request in requests])
            arrays = to_device_together([[request.row for request in requests], first_tokens, token_ids], self._device)
            start_histories(self._tables, *arrays)
