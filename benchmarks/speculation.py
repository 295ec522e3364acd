"""Speculative decoding on real weights: are greedy answers the same, and how fast are they.

Two kinds of prompts: "copy" asks for a page of sentences again with one change, "answer" asks a question about a page.
The same prompts run with and without drafts, each engine in a process of its own: three times, of which the second is
timed, and the third asks for log-probabilities. Where two answers differ, the first different token is a tie if the two
best log-probabilities there are closer than the noise: rounding then decides. The noise is the most by which such
distances differ between both runs where all tokens before are equal, or --noise.
The engine itself may turn drafts off where they do not pay, as on a server.

    python benchmarks/speculation.py smollm2-135m-instruct.q4_1.gguf
    python benchmarks/speculation.py MODEL --concurrency 16 --drafts 5 --device cuda
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from bench_output import Row, Target, need_gpu, write_result

from meltcore import LLM, SamplingParams
from meltcore.measure.problems.pages import page_problem

FACTS = 8


class Answers(NamedTuple):
    """The answers of a run: token ids and log-probabilities by prompt, tokens per second, drafts and accepted ones."""

    tokens: list[list[int]]
    gaps: list[list[float]]
    rate: float
    drafted: list[float]
    accepted: list[float]


def prompts_of(kind: str, count: int) -> list[list[dict[str, str]]]:
    """Return chats whose answers repeat much of the prompt ("copy") or little of it ("answer")."""
    chats = []
    for number in range(count):
        page = page_problem(random.Random(number), "train", num_facts=FACTS).question
        if kind == "copy":
            page = f"Repeat this text word by word, but write 7 in place of every 3:\n\n{page}"
        chats.append([{"role": "user", "content": page}])
    return chats


def run(llm: LLM, chats: list[list[dict[str, str]]], max_tokens: int, logprobs: int | None = None) -> Answers:
    """Answer all chats greedily, as many at a time as the engine runs. Without log-probabilities there are no gaps."""
    before, began_s = llm.engine.stats(), time.perf_counter()
    found = llm.chat(chats, SamplingParams(max_tokens=max_tokens, logprobs=logprobs))
    took_s, after = time.perf_counter() - began_s, llm.engine.stats()
    tokens, gaps = [each.token_ids for each in found], list[list[float]]()
    if logprobs is not None:
        gaps = [[each.top_logprobs[0] - each.top_logprobs[1] for each in answer.logprobs] for answer in found]
    drafted = [new - old for new, old in zip(after.drafted, before.drafted, strict=True)]
    accepted = [new - old for new, old in zip(after.accepted, before.accepted, strict=True)]
    return Answers(tokens, gaps, sum(map(len, tokens)) / took_s, drafted, accepted)


def answer(model: str, settings: dict[str, Any], kinds: dict[str, int], max_tokens: int) -> dict[str, Answers]:
    """Return the answers of an engine with these settings by kinds of prompts, of which `kinds` has the numbers."""
    llm, found = LLM(model, enable_prefix_caching=False, **settings), {}
    chats = {kind: prompts_of(kind, count) for kind, count in kinds.items()}
    for each in chats.values():  # the first steps compile, and measure where drafts pay
        run(llm, each, max_tokens)
    rates = {kind: run(llm, each, max_tokens).rate for kind, each in chats.items()}
    for kind, each in chats.items():
        found[kind] = run(llm, each, max_tokens, logprobs=2)._replace(rate=rates[kind])
    llm.close()
    return found


class Comparison(NamedTuple):
    """How many answers are the same, differ from a tie on, and otherwise; the noise, and the gaps where they differ."""

    same: int
    ties: int
    others: int
    noise: float
    gaps: list[float]


def compare(plain: Answers, speculating: Answers, noise: float | None) -> Comparison:
    """Compare answers token by token. None measures the noise, which is a log-probability."""
    same, gaps, ends = 0, [], 0
    noises = [0.0]
    answers = zip(speculating.tokens, plain.tokens, speculating.gaps, plain.gaps, strict=True)
    for ours, theirs, our_gaps, their_gaps in answers:
        at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        equal = min(len(ours), len(theirs)) if at is None else at
        noises += [abs(a - b) for a, b in zip(our_gaps[:equal], their_gaps[:equal], strict=True)]
        if at is not None:
            gaps.append(their_gaps[at])
        elif len(ours) == len(theirs):
            same += 1
        else:
            ends += 1  # one answer ends earlier, which no tie explains
    limit = max(noises) if noise is None else noise
    ties = sum(gap < limit for gap in gaps)
    return Comparison(same, ties, ends + len(gaps) - ties, limit, sorted(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chat-template", metavar="FILE", help="For a model without one.")
    parser.add_argument("--prompts", type=int, default=100, help="Half of each kind.")
    parser.add_argument("--tokens", type=int, default=128, help="Of an answer at most.")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--noise", type=float, help="Of the logarithm of a probability (default: measured).")
    args = parser.parse_args()
    if args.device != "cpu":
        need_gpu(model=args.model)

    kinds = {"copy": args.prompts // 2, "answer": args.prompts - args.prompts // 2}
    settings: dict[str, Any] = {"device": args.device, "max_model_len": 2048, "chat_template": args.chat_template}
    settings["max_num_seqs"] = args.concurrency
    speculation = {"method": "ngram", "num_speculative_tokens": args.drafts}
    found: dict[str, dict[str, Answers]] = {}
    for name, config in {"plain": None, "speculating": speculation}.items():
        given = args.model, settings | {"speculative_config": config}, kinds, args.tokens
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found[name] = process.submit(answer, *given).result()
    rows, notes = [], []
    for kind in kinds:
        plain, speculating = found["plain"][kind], found["speculating"][kind]
        same, ties, others, noise, gaps = compare(plain, speculating, args.noise)
        row = Row(work=f"{kind}, {args.concurrency} at a time", unit="output tokens/s", value=speculating.rate)
        row.peer, row.peer_value, row.ratio = "without drafts", plain.rate, speculating.rate / plain.rate
        row.target = Target(1.5 if kind == "copy" and args.concurrency == 1 else 0.98, "ratio")
        count = replace(row, work=f"{row.work}: the same answers", unit="answers", value=float(same), ratio=None)
        count.peer, count.peer_value, count.target = "answers", float(kinds[kind]), None
        rows += [row, count]
        pairs = zip(speculating.accepted, speculating.drafted, strict=True)
        shares = [f"{100 * accepted / drafted:.0f} %" for accepted, drafted in pairs if drafted]
        notes.append(
            f"{kind}: {same} of {kinds[kind]} answers are the same, {ties} differ from a tie on, {others} differ "
            f"otherwise (noise {noise:.2g}; gaps up to {max(gaps, default=0.0):.2g}); "
            f"drafts accepted by position: {', '.join(shares) or 'none drafted'}"
        )
    write_result(
        rows, {"torch": metadata.version("torch")}, notes, subject=f"{Path(args.model).name}, n-gram, k {args.drafts}"
    )


if __name__ == "__main__":
    main()
