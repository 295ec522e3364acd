"""Decode graphs, as far as they need no GPU: the batch sizes, and the rehearsal of their launches."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch

from meltcore.engine import graphs as graphs_file
from meltcore.engine import outbox
from meltcore.engine.batch import NewPages
from meltcore.engine.graphs import PADDING_POSITION, PADDING_ROW, Decoded, GraphPool, padded_sizes
from meltcore.engine.runner import Step


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000, 1024, 5000])
def test_every_batch_has_a_size_and_padding_stays_small(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(4, count // 2)


class AbsentEvent:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


def test_a_rehearsal_feeds_no_step_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are left out that may be no token, and the next step would look it up."""
    for module in (graphs_file, outbox):
        monkeypatch.setattr(module, "pinned", lambda *shape: torch.zeros(shape, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "Event", AbsentEvent)
    last_tokens, page_table = torch.zeros(9, dtype=torch.int64), torch.zeros(9, 4, dtype=torch.int64)
    seen = []

    def step(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert set(rows.tolist()) == {PADDING_ROW}
        assert set(positions.tolist()) == {PADDING_POSITION}
        seen.append((len(rows), last_tokens[rows].tolist()))
        return torch.empty(len(rows), 2), torch.full_like(rows, 10**9)

    GraphPool(step, padded_sizes(8), last_tokens, page_table).rehearse([1, 2, 8])
    assert seen == [(1, [0]), (2, [0] * 2), (8, [0] * 8)]
    assert not last_tokens.any()
    assert not page_table.any()


def test_sequences_that_draw_take_the_logits_that_a_graph_has_left(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their own rows; to compute them again would take as long as a tenth of a step of a small model."""
    runner = tools.open_engine(checkpoint).engine.runner
    logits = torch.randn(4, tools.VOCAB).bfloat16()
    decoded = Decoded(logits[:3], torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int64))
    graphs = GraphPool.__new__(GraphPool)
    monkeypatch.setattr(graphs, "replay", lambda rows, positions, new_pages: decoded, raising=False)
    monkeypatch.setattr(runner, "_graphs", graphs)
    monkeypatch.setattr(type(runner.model), "logits", None, raising=False)
    token_ids, logits_at = runner._compute(Step(NewPages([], [], []), [1, 2, 3], [9, 9, 9], None))
    assert token_ids.tolist() == [5, 6, 7]
    assert torch.equal(logits_at(torch.tensor([2, 0])), logits[[2, 0]])
