"""Our logits against transformers' on random checkpoints with peaked attention: float32, relative error 1e-4."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch
from transformers import PreTrainedModel

from meltcore.engine.host.step_pacing import StepTurn
from meltcore.protocol.step_sums import StepKind, sums_by_kind, total_steps

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "qwen3_moe", "qwen3_5_moe_text", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(family: str) -> PreTrainedModel:
    return tools.make_reference(family=family)


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder


def assert_parity(seen: tools.SeenEngine, reference: PreTrainedModel, prompts: dict[str, list[int]]) -> None:
    tokens = seen.run()
    for request_id, prompt in prompts.items():
        ours = torch.stack(seen.logits[request_id])
        theirs = tools.reference_logits(reference, prompt, tokens[request_id])
        error = tools.relative_error(ours, theirs)
        assert error <= TOLERANCE, f"{request_id}: relative error {error:.2e}"
        assert tokens[request_id] == ours.argmax(-1).tolist()
        # The reference may choose the other one of two tokens whose logits differ by less than rounding.
        chosen = theirs.gather(-1, torch.tensor(tokens[request_id])[:, None])[:, 0]
        assert (theirs.amax(-1) - chosen).max() <= TOLERANCE * theirs.abs().max()


def test_attention_of_the_test_checkpoint_is_peaked(reference: PreTrainedModel) -> None:
    peak = tools.attention_peak(reference, tools.random_prompt(200, 0))
    assert peak > 0.2, "uniform attention over 100 keys or more would put 0.01 on each"


@pytest.mark.slow
@pytest.mark.parametrize(("length", "max_tokens"), [(1, 70), (63, 4), (64, 4), (65, 4), (254, 6)])
def test_prefill_then_decode_equals_transformers(
    reference: PreTrainedModel, checkpoint: Path, length: int, max_tokens: int
) -> None:
    """Each answer but that to 65 tokens goes on in the next page."""
    seen = tools.open_engine(checkpoint)
    prompt = tools.random_prompt(length, length)
    seen.add("one", prompt, max_tokens=max_tokens)
    assert_parity(seen, reference, {"one": prompt})


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 7, 64, 100])
def test_chunked_prefill_equals_transformers(reference: PreTrainedModel, checkpoint: Path, budget: int) -> None:
    seen = tools.open_engine(checkpoint, max_num_batched_tokens=budget)
    lengths = (70, 8) if budget == 1 else (150, 90)  # of pages of 64 tokens
    prompts = {
        name: tools.random_prompt(length, seed) for name, length, seed in zip("ab", lengths, (1, 2), strict=True)
    }
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
    assert_parity(seen, reference, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_many_sequences_of_different_lengths(reference: PreTrainedModel, checkpoint: Path, overlap: bool) -> None:
    seen = tools.open_engine(checkpoint, overlap=overlap, max_num_batched_tokens=96)
    prompts = {f"r{index}": tools.random_prompt(1 + 23 * index, index) for index in range(12)}
    for index, (request_id, prompt) in enumerate(prompts.items()):
        seen.add(request_id, prompt, max_tokens=3 + 2 * index)
    assert_parity(seen, reference, prompts)


@pytest.mark.slow
def test_cached_prefix_equals_transformers(family: str, reference: PreTrainedModel, checkpoint: Path) -> None:
    seen = tools.open_engine(checkpoint)
    shared = tools.random_prompt(130, 3)
    seen.add("first", [*shared, 5, 6, 7])
    seen.run()
    first = seen.engine.stats()
    # The prompt of 133 tokens gives the first of 8. A recurrent state is kept at 128, so there it takes two steps.
    num_steps = 9 if family == "qwen3_5_moe_text" else 8
    alone = sums_by_kind(first.step_sums)
    sums = total_steps(alone)
    assert (sums.steps, sums.rows, sums.prompt_tokens) == (num_steps, num_steps, 133)
    assert {kind.phase for kind in alone} == {"prompt", "decode"}
    seen.engine.take_turn(StepTurn(0.0, 10.0))
    prompts = {"again": [*shared, 5, 6, 7], "branch": shared + tools.random_prompt(40, 4), "exact": shared[:128]}
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt)
    assert_parity(seen, reference, prompts)
    # Two full pages for the first two; the third is two pages itself and keeps one token to compute, so one page: no
    # hit where that needs a recurrent state, which is kept after the last full page.
    exact = 0 if family == "qwen3_5_moe_text" else 64
    stats = seen.engine.stats()
    assert stats.prefix_hit_tokens_total == 128 + 128 + exact
    later = sums_by_kind(stats.step_sums)
    assert later.pop(StepKind("paced", 0)).seconds > 0
    assert later == alone, "all later steps were limited"


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_request_resumes_with_same_logits(
    reference: PreTrainedModel, checkpoint: Path, overlap: bool
) -> None:
    prompts = {f"r{index}": tools.random_prompt(120, 50 + index) for index in range(4)}
    seen = tools.open_engine(checkpoint, overlap=overlap, pages=8, max_model_len=300)
    for request_id, prompt in prompts.items():
        seen.add(request_id, prompt, max_tokens=16)  # the third page of each begins at the 9th
    assert_parity(seen, reference, prompts)
    assert seen.engine.stats().preemptions_total > 0


def test_tied_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    tied = tools.make_reference(seed=9, family=family, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    seen = tools.open_engine(tmp_path)
    prompt = tools.random_prompt(80, 9)
    seen.add("one", prompt)
    assert_parity(seen, tied, {"one": prompt})


def test_sharded_checkpoint_equals_transformers(reference: PreTrainedModel, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    seen = tools.open_engine(tmp_path)
    prompt = tools.random_prompt(80, 10)
    seen.add("one", prompt)
    assert_parity(seen, reference, {"one": prompt})
