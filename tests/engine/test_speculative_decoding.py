"""Speculative decoding gives the tokens that an engine without it gives, whatever is drafted and rejected."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from speculation_tools import NGRAM, ForcedDrafts

from meltcore.engine.core.batch import Windows
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.request import Request
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.generation.speculation import Speculation
from meltcore.engine.worker import sampler
from meltcore.engine.worker.drafter import Drafter, NgramDrafter
from meltcore.engine.worker.sampler import Drafts, Sampler
from meltcore.protocol.generation import SequenceOutput
from meltcore.protocol.sampling_params import Grammar

PROMPTS = {f"r{index}": tools.random_prompt(3 + 61 * index, index) for index in range(3)}
# These are sampled again and again, so that penalties decide.
_FEW_TOKENS: dict[str, object] = {"temperature": 1.0, "seed": 9, "logit_bias": dict.fromkeys(range(5, 13), 40.0)}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 7},
    "filters": {"temperature": 1.2, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {**_FEW_TOKENS, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "repetition": {**_FEW_TOKENS, "repetition_penalty": 1.3},
    "min_tokens": {"temperature": 1.0, "seed": 10, "min_tokens": 20, "ignore_eos": False},
    "bias": {"logit_bias": {5: 3.0, 9: -4.0}, "temperature": 1.0, "seed": 11},
    "logprobs": {"logprobs": 3},
}


def answers(seen: tools.SeenEngine, sampling: dict[str, object], tokens: int = 24) -> dict[str, list[int]]:
    for request_id, prompt in PROMPTS.items():
        seen.add(request_id, prompt, **{"max_tokens": tokens, **sampling})
    return seen.run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tools.make_reference().save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLING)
def test_tokens_are_those_without_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    truth = answers(tools.open_engine(folder), SAMPLING[kind])
    seen = tools.open_engine(folder, speculative_config=NGRAM)
    for num_right in range(4):
        with monkeypatch.context() as patch:
            forced = ForcedDrafts(patch, truth, num_right)
            assert answers(seen, SAMPLING[kind]) == truth
        assert forced.num_windows.get(num_right, 0) >= 9
        assert max(forced.num_windows) == num_right


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "qwen3_moe", "qwen3_5_moe_text"])
def test_families_give_the_tokens_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Drafts slide out of a window of attention, go to experts, and are rolled back in recurrent states."""
    tools.make_reference(family=family).save_pretrained(tmp_path)
    truth = answers(tools.open_engine(tmp_path), {}, 80)
    seen = tools.open_engine(tmp_path, speculative_config=NGRAM)
    for num_right in (2, 3):
        with monkeypatch.context() as patch:
            ForcedDrafts(patch, truth, num_right)
            assert answers(seen, {}, 80) == truth


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow])])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_text"])
def test_steps_with_and_without_drafts_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, device: str
) -> None:
    """Steps without drafts are launched one ahead, and some sequences come, go or have no drafts meanwhile."""
    tools.make_reference(family=family).save_pretrained(tmp_path)
    sampling = {**SAMPLING["penalties"], "max_tokens": 40}

    plain = tools.open_engine(tmp_path, device=device)
    for request_id, prompt in PROMPTS.items():
        plain.add(request_id, prompt, **sampling)
    truth = plain.run()

    ForcedDrafts(monkeypatch, truth, 2)
    choices = random.Random(1)
    monkeypatch.setattr(Speculation, "begin", lambda self, _running: choices.choice([0, 0, self._num_drafts]))
    seen = tools.open_engine(tmp_path, device=device, overlap=True, speculative_config=NGRAM)
    outputs: list[SequenceOutput] = []
    for index, (request_id, prompt) in enumerate(PROMPTS.items()):
        seen.add(request_id, prompt, **sampling, speculative_decoding=index != 1)
        seen.add(f"aborted {index}", prompt, **sampling)
        for _ in range(3):
            outputs += seen.engine.step().outputs
        seen.engine.abort([f"aborted {index}"])
    outputs += seen.outputs()
    seen.engine.check_idle()
    for request_id, tokens in truth.items():
        assert [token for each in outputs if each.request_id == request_id for token in each.token_ids] == tokens


def test_histories_are_those_of_their_rows_after_preemptions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tools.open_engine(folder, speculative_config=NGRAM, pages=6, max_model_len=256)
    whole, checked = NgramDrafter.propose, 0

    def checking(drafter: NgramDrafter, windows: Windows, token_ids: torch.Tensor) -> torch.Tensor:
        nonlocal checked
        outcomes = whole(drafter, windows, token_ids)
        for index, first in enumerate(windows.first_rows[:-1]):
            request = windows.requests[first]
            length = len(request.token_ids)
            assert drafter._tables.histories[request.row, :length].tolist() == request.token_ids.tolist()
            assert int(drafter._tables.lengths[request.row]) == length + int(outcomes[index, 0])
            checked += 1
        return outcomes

    monkeypatch.setattr(NgramDrafter, "propose", checking)
    monkeypatch.setattr(Speculation, "begin", lambda self, _scheduler: self._num_drafts)  # whether they pay or not
    for request_id, prompt in PROMPTS.items():
        seen.add(request_id, prompt, max_tokens=100)
    seen.run()
    assert seen.engine.scheduler.preemptions > 0
    assert checked > 100


