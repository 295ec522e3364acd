"""Recurrent state in the engine: every way of running a sequence gives what it gives alone and in one piece."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import hybrid_tools
import pytest
import torch

TOLERANCE = 1e-4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def assert_as_alone(
    seen: tools.SeenEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, prompts: dict[str, list[int]]
) -> None:
    """Run what was added, and compare the logits of every generated token with an engine's that has nothing else."""
    tokens = seen.run()
    for request_id, prompt in prompts.items():
        alone = hybrid_tools.open_hybrid(folder, monkeypatch, debug=("no-prefix-cache",))
        alone.add("alone", prompt, max_tokens=len(tokens[request_id]))
        assert alone.run()["alone"] == tokens[request_id]
        ours, theirs = torch.stack(seen.logits[request_id]), torch.stack(alone.logits["alone"])
        assert tools.relative_error(ours, theirs) <= TOLERANCE, request_id


def test_the_state_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loses the state half way gives other logits: the comparisons of this file can fail."""
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, max_num_batched_tokens=64)
    seen.add("one", tools.random_prompt(100, 1), max_tokens=1)
    seen.engine.step()
    for layer in hybrid_tools.RECURRENT:
        seen.engine.runner.caches[layer][1].zero_()
    with pytest.raises(AssertionError):
        assert_as_alone(seen, folder, monkeypatch, {"one": tools.random_prompt(100, 1)})


@pytest.mark.parametrize("budget", [1, 7, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_in_pieces_and_in_company(folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int, overlap: bool) -> None:
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, max_num_batched_tokens=budget, overlap=overlap)
    prompts = {f"r{index}": tools.random_prompt(1 + 37 * index, index) for index in range(4)}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
    assert_as_alone(seen, folder, monkeypatch, prompts)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slot_passes_on_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """More sequences than slots, some aborted half way: who comes next begins from nothing."""
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, max_num_seqs=2, overlap=overlap)
    for index in range(3):
        seen.add(f"gone {index}", tools.random_prompt(70, 10 + index), max_tokens=50)
    for _ in range(4):
        seen.engine.step()
    seen.engine.abort([f"gone {index}" for index in range(3)])
    prompts = {f"r{index}": tools.random_prompt(5 + 30 * index, index) for index in range(5)}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
    assert_as_alone(seen, folder, monkeypatch, prompts)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_resume_with_same_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    prompts = {f"r{index}": tools.random_prompt(100, 50 + index) for index in range(3)}
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, overlap=overlap, pages=6, max_model_len=300)
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=100)
    assert_as_alone(seen, folder, monkeypatch, prompts)
    assert seen.engine.stats().preemptions_total > 0
