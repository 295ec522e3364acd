"""Steps of a network with sliding windows as CUDA graphs compute them: by padded inputs and the stacked page table.

Nothing is captured here: the steps themselves run, in torch, as attention's kernels divide them.
"""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import sliding_tools
import torch
from graph_tools import Uncaptured

from meltcore.engine.core.batch import NewPages
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW, DecodeOutput
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.engine.worker.prefill_graphs import graph_buckets
from meltcore.kernels.attention import paged as paged_attention


class UncapturedDecodes:
    """Decode steps padded by one row, with the updates of the page table before each."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.replays = 0

    def replay(self, rows: list[int], positions: list[int], new_pages: NewPages) -> DecodeOutput:
        self._runner.page_tables.write(new_pages)
        self.replays += 1
        padded = torch.tensor([*rows, PADDING_ROW]), torch.tensor([*positions, PADDING_POSITION])
        logits, token_ids = self._runner._decode_step(*padded)
        logits, token_ids = logits[:-1], token_ids[:-1]
        self._runner._last_token[torch.tensor(rows)] = token_ids
        return DecodeOutput(logits, token_ids, token_ids.clone())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("network", sorted(sliding_tools.NETWORKS))
def test_steps_of_graphs_give_the_logits_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str, overlap: bool
) -> None:
    """Chunked prompts beside decoding sequences, with a prefix cached past the window."""
    sliding_tools.save(sliding_tools.make_reference(sliding_tools.NETWORKS[network]), tmp_path)
    beginning = tools.random_prompt(200, 5)

    def answer(*, as_graphs: bool) -> tuple[dict[str, list[int]], dict[str, torch.Tensor], int, int]:
        seen = tools.open_engine(tmp_path, overlap=overlap, max_num_seqs=8, max_num_batched_tokens=96)
        runner = seen.engine.runner
        prefills, decodes = Uncaptured(runner, graph_buckets(8, 128)), UncapturedDecodes(runner)
        if as_graphs:
            # Kernel by kernel as on CUDA, each by its torch body.
            monkeypatch.setattr(paged_attention, "use_triton", lambda tensor: True)
            runner._prefill_graphs, runner._decode_graphs = prefills, decodes  # type: ignore[assignment]
        tokens = {}
        for wave in range(2):
            for index in range(4):
                prompt = beginning[: 200 * wave] + tools.random_prompt(3 + 61 * index, index)
                seen.add(f"{wave}.{index}", prompt, max_tokens=20 + index)
            tokens |= seen.run()
        assert seen.engine.stats().prefix_hit_tokens_total > 0
        monkeypatch.undo()
        logits = {name: torch.stack(rows) for name, rows in seen.logits.items()}
        return tokens, logits, len(prefills.used), decodes.replays

    tokens, logits, prefills, decodes = answer(as_graphs=True)
    expected_tokens, expected, *_ = answer(as_graphs=False)
    assert prefills > 5
    assert decodes > 20
    assert tokens == expected_tokens
    for name, rows in expected.items():
        assert tools.relative_error(logits[name], rows) <= 1e-5, name
