"""Qwen3-0.6B with FP8 linear layers against bfloat16 ones: speed, logits, and the bundled model's accuracy.

Output tokens per second as in offline.py, both in the same run and on the same dummy weights. Logits are those of the
first token after some prompts: how much they differ, by their spread, and how often the likeliest token is the same.

    python benchmarks/fp8.py     # the table and benchmarks/results/fp8.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from typing import NamedTuple

import torch
from bench_output import Row, write_result
from offline import HIGHEST_ID, LOWEST_ID

from meltcore import LLM, SamplingParams
from meltcore.engine.request import Request
from meltcore.engine.runner import LogitsAt
from meltcore.engine.sampler import SampleResult
from meltcore.problems import evaluation_set, is_right

FORMS = ("none", "fp8")
OUT = 128
LOGIT_PROMPTS, LOGIT_PROMPT_TOKENS = 64, 128


class Measured(NamedTuple):
    """device: its name; tokens_per_s: by level; logits: [prompts, vocab] float32; accuracy: share right."""

    device: str
    tokens_per_s: dict[int, float]
    logits: torch.Tensor
    accuracy: float


def measure(model: str, form: str, levels: list[int], repetitions: int) -> Measured:
    """In a process of its own, so that each form has the whole GPU."""
    llm = LLM(
        model,
        dtype="bfloat16",
        quantization=form,
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=max(levels),
        debug=("no-prefix-cache",),
    )
    logits = first_logits(llm)
    tokens_per_s = {level: speed(llm, level, repetitions) for level in levels}
    device = llm.engine.ready().device
    return Measured(device, tokens_per_s, logits, accuracy(form))


def random_prompts(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(draw.randint(low, high))] for _ in range(count)]


def speed(llm: LLM, level: int, repetitions: int) -> float:
    """Output tokens per second of `level` requests that start together; the median."""
    llm.generate(random_prompts(level, 128, 1024, 0), SamplingParams(max_tokens=8, ignore_eos=True))
    walls = []
    for repetition in range(repetitions):
        prompts = random_prompts(level, 128, 1024, 1 + repetition)
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=OUT, ignore_eos=True))
        walls.append(time.perf_counter() - started)
    return level * OUT / statistics.median(walls)


def first_logits(llm: LLM) -> torch.Tensor:
    """[LOGIT_PROMPTS, vocab] float32, in the order of the prompts."""
    runner = llm.engine.runner
    choose = runner.choose
    seen: dict[int, torch.Tensor] = {}

    def recording(logits_at: LogitsAt, token_ids: torch.Tensor, requests: list[Request]) -> SampleResult:
        logits = logits_at(torch.arange(len(requests), device=token_ids.device)).float().cpu()
        seen.update((request.order, logits[row]) for row, request in enumerate(requests))
        return choose(logits_at, token_ids, requests)

    runner.choose = recording  # type: ignore[method-assign]
    prompts = random_prompts(LOGIT_PROMPTS, LOGIT_PROMPT_TOKENS, LOGIT_PROMPT_TOKENS, 99)
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    runner.choose = choose  # type: ignore[method-assign]
    return torch.stack([seen[order] for order in sorted(seen)])


def accuracy(form: str) -> float:
    """Share of the bundled model's 200 held-out problems that are answered right."""
    llm = LLM("meltcore/sums", dtype="bfloat16", quantization=form, memory_bytes=2**31)
    problems = evaluation_set()
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    answers = llm.chat(chats, SamplingParams(max_tokens=256))
    return sum(is_right(problem, each.text) for problem, each in zip(problems, answers, strict=True)) / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--levels", default="1,10,100,1000", help="requests that start together")
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()

    levels = [int(level) for level in args.levels.split(",")]
    found = {}
    for form in FORMS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[form] = pool.submit(measure, args.model, form, levels, args.reps).result()
    wide, ours = found["none"], found["fp8"]
    rows = [
        Row(
            work=f"{ours.device}: {level:,} requests, 128 to 1024 in / {OUT} out, FP8 weights",
            unit="output tokens/s",
            value=ours.tokens_per_s[level],
            peer="bfloat16",
            peer_value=wide.tokens_per_s[level],
            ratio=ours.tokens_per_s[level] / wide.tokens_per_s[level],
        )
        for level in levels
    ]
    difference = (ours.logits - wide.logits).std() / wide.logits.std()
    same = (ours.logits.argmax(-1) == wide.logits.argmax(-1)).double().mean()
    rows += [
        Row(work=f"logits after {LOGIT_PROMPTS} prompts, FP8 less bfloat16", unit="of spread", value=float(difference)),
        Row(work="the same likeliest token, dummy weights", unit="share", value=float(same)),
        Row(
            work="meltcore/sums, 200 held-out problems, FP8 weights",
            unit="share right",
            value=ours.accuracy,
            peer="bfloat16",
            peer_value=wide.accuracy,
            reach=0.95,
        ),
    ]
    write_result("fp8", rows, {"torch": metadata.version("torch"), "triton": metadata.version("triton")})


if __name__ == "__main__":
    main()
