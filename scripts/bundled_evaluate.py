"""Greedy accuracy of a written checkpoint, by transformers only."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meltcore.measure.problems import Problem, generate, is_correct

_BATCH = 100
_LONGEST_ANSWER = 96


def evaluate(folder: Path, *, short: int, long: int, seed: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return problems, right answers and accuracy by kind; bf16 weights, computed in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    mixed = generate("heldout", kind="mixed", num_problems=long * 2, seed=seed)
    sets = {
        "short": generate("heldout", kind="short", num_problems=short, seed=seed),
        "medium": [each for each in mixed if each.kind == "medium"],
        "long": generate("heldout", kind="long", num_problems=long, seed=seed),
    }
    results = {}
    for kind, problems in sets.items():
        right = sum(
            _right(model, tokenizer, problems[at : at + _BATCH], device) for at in range(0, len(problems), _BATCH)
        )
        results[kind] = {"problems": len(problems), "right": right, "accuracy": round(right / len(problems), 5)}
    return results


def _right(model: torch.nn.Module, tokenizer: AutoTokenizer, problems: list[Problem], device: torch.device) -> int:
    chats = [[{"role": "user", "content": each.question}] for each in problems]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True, enable_thinking=False
    ).to(device)
    output = model.generate(**inputs, max_new_tokens=_LONGEST_ANSWER)
    replies = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(is_correct(problem, reply) for problem, reply in zip(problems, replies, strict=True))
