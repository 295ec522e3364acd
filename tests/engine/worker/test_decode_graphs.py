"""Decode graphs without a GPU: the batch sizes, and the warm-up of their launches."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch

from meltcore.engine.core.batch import NewPages, Step
from meltcore.engine.memory.graph_sizes import capture_sizes
from meltcore.engine.worker import cuda_graphs as graphs_file
from meltcore.engine.worker import transfer as transfer_file
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW, DecodeGraphs, DecodeOutput


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000, 1024, 5000])
def test_capture_sizes_cover_every_batch_with_little_padding(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(4, count // 2)


class AbsentEvent:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


def test_warm_up_does_not_feed_sampled_tokens_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With skipped kernels the sampled value may be no token id, and the next step would look it up."""
    for module in (graphs_file, transfer_file):
        monkeypatch.setattr(module, "pinned_zeros", lambda *shape: torch.zeros(shape, dtype=torch.int64))
    monkeypatch.setattr(torch.cuda, "Event", AbsentEvent)
    last_tokens, page_table = torch.zeros(9, dtype=torch.int64), torch.zeros(9, 4, dtype=torch.int64)
    seen = []

    def step(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert set(rows.tolist()) == {PADDING_ROW}
        assert set(positions.tolist()) == {PADDING_POSITION}
        seen.append((len(rows), last_tokens[rows].tolist()))
        return torch.empty(len(rows), 2), torch.full_like(rows, 10**9)

    DecodeGraphs(step, capture_sizes(8), last_tokens, page_table).warm_up_steps([1, 2, 8])
    assert seen == [(1, [0]), (2, [0] * 2), (8, [0] * 8)]
    assert not last_tokens.any()
    assert not page_table.any()


def test_drawn_tokens_use_the_logits_of_the_graph(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own rows; to compute them again would take as long as a tenth of a step of a small model."""
    runner = tools.open_engine(checkpoint).engine.runner
    logits = torch.randn(4, tools.VOCAB).bfloat16()
    decoded = DecodeOutput(logits[:3], torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int64))
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    monkeypatch.setattr(graphs, "replay", lambda rows, positions, new_pages: decoded, raising=False)
    monkeypatch.setattr(runner, "_decode_graphs", graphs)
    monkeypatch.setattr(type(runner.model), "logits", None, raising=False)
    token_ids, logits_at = runner._compute(Step(NewPages([], [], []), [1, 2, 3], [9, 9, 9], None))
    assert token_ids.tolist() == [5, 6, 7]
    assert torch.equal(logits_at(torch.tensor([2, 0])), logits[[2, 0]])
