"""Warming up leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import engine_tools as tools
import pytest
import torch

from meltcore.engine.warm_up import EXPERT_TOKENS, PROMPT_TOKENS, PROMPTS_AT_ONCE, _most_tiles, rehearse, warm_up
from meltcore.kernels import expert_product, expert_tiles
from meltcore.kernels.attention import BLOCK_QUERIES
from meltcore.kernels.delta import DeltaShape
from meltcore.kernels.delta_scan import ScanLaunch, scan_launch
from meltcore.kernels.expert_places import lot_of
from meltcore.kernels.expert_product import form_of, launches_of
from meltcore.kernels.expert_tiles import suits_tiles


@pytest.mark.parametrize("max_model_len", [20, 300])
def test_answers_are_the_same_after_a_rehearsal_and_a_warm_up(checkpoint: Path, max_model_len: int) -> None:
    logits = []
    for warm in (False, True):
        seen = tools.open_engine(checkpoint, max_model_len=max_model_len)
        if warm:
            rehearse(seen.engine.runner, 0, max_model_len, 140)  # decode steps have no torch body
            assert not seen.engine.runner._last_token.any()
            warm_up(seen.engine.runner, 4, max_model_len, 140)
            seen.logits.clear()
        seen.add("one", tools.random_prompt(12, 1), max_tokens=6, temperature=1.0, seed=7, frequency_penalty=1.0)
        seen.run()
        seen.engine.check_idle()
        logits.append(torch.stack(seen.logits["one"]))
    assert torch.equal(*logits)


def test_a_warm_up_writes_to_the_padding_page_alone(checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint, max_model_len=300)
    warm_up(seen.engine.runner, 4, 300, 2048)
    for keys, values in seen.engine.runner.caches:
        assert keys[0].any()
        assert not keys[1:].any()
        assert not values[1:].any()


@pytest.mark.parametrize("width", [768, 512, 256, 128, 64])
def test_prompts_cover_every_launch_of_routed_experts(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table of an H200: Qwen3-30B-A3B's experts, and Qwen3.5-35B-A3B's on one to eight GPUs."""
    for module in (expert_product, expert_tiles):
        monkeypatch.setattr(module, "capability", lambda device: 90)
    experts, choices = (128, 8) if width == 768 else (257, 9)
    gate_up = torch.empty(experts, 2 * width, 2048, dtype=torch.bfloat16, device="meta")
    down = torch.empty(experts, 2048, width, dtype=torch.bfloat16, device="meta")

    def launches(tokens: int) -> object:
        chosen = torch.empty(tokens, choices, dtype=torch.int32, device="meta")
        if suits_tiles(gate_up[0], chosen, gate_up, down):
            return "tiles"
        form, pairs = form_of(tokens, down), chosen.numel()
        return form, launches_of(pairs, gate_up, down), lot_of(pairs) if form == "placed" else None

    assert set(map(launches, range(1, 8193))) == set(map(launches, PROMPT_TOKENS + EXPERT_TOKENS))


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "tokens", "most"),
    [
        (1024, 4096, 8192, 1119),  # 1,023 of two tokens, and the rest in 96 tiles
        (16, 4096, 2048, 47),
        (16, 300, 8192, 80),  # each of five
        (4, 300, 140, 6),
        (1, 2, 2, 1),
    ],
)
def test_a_warm_up_has_as_many_tiles_of_queries_as_a_step_can(
    max_num_seqs: int, max_model_len: int, tokens: int, most: int
) -> None:
    chunks = _most_tiles(max_num_seqs, max_model_len, tokens)
    assert sum(-(-chunk.size // BLOCK_QUERIES) for chunk in chunks) == most
    assert len(chunks) <= max_num_seqs
    assert sum(chunk.size for chunk in chunks) <= tokens
    assert all(2 <= chunk.size <= max_model_len for chunk in chunks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_prompts_at_once_cover_every_launch_of_a_recurrent_layer(ranks: int) -> None:
    """Of Qwen3.5-35B-A3B on an H200: what is not warmed up would be compiled in the middle of serving."""
    shape = DeltaShape(16 // ranks, 32 // ranks, 128, 128, 4)

    def launches(counts: Iterable[int]) -> set[ScanLaunch]:
        return {scan_launch(shape, count, 2, torch.device("cpu")) for count in counts}

    assert launches(range(1, 513)) == launches((1, *PROMPTS_AT_ONCE))
