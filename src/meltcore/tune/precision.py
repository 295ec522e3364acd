"""One server in several precisions: speed, answers, and how far the log probabilities of its tokens lie apart.

A token is compared only while both sides have written the same before it: past the first that differs, each goes on
from a text of its own, and a difference says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meltcore.errors import ConfigError
from meltcore.evals import extraction, gsm8k
from meltcore.evals.api import Api, ApiError
from meltcore.evals.gsm8k_data import conversation, read_items, read_shots
from meltcore.evals.problems import CONCURRENCY, MAX_TOKENS
from meltcore.load.config import LoadConfig
from meltcore.problems import evaluation_set, is_right
from meltcore.results.schema import RunResult
from meltcore.results.tuning import Answers, TuningPoint, gain
from meltcore.results.wording import change, number
from meltcore.trials.server import RunningServer
from meltcore.tune.attempt import Bench, attempt

# Ours and vLLM's words. What a server does not offer ends with its own refusal as the reason.
_WEIGHTS, _CACHE = ("--quantization", "fp8"), ("--kv-cache-dtype", "fp8")
FP8_VARIANTS = {"fp8": _WEIGHTS, "fp8-cache": _CACHE, "fp8-both": (*_WEIGHTS, *_CACHE)}


@dataclass(frozen=True)
class Question:
    """The body of a chat request without its model, and what marks the answer."""

    body: dict[str, Any]
    judge: Callable[[str], bool]


@dataclass(frozen=True)
class Written:
    """One answer: its text, its tokens with their log probabilities (empty where none came), or a failure."""

    text: str = ""
    tokens: list[tuple[str, float]] = field(default_factory=list)
    failed: bool = False


def bundled_questions(count: int) -> list[Question]:
    """Held-out arithmetic problems, as `meltcore eval` asks them."""
    return [
        Question(
            {"messages": [{"role": "user", "content": problem.question}], "max_tokens": MAX_TOKENS},
            lambda text, problem=problem: is_right(problem, text),  # type: ignore[misc]
        )
        for problem in evaluation_set()[:count]
    ]


def gsm8k_questions(path: Path, count: int) -> list[Question]:
    """Items of a GSM8K file, asked and marked as `meltcore eval gsm8k` does. Raises ConfigError."""
    shots = read_shots(None)
    return [
        Question(
            {
                "messages": conversation(shots.examples, item),
                "max_tokens": gsm8k.MAX_TOKENS,
                "stop": list(gsm8k.STOP),
            },
            lambda text, item=item: extraction.exact_match(extraction.flexible(text), item.reference),  # type: ignore[misc]
        )
        for item in read_items(str(path), count)
    ]


def try_variants(
    bench: Bench, variants: Mapping[str, Sequence[str]], load: LoadConfig, questions: Sequence[Question]
) -> list[TuningPoint]:
    """The server as it is shipped, then a start each; answers are compared with those of the first that ran.

    Without `questions` it is speed alone, for weights whose answers mean nothing.
    """
    if not variants:
        raise ConfigError("there is no precision to try")
    first: list[Written] = []
    points = []
    for name, words in [(None, ()), *variants.items()]:
        written: list[Written] = []
        look = partial(_look, questions, load.model, first, written) if questions else None
        point = attempt(bench, {} if name is None else {"precision": name}, load, words=words, look=look)
        points.append(point)
        if not first and point.ok:
            first += written
    return points


def _look(
    questions: Sequence[Question],
    model: str | None,
    first: Sequence[Written],
    written: list[Written],
    server: RunningServer,
    result: RunResult | None,
    point: TuningPoint,
) -> None:
    """Ask the running server into `written`, and set that beside `first` (empty: beside itself)."""
    del result
    written += ask(Api(server.url), questions, model)
    point.answers = compare_answers(questions, first or written, written)
    if point.answers.failed:
        point.ok, point.why = False, f"{point.answers.failed} of {len(questions)} questions got no answer"


def ask(api: Api, questions: Sequence[Question], model: str | None) -> list[Written]:
    """Every question once, greedily, a few at a time; in their order."""
    name = model or api.first_model()
    with ThreadPoolExecutor(max_workers=CONCURRENCY, thread_name_prefix="ask") as pool:
        return list(pool.map(lambda question: _ask(api, {**question.body, "model": name}), questions))


def compare_answers(questions: Sequence[Question], first: Sequence[Written], second: Sequence[Written]) -> Answers:
    """`second` marked, and set beside `first`, question by question."""
    differences: list[float] = []
    for one, other in zip(first, second, strict=True):
        for (token, logprob), (other_token, other_logprob) in zip(one.tokens, other.tokens, strict=False):
            if token != other_token:
                break
            differences.append(abs(logprob - other_logprob))
    return Answers(
        asked=len(questions),
        right=sum(
            not each.failed and question.judge(each.text) for question, each in zip(questions, second, strict=True)
        ),
        failed=sum(each.failed for each in second),
        same_text=sum(
            not one.failed and not other.failed and one.text == other.text
            for one, other in zip(first, second, strict=True)
        ),
        tokens_compared=len(differences),
        logprob_mean=sum(differences) / len(differences) if differences else None,
        logprob_most=max(differences, default=None),
    )


def finding(points: Sequence[TuningPoint]) -> str:
    """The answer in a sentence: the fastest against the first, and what it does to answers."""
    ran = [point for point in points if point.ok]
    if not ran:
        return "No precision ran."
    first, best = ran[0], max(ran, key=lambda point: point.output_tokens_per_s or 0.0)
    lines = [f"{_name(best)} is the fastest: {number(best.output_tokens_per_s)} output tok/s"]
    if best is not first and (gained := gain(best, first)) is not None:
        lines.append(f", {change(gained)} on {_name(first)}")
    if best.answers is not None:
        same = "" if best is first else f", {best.answers.same_text} the same text"
        lines.append(f"; {best.answers.right} of {best.answers.asked} right{same}")
    refused = [_name(point) for point in points if not point.ok]
    return "".join(lines) + (f". Did not run: {', '.join(refused)}." if refused else ".")


def _name(point: TuningPoint) -> str:
    return str(point.settings.get("precision", "the server as shipped"))


def _ask(api: Api, body: dict[str, Any]) -> Written:
    """With log probabilities where the server gives them: one that refuses the field is asked again without."""
    wanted = {**body, "temperature": 0.0}
    try:
        reply = api.post("/v1/chat/completions", {**wanted, "logprobs": True})
        if reply.status == 400:
            reply = api.post("/v1/chat/completions", wanted)
        choice = reply.json()["choices"][0]
        text = choice["message"]["content"]
        entries = (choice.get("logprobs") or {}).get("content") or []
        return Written(str(text or ""), [(entry["token"], float(entry["logprob"])) for entry in entries])
    except (ApiError, KeyError, IndexError, TypeError):
        return Written(failed=True)
