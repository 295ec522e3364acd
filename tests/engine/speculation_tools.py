"""Drafts that a test chooses: the true continuation, with one wrong token at a chosen place."""

from __future__ import annotations

import pytest
import torch

from meltcore.engine.core.batch import Windows
from meltcore.engine.generation.speculation import Speculation
from meltcore.engine.worker import drafter
from meltcore.engine.worker.drafter import Drafter, NgramDrafter

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


class ForcedDrafts:
    """Proposes what follows in the known answers of requests, by id, with a wrong token after `num_right` drafts.

    `num_windows` counts, by the number of accepted drafts, the windows that had drafts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[int]], num_right: int) -> None:
        self.answers, self.num_right = answers, num_right
        self.num_windows: dict[int, int] = {}
        accept = drafter.accept_and_propose
        propose = NgramDrafter.propose

        def forced(used: NgramDrafter, windows: Windows, token_ids: torch.Tensor) -> torch.Tensor:
            monkeypatch.setattr(
                drafter,
                "accept_and_propose",
                lambda tables, rows, first_rows, sampled, most, _lookup, _synthetic: accept(
                    tables, rows, first_rows, sampled, most, None
                ),
            )
            outcomes = propose(used, windows, token_ids)
            self._fill(used, windows, outcomes)
            return outcomes

        monkeypatch.setattr(NgramDrafter, "propose", forced)
        # Whether drafts pay is measured, and does not matter here.
        monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: self._num_drafts)

    def _fill(self, used: Drafter, windows: Windows, outcomes: torch.Tensor) -> None:
        tables = used._tables
        for index, (first, end) in enumerate(zip(windows.first_rows, windows.first_rows[1:], strict=False)):
            request, num_tokens = windows.requests[first], int(outcomes[index, 0])
            if end - first > 1:
                self.num_windows[num_tokens - 1] = self.num_windows.get(num_tokens - 1, 0) + 1
            if request.id not in self.answers or not request.sampling.speculative_decoding:
                continue
            start = len(request.token_ids) - request.prompt_length + num_tokens
            drafts = self.answers[request.id][start : start + used.max_drafts]
            if self.num_right < len(drafts):
                drafts[self.num_right] ^= 1
            outcomes[index, 1] = tables.num_drafts[request.row] = len(drafts)
            outcomes[index, 2 : 2 + len(drafts)] = tables.drafts[request.row, : len(drafts)] = torch.tensor(
                drafts, dtype=torch.int64
            )