def test_no_request_is_preempted_for_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the first request would need the page that the second one needs for its next token."""

    def answers_on_three_pages(**settings: object) -> tuple[dict[str, list[int]], int]:
        seen = tools.open_engine(folder, pages=3, max_model_len=128, enable_prefix_caching=False, **settings)
        seen.add("first", tools.random_prompt(58, 1), max_tokens=10)
        seen.add("second", tools.random_prompt(63, 2), max_tokens=4)
        return seen.run(), seen.engine.scheduler.preemptions

    truth, preemptions = answers_on_three_pages()
    ForcedDrafts(monkeypatch, {"first": truth["first"]}, 0)
    assert answers_on_three_pages(speculative_config=NGRAM | {"num_speculative_tokens": 7}) == (truth, preemptions)
    assert preemptions == 0


def test_steps_without_decodes_that_take_drafts_stay_as_they_are(folder: Path) -> None:
    seen = tools.open_engine(folder, speculative_config=NGRAM, overlap=True)
    for request_id, prompt in PROMPTS.items():
        seen.add(request_id, prompt, max_tokens=30, speculative_decoding=False)
    num_in_flight = 0
    for _ in range(20):
        seen.engine.step()
        num_in_flight += seen.engine._launched is not None
    seen.run()
    assert num_in_flight == 20
    assert sum(seen.engine.stats().drafted) == 0


@pytest.mark.slow
def test_two_ranks_check_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, by the candidates of both ranks, and from whole rows on the first one. One device gives these tokens."""
    sampling = {"r0": {}, "r1": SAMPLING["temperature"], "r2": {**SAMPLING["filters"], "presence_penalty": 1.5}}

    def answers_of(**settings: object) -> dict[str, list[int]]:
        seen = tools.open_engine(folder, **settings)
        for request_id, prompt in PROMPTS.items():
            seen.add(request_id, prompt, **{"max_tokens": 24, **sampling[request_id]})
        found = seen.run()
        seen.engine.close()
        return found

    truth = answers_of()
    forced = ForcedDrafts(monkeypatch, truth, 2)
    assert answers_of(tensor_parallel_size=2, speculative_config=NGRAM) == truth
    assert forced.num_windows[2] > 9


GRAMMARS = {
    "r0": Grammar("start: /[0-9]{3}x[0-9]{3}/"),
    "r1": Grammar(r'start: /\{"a": [0-9]{1,9}, "b": "(no|yes)"\}/'),
    "r2": Grammar("start: /[a-z]{9,30}/", reasoning_ids=(300, 301), starts_in_reasoning=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_follow_their_grammars(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overlap: bool
) -> None:
    """Masks of the tokens after drafts, which end an answer, leave its grammar, or end its reasoning.

    With overlap all masks count as slow, so that each is filled by a thread of its own.
    """
    monkeypatch.setattr("meltcore.engine.core.constraints._SLOW_S", -1.0 if overlap else 1.0)
    path = tools.with_tokenizer(folder, tmp_path)

    def constrained(seen: tools.SeenEngine) -> dict[str, list[int]]:
        for request_id, prompt in PROMPTS.items():
            sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "logit_bias": {301: 4.0}}
            seen.add(request_id, prompt, **sampling, grammar=GRAMMARS[request_id])
        seen.add("free", PROMPTS["r0"], max_tokens=20)
        return seen.run()

    truth = constrained(tools.open_engine(path))
    assert len(truth["r0"]) in (7, 8)
    assert 301 in truth["r2"][:20]
    seen = tools.open_engine(path, speculative_config=NGRAM, overlap=overlap)
    for num_right in range(4):
        before = seen.engine.stats().masks_total
        with monkeypatch.context() as patch:
            forced = ForcedDrafts(patch, truth, num_right)
            assert constrained(seen) == truth
        assert forced.num_windows.get(num_right, 0) >= 9
        steps = sum(forced.num_windows.values()) + 2 * len(truth)
        assert seen.engine.stats().masks_total - before <= steps, "a request has one task for all masks of a step"


def test_shifted_mask_rows_change_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The mask of the token before is used for the token after each draft."""
    path = tools.with_tokenizer(folder, tmp_path)
    seen = tools.open_engine(path)
    seen.add("r1", PROMPTS["r1"], grammar=GRAMMARS["r1"], max_tokens=30, temperature=1.0, seed=3)
    truth = seen.run()
    whole = Sampler._mask_rows

    def shifted(sampler: Sampler, requests: list[Request], drafts: Drafts | None) -> torch.Tensor | None:
        return whole(sampler, requests, drafts and [each[:-1] for each in drafts])

    monkeypatch.setattr(Sampler, "_mask_rows", shifted)
    ForcedDrafts(monkeypatch, truth, 3)
    speculating = tools.open_engine(path, speculative_config=NGRAM)
    speculating.add("r1", PROMPTS["r1"], grammar=GRAMMARS["r1"], max_tokens=30, temperature=1.0, seed=3)
    assert speculating.run() != truth


def noise_of_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "positions_of", lambda requests, _drafts: [request.length for request in requests])


def penalties_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.PenaltyTable, "_add_counts", lambda *_arguments: None)


def all_sampled_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafter, "used_rows", lambda _self, windows, _outcomes: torch.ones(len(windows.drafts)) > 0)


def rejected_drafts_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scheduler.update

    def kept(self: Scheduler, scheduled: list[Chunk], sampled: list[list[int]]) -> None:
        whole(self, [chunk._replace(drafts=()) for chunk in scheduled], sampled)

    monkeypatch.setattr(Scheduler, "update", kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "kind"),
    [
        (noise_of_one_position, "temperature"),
        (penalties_without_drafts, "penalties"),
        (all_sampled_tokens_are_counted, "penalties"),
        (rejected_drafts_stay_in_the_cache, "greedy"),
    ],
)
def test_mutation_changes_the_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutation: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    truth = answers(tools.open_engine(folder), SAMPLING[kind])
    mutation(monkeypatch)
    ForcedDrafts(monkeypatch, truth, 2)
    try:
        found = answers(tools.open_engine(folder, speculative_config=NGRAM), SAMPLING[kind])
    except AssertionError:
        return
    assert found != truth
