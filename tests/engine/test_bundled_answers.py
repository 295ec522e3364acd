"""The bundled models in the engine: correct answers, equal to those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meltcore import LLM, SamplingParams
from meltcore.measure.problems import evaluation_set, generate, is_correct
from meltcore.models.checkpoints.checkpoint import BUNDLED_GEMMA, BUNDLED_HYBRID, BUNDLED_MODEL, open_checkpoint

GREEDY = SamplingParams(max_tokens=256)
ACCURACY = 0.95
each_model = pytest.mark.parametrize("model", [BUNDLED_MODEL, BUNDLED_HYBRID, BUNDLED_GEMMA])


def conversations(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": problem.question}] for problem in evaluation_set()[:count]]


def accuracy(llm: LLM, count: int = 100) -> float:
    problems = evaluation_set()[:count]
    answers = llm.chat(conversations(len(problems)), GREEDY)
    right = [is_correct(problem, answer.text) for problem, answer in zip(problems, answers, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
@each_model
def test_held_out_accuracy(model: str) -> None:
    """12 problems concurrently, with a budget that cuts the long prompts into chunks."""
    assert accuracy(LLM(model, device="cpu", max_num_batched_tokens=500, memory_bytes=2**27), 12) >= ACCURACY


@pytest.mark.slow
@each_model
def test_tokens_equal_transformers(model: str) -> None:
    llm = LLM(model, device="cpu", memory_bytes=2**26)
    answers = llm.chat(conversations(5), GREEDY)
    folder = open_checkpoint(model, files="text").folder
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert max(len(answer.prompt_token_ids) for answer in answers) > 200
    for answer in answers:
        assert answer.finish_reason == "stop"
        # Each token is the best after those before it: what greedy generation does, in one pass.
        whole = torch.tensor([answer.prompt_token_ids + answer.token_ids])
        with torch.no_grad():
            logits = reference(whole, logits_to_keep=len(answer.token_ids) + 1).logits
        assert logits[0, :-1].argmax(-1).tolist() == answer.token_ids
        assert answer.token_ids[-1] in reference.generation_config.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 2048},
        {"rope_local_base_freq": 100_000},
        {"rope_scaling": None},
        {"sliding_window_pattern": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_wrong_windows_and_rotary_embeddings_lose_the_fact(tmp_path: Path, change: dict[str, int | None]) -> None:
    folder = shutil.copytree(open_checkpoint(BUNDLED_GEMMA, files="all").folder, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    problems = generate("heldout", kind="long", num_problems=4, seed=5)
    answers = LLM(str(folder), device="cpu", memory_bytes=2**26).chat(
        [[{"role": "user", "content": problem.question}] for problem in problems], SamplingParams(max_tokens=80)
    )
    assert sum(is_correct(problem, answer.text) for problem, answer in zip(problems, answers, strict=True)) <= 1


def test_reasoning_is_separate_from_the_answer() -> None:
    (answer,) = LLM(BUNDLED_HYBRID, device="cpu", memory_bytes=2**26).chat(
        conversations(1), GREEDY, chat_template_kwargs={"enable_thinking": True}
    )
    assert answer.reasoning
    assert "think>" not in answer.reasoning + answer.text
    assert is_correct(evaluation_set()[0], answer.text)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_model
def test_held_out_accuracy_on_cuda(model: str, dtype: str) -> None:
    assert accuracy(LLM(model, device="cuda", dtype=dtype, memory_bytes=2**31)) >= ACCURACY
