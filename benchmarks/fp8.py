"""Qwen3-0.6B in FP8 against bfloat16: speed, logits, and the bundled model's accuracy.

FP8 linear layers alone, keys and values in FP8 alone, and both.

Output tokens per second as in offline.py, all in the same run and on the same dummy weights. Logits are those of the
first token after some prompts: their difference in standard deviations, and how often the argmax is equal.

    python benchmarks/fp8.py     # the table and benchmarks/results/fp8/h200.json
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
from bench_output import Row, Target, need_gpu, write_result

from meltcore import LLM, SamplingParams
from meltcore.engine.core.request import Request
from meltcore.engine.worker.model_runner import LogitsAt
from meltcore.engine.worker.sampler import Drafts, SampleResult
from meltcore.measure.problems import evaluation_set, is_correct

# quantization, kv_cache_dtype
WIDE = ("none", "auto")
BOTH = "FP8 weights and KV"
FORMS = {"FP8 weights": ("fp8", "auto"), "FP8 KV": ("none", "fp8"), BOTH: ("fp8", "fp8")}
TARGETS = {level: Target(ratio, of="ratio") for level, ratio in ((1, 1.2), (10, 1.2), (100, 1.3), (1000, 1.45))}
OUT = 128
LOWEST_ID, HIGHEST_ID = 1000, 140_000  # of a prompt's tokens
LOGIT_PROMPTS, LOGIT_PROMPT_TOKENS = 64, 128


class Measured(NamedTuple):
    """device: its name; tokens_per_s: by level; logits: [prompts, vocab] float32; accuracy: share right."""

    device: str
    tokens_per_s: dict[int, float]
    logits: torch.Tensor
    accuracy: float


def measure(model: str, form: tuple[str, str], levels: list[int], repetitions: int) -> Measured:
    """In a process of its own, so that each form has the whole GPU."""
    llm = LLM(
        model,
        dtype="bfloat16",
        quantization=form[0],
        kv_cache_dtype=form[1],
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=max(levels),
        enable_prefix_caching=False,
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
    sample = runner.sample
    seen: dict[int, torch.Tensor] = {}

    def recording(
        logits_at: LogitsAt, token_ids: torch.Tensor, requests: list[Request], drafts: Drafts | None = None
    ) -> SampleResult:
        logits = logits_at(torch.arange(len(requests), device=token_ids.device)).float().cpu()
        seen.update((request.arrival, logits[row]) for row, request in enumerate(requests))
        return sample(logits_at, token_ids, requests, drafts)

    runner.sample = recording  # type: ignore[method-assign]
    prompts = random_prompts(LOGIT_PROMPTS, LOGIT_PROMPT_TOKENS, LOGIT_PROMPT_TOKENS, 99)
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    runner.sample = sample  # type: ignore[method-assign]
    return torch.stack([seen[order] for order in sorted(seen)])


def accuracy(form: tuple[str, str]) -> float:
    """Fraction of the bundled model's 200 held-out problems that are answered correctly."""
    llm = LLM("meltcore/sums", dtype="bfloat16", quantization=form[0], kv_cache_dtype=form[1], memory_bytes=2**31)
    problems = evaluation_set()
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    answers = llm.chat(chats, SamplingParams(max_tokens=256))
    return sum(is_correct(problem, each.text) for problem, each in zip(problems, answers, strict=True)) / len(problems)


def in_a_process(model: str, form: tuple[str, str], levels: list[int], repetitions: int) -> Measured:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, model, form, levels, repetitions).result()


def compare(name: str, ours: Measured, wide: Measured) -> list[Row]:
    rows = [
        Row(
            work=f"{ours.device}: {level:,} request{'s' * (level != 1)}, 128 to 1024 in / {OUT} out, {name}",
            unit="output tokens/s",
            value=value,
            peer="bfloat16",
            peer_value=wide.tokens_per_s[level],
            ratio=value / wide.tokens_per_s[level],
            target=TARGETS.get(level) if name == BOTH else None,
        )
        for level, value in ours.tokens_per_s.items()
    ]
    difference = float((ours.logits - wide.logits).std() / wide.logits.std())
    same = float((ours.logits.argmax(-1) == wide.logits.argmax(-1)).double().mean())
    return [
        *rows,
        Row(
            work=f"logits after {LOGIT_PROMPTS} prompts, {name} less bfloat16",
            unit="of standard deviation",
            value=difference,
        ),
        Row(work=f"equal argmax, dummy weights, {name}", unit="ratio", value=same),
        Row(
            work=f"meltcore/sums, 200 held-out problems, {name}",
            unit="accuracy",
            value=ours.accuracy,
            peer="bfloat16",
            peer_value=wide.accuracy,
            target=Target(0.95),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument(
        "--levels", default="1,10,100,1000", help="Levels: requests that start together, separated by commas."
    )
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    need_gpu(model=args.model)

    levels = [int(level) for level in args.levels.split(",")]
    wide = in_a_process(args.model, WIDE, levels, args.reps)
    rows = []
    for name, form in FORMS.items():
        ours = in_a_process(args.model, form, levels, args.reps)
        rows += compare(name, ours, wide)
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    write_result(rows, versions, subject=args.model)


if __name__ == "__main__":
    main()
