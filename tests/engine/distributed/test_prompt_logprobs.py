"""Log-probabilities of prompt tokens, against transformers."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch
from test_tensor_parallel import opened
from transformers import PreTrainedModel

TOLERANCE = 2e-3  # of a log-probability, in float32
LENGTHS = (1, 2, 63, 65, 200)
TOP = 3


@torch.no_grad()
def expected_logprobs(reference: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[tokens - 1, vocab]: the distribution that each prompt token after the first was drawn from."""
    return reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def check_answers(seen: tools.SeenEngine, reference: PreTrainedModel, prompts: dict[str, list[int]]) -> None:
    """Run the prompts with log-probabilities beside some without, and compare every number."""
    for name, prompt in prompts.items():
        seen.add(name, prompt, max_tokens=20, prompt_logprobs=TOP)
        seen.add(f"{name}, plain", prompt, max_tokens=20)
    found = {}
    for output in seen.outputs():
        if output.prompt_logprobs is not None:
            assert output.request_id not in found  # they come once, with the first token
            assert len(output.token_ids) == 1
            found[output.request_id] = output.prompt_logprobs
    seen.engine.check_idle()
    assert set(found) == set(prompts)
    for name, prompt in prompts.items():
        expected = expected_logprobs(reference, prompt)
        assert len(found[name]) == len(prompt) - 1
        for token_id, logprobs, row in zip(prompt[1:], found[name], expected, strict=True):
            assert logprobs.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            assert len(logprobs.top_token_ids) == TOP
            assert logprobs.top_logprobs == pytest.approx(row.topk(TOP).values.tolist(), abs=TOLERANCE)
            if logprobs.top_token_ids[0] == token_id:
                assert logprobs.top_logprobs[0] == logprobs.logprob  # lm-evaluation-harness compares for equality


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_text"])
def test_prompt_logprobs_equal_transformers(family: str, overlap: bool, tmp_path: Path) -> None:
    """Prompts cut into chunks, their positions in blocks of five, and pages of all of them in the prefix cache."""
    reference = tools.make_reference(family=family)
    reference.save_pretrained(tmp_path)
    seen = tools.open_engine(tmp_path, overlap=overlap, max_num_batched_tokens=64)
    seen.engine.runner._config = seen.engine.runner._config._replace(logit_rows=5)
    prompts = {f"{length} tokens": tools.random_prompt(length, length) for length in LENGTHS}
    check_answers(seen, reference, prompts)
    hits = seen.engine.scheduler.prefix_hit_tokens
    for name, prompt in prompts.items():
        seen.add(name, prompt, max_tokens=1, prompt_logprobs=0)
    for output in seen.outputs():
        assert len(output.prompt_logprobs or []) == len(prompts[output.request_id]) - 1
        assert output.cached_tokens == 0
    assert seen.engine.scheduler.prefix_hit_tokens == hits


def test_preempted_request_returns_same_prompt_logprobs(checkpoint: Path, reference: PreTrainedModel) -> None:
    seen = tools.open_engine(checkpoint, overlap=True, pages=16, max_num_batched_tokens=64)
    prompts = {f"prompt {number}": tools.random_prompt(190, number) for number in range(6)}
    check_answers(seen, reference, prompts)
    assert seen.engine.scheduler.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_ranks_return_the_prompt_logprobs_of_one_device(
    checkpoint: Path, reference: PreTrainedModel, ranks: int
) -> None:
    with opened(checkpoint, ranks, max_num_batched_tokens=64) as seen:
        check_answers(seen, reference, {f"{length}": tools.random_prompt(length, length) for length in LENGTHS})
