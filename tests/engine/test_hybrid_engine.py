"""Recurrent states in the engine: every way of running a sequence gives the logits of running it alone and whole."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import hybrid_tools
import pytest
import torch
from speculation_tools import NGRAM, ForcedDrafts

from meltcore.engine.worker.warm_up import StepLimits, warm_up

TOLERANCE = 1e-4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def assert_as_alone(
    seen: tools.SeenEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, prompts: dict[str, list[int]]
) -> None:
    """Run what was added, and compare the logits of every generated token with those of a prompt that is computed in
    one piece, by itself, from position 0."""
    seen.run()
    plain = hybrid_tools.open_hybrid(folder, monkeypatch, enable_prefix_caching=False)
    for request_id, prompt in prompts.items():
        ours = torch.stack(seen.logits[request_id])
        plain.add(request_id, prompt, max_tokens=len(ours))
        plain.run()
        theirs = torch.stack(plain.logits[request_id])
        assert tools.relative_error(ours, theirs) <= TOLERANCE, request_id


def test_losing_the_recurrent_state_changes_the_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loses the state gives different logits: the comparisons of this file can fail."""
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, max_num_batched_tokens=64)
    seen.add("one", tools.random_prompt(100, 1), max_tokens=1)
    seen.engine.step()
    for layer in hybrid_tools.RECURRENT:
        seen.engine.runner.caches[layer][1].zero_()
    with pytest.raises(AssertionError):
        assert_as_alone(seen, folder, monkeypatch, {"one": tools.random_prompt(100, 1)})


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 7, 100])
@pytest.mark.parametrize("overlap", [False, True])
def test_chunked_and_batched_prompts_give_the_same_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int, overlap: bool
) -> None:
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, max_num_batched_tokens=budget, overlap=overlap)
    prompts = {f"r{index}": tools.random_prompt(1 + 23 * index, index) for index in range(4)}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=4)
    assert_as_alone(seen, folder, monkeypatch, prompts)


@pytest.mark.parametrize("overlap", [False, True])
def test_reused_slot_starts_from_zero(folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """More sequences than slots, some aborted: the next sequence of a slot starts from zeros."""
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


def test_warm_up_writes_only_the_padding_page_and_the_null_slot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, max_model_len=300)
    warm_up(seen.engine.runner, StepLimits(4, 300, 600))
    for pair in seen.engine.runner.caches:
        for cache in pair:
            assert cache[0].any()
            assert not cache[1:].any()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_resume_with_same_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    prompts = {f"r{index}": tools.random_prompt(120, 50 + index) for index in range(3)}
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, overlap=overlap, pages=5, max_model_len=300)
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=16)
    assert_as_alone(seen, folder, monkeypatch, prompts)
    assert seen.engine.stats().preemptions_total > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_third_prompt_with_a_common_prefix_hits(folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """The first leaves its pages, the second finds them without a state and keeps one, the third continues from it."""
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, overlap=overlap)
    shared = tools.random_prompt(130, 3)
    hits = []
    prompts = {f"r{index}": shared + tools.random_prompt(90, 10 + index) for index in range(3)}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
        hits.append(-seen.engine.stats().prefix_hit_tokens_total)
        seen.run()
        hits[-1] += seen.engine.stats().prefix_hit_tokens_total
    assert hits == [0, 0, 128]
    assert_as_alone(seen, folder, monkeypatch, prompts)


@pytest.mark.parametrize("length", [70, 128, 200])
def test_next_turn_of_a_conversation_hits(folder: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    seen = hybrid_tools.open_hybrid(folder, monkeypatch)
    first = tools.random_prompt(length, 4)
    seen.add("first", first)
    answer = seen.run()["first"]
    second = first + answer + tools.random_prompt(20, 5)
    seen.add("second", second)
    assert_as_alone(seen, folder, monkeypatch, {"second": second})
    assert seen.engine.stats().prefix_hit_tokens_total == length // 64 * 64


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_few_slots_with_many_common_prefixes_give_the_same_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Snapshots are taken, restored and evicted among running and aborted sequences."""
    seen = hybrid_tools.open_hybrid(
        folder, monkeypatch, overlap=overlap, max_num_seqs=3, recurrent_slots=5, pages=8, max_model_len=300
    )
    prefixes = [tools.random_prompt(130, index) for index in range(2)]
    prompts = {f"r{index}": prefixes[index % 2] + tools.random_prompt(index, index) for index in range(16)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        seen.add(request_id, prompt, max_tokens=5 + 7 * (index % 3))
        seen.engine.step()
        if index % 4 == 3:
            seen.engine.abort([request_id])
    kept = {request_id: prompt for number, (request_id, prompt) in enumerate(prompts.items()) if number % 4 != 3}
    assert_as_alone(seen, folder, monkeypatch, kept)
    assert seen.engine.stats().prefix_hit_tokens_total > 0


@pytest.mark.slow
def test_sequences_with_drafts_keep_their_tokens_in_few_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are restored, sequences preempted and aborted, while accepted drafts wait to be replayed."""
    prefix = tools.random_prompt(130, 0)
    prompts = {f"r{index}": prefix + tools.random_prompt(index, index) for index in range(7)}
    plain = hybrid_tools.open_hybrid(folder, monkeypatch, enable_prefix_caching=False)
    truth: dict[str, list[int]] = {}
    for request_id, prompt in prompts.items():
        plain.add(request_id, prompt, max_tokens=70)
        truth |= plain.run()
    forced = ForcedDrafts(monkeypatch, truth, 2)
    limits = {"max_num_seqs": 3, "recurrent_slots": 5, "pages": 7, "max_model_len": 300}
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, speculative_config=NGRAM, **limits)
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=70)
    outputs = []
    for number, output in enumerate(seen.outputs()):
        outputs.append(output)
        if number == 9:
            seen.engine.abort([output.request_id])
            del truth[output.request_id]
    seen.engine.check_idle()
    for request_id, tokens in truth.items():
        assert [each for output in outputs if output.request_id == request_id for each in output.token_ids] == tokens
    assert forced.num_windows[2] > 90
    assert min(seen.engine.stats().prefix_hit_tokens_total, seen.engine.stats().preemptions_total) > 0


def test_ended_sequences_release_their_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = hybrid_tools.open_hybrid(folder, monkeypatch, overlap=True, max_num_seqs=2)
    states = seen.engine.states
    assert states is not None
    for index in range(3):
        seen.add(f"r{index}", tools.random_prompt(70, index), max_tokens=50)
    seen.engine.step()
    seen.engine.abort(["r0"])
    with pytest.raises(AssertionError, match="still"):
        seen.engine.check_idle()
    assert seen.engine.stats().recurrent_state_slots_used == states.num_used > 0
    seen.run()
    stats = seen.engine.stats()
    assert (stats.recurrent_state_slots_used, stats.recurrent_state_slots) == (0, states.total)
    assert stats.recurrent_state_snapshots == len(states.snapshots) > 0
