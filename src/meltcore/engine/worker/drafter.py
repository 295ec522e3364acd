"""Accepts drafts of speculative decoding on the device, and proposes drafts by n-gram."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from meltcore.engine.core.batch import Windows
from meltcore.engine.core.request import Request
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.prefill_graphs import PaddedInputs
from meltcore.engine.worker.transfer import to_device_together
from meltcore.kernels.sampling.drafts import (
    DraftTables,
    NgramSizes,
    SyntheticAcceptance,
    accept_and_propose,
    follow_windows,
    start_histories,
)
from meltcore.settings.speculation import SpeculativeConfig


class Drafter:
    """Has the drafts of each row of a model runner, and accepts the drafts of a step."""

    def __init__(self, config: SpeculativeConfig, last_tokens: torch.Tensor, history_len: int, seed: int) -> None:
        """Allocate tables with a row for each of `last_tokens`, the newest tokens [rows] int64, which are written too.

        Their histories keep the first `history_len` tokens of a sequence.
        """
        self._device = device = last_tokens.device
        self.max_drafts = config.num_speculative_tokens
        tables = DraftTables.allocate(len(last_tokens), history_len, self.max_drafts, device)
        self._tables = tables._replace(last_tokens=last_tokens)
        self._synthetic = None
        if config.synthetic_acceptance_length is not None:
            self._synthetic = SyntheticAcceptance.of_length(
                config.synthetic_acceptance_length, self.max_drafts, seed, device
            )

    def follow(self, inputs: PaddedInputs) -> None:
        """Complete the inputs of a padded step of windows which follows a step in flight."""
        follow_windows(
            self._tables,
            inputs.is_following,
            inputs.token_ids,
            inputs.positions,
            inputs.token_rows,
            inputs.rows,
            inputs.context_lens,
            inputs.tiles,
        )

    def used_rows(self, windows: Windows, outcomes: torch.Tensor) -> torch.Tensor:
        """Return whether the sampled token of each row counts, by the outcomes of the step: [rows] bool."""
        [first_rows] = to_device_together([windows.first_rows], self._device)
        rows = torch.arange(len(windows.requests), device=self._device)
        index = torch.repeat_interleave(first_rows.diff(), output_size=len(rows))
        return rows - first_rows[index] < outcomes[index, 0]

    def _accept(
        self,
        rows: torch.Tensor,
        first_rows: torch.Tensor,
        token_ids: torch.Tensor,
        max_drafts: torch.Tensor,
        lookup: NgramSizes | None,
    ) -> torch.Tensor:
        return accept_and_propose(self._tables, rows, first_rows, token_ids, max_drafts, lookup, self._synthetic)


class NgramDrafter(Drafter):
    """Accepts the drafts of a step, and looks up the next ones in the histories of the sequences."""

    def __init__(
        self, config: SpeculativeConfig, sizes: ModelRunnerConfig, seed: int, last_tokens: torch.Tensor
    ) -> None:
        """Allocate a history for each row of a model runner of these sizes."""
        super().__init__(config, last_tokens, sizes.max_model_len, seed)
        self._lookup = NgramSizes(config.prompt_lookup_max, config.prompt_lookup_min)
        self._sent: tuple[Windows | None, list[torch.Tensor]] = (
            None,
            [],
        )  # the newest windows, and what was sent for them

    def propose(self, windows: Windows, token_ids: torch.Tensor) -> torch.Tensor:
        """Accept the drafts that precede the sampled `token_ids` [rows], and propose the next ones.

        Returns the outcomes, [requests, 2 + drafts] int64: how many of its tokens each request gets, how many drafts,
        and the drafts.
        """
        requests = [windows.requests[row] for row in windows.first_rows[:-1]]
        self._start([request for request in requests if request.num_in_history != len(request.token_ids)])
        if windows is not self._sent[0]:
            most_drafts = [self.max_drafts * request.sampling.speculative_decoding for request in requests]
            arrays = [[request.row for request in requests], windows.first_rows, most_drafts]
            self._sent = windows, to_device_together(arrays, self._device)
        rows, first_rows, max_drafts = self._sent[1]
        return self._accept(rows, first_rows, token_ids, max_drafts, self._lookup)

    def _start(self, requests: list[Request]) -> None:
        """Write the histories of sequences that were started, or that had a step without a drafter."""
        if requests:
            first_tokens = list(accumulate((len(request.token_ids) for request in requests), initial=0))
            token_ids = np.concatenate([np.frombuffer(request.token_ids, np.uint32) for request in requests])
            arrays = to_device_together([[request.row for request in requests], first_tokens, token_ids], self._device)
            start_histories(self._tables, *arrays)
