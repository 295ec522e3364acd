"""Measures one server in several precisions: speed, answers, and differences of token log probabilities.

Tokens are compared up to the first one that differs. After it the two texts continue from different prefixes, so
further differences are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.tuning import AnswerComparison, Tuning, TuningPoint, gain
from meltcore.measure.documents.values.formatting import format_change, format_number
from meltcore.measure.experiments.evals import gsm8k
from meltcore.measure.experiments.evals.config import CONCURRENCY
from meltcore.measure.experiments.evals.gsm8k_data import (
    conversation,
    exact_match,
    extract_flexible,
    read_items,
    read_shots,
)
from meltcore.measure.experiments.evals.run import MAX_TOKENS
from meltcore.measure.experiments.servers import Answer, Api, ApiError, ServerProcess
from meltcore.measure.experiments.tune.config import PrecisionOptions
from meltcore.measure.experiments.tune.run import Tuner, make_tuning
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.problems import evaluation_set, is_correct

# The options of ours and of vLLM. A server without them refuses them, which becomes the reason of its point.
_FP8_WEIGHTS, _FP8_CACHE = ("--quantization", "fp8"), ("--kv-cache-dtype", "fp8")
FP8_VARIANTS = {"fp8": _FP8_WEIGHTS, "fp8-cache": _FP8_CACHE, "fp8-both": (*_FP8_WEIGHTS, *_FP8_CACHE)}


@dataclass(frozen=True)
class EvalItem:
    """The body of a chat request, without its model, and the check of an answer's text."""

    body: dict[str, Any]
    is_correct: Callable[[str], bool]


def tune_precision(tuner: Tuner, options: PrecisionOptions, load: LoadConfig) -> Tuning:
    """Measure every precision, evaluate its answers, and return the result.

    Raises ConfigError if GSM8K items cannot be read.
    """
    variants: dict[str, tuple[str, ...]] = {name: ("--dtype", name) for name in options.dtypes}
    if options.fp8:
        variants |= FP8_VARIANTS
    items = bundled_items(options.questions)
    if options.gsm8k is not None:
        items += gsm8k_items(Path(options.gsm8k), 200)
    points = try_variants(tuner, variants, load, items)
    return make_tuning("precision", tuner, load, points, precision_finding(points))


def bundled_items(count: int) -> list[EvalItem]:
    """Return held-out arithmetic problems, with the prompts of `meltcore eval`."""
    return [
        EvalItem(
            {"messages": [{"role": "user", "content": problem.question}], "max_tokens": MAX_TOKENS},
            partial(is_correct, problem),
        )
        for problem in evaluation_set()[:count]
    ]


def gsm8k_items(path: Path, count: int) -> list[EvalItem]:
    """Return items of a GSM8K file, with the prompts and the grading of `meltcore eval gsm8k`.

    Raises ConfigError if the file cannot be read.
    """
    shots = read_shots(None)
    return [
        EvalItem(
            {
                "messages": conversation(shots.examples, item),
                "max_tokens": gsm8k.MAX_TOKENS,
                "stop": list(gsm8k.STOP_STRINGS),
            },
            lambda text, item=item: exact_match(extract_flexible(text), item.reference),  # type: ignore[misc]
        )
        for item in read_items(str(path), count)
    ]


def try_variants(
    tuner: Tuner, variants: Mapping[str, Sequence[str]], load: LoadConfig, items: Sequence[EvalItem]
) -> list[TuningPoint]:
    """Measure the default settings, then each variant, and return the points.

    The answers of a variant are compared with the answers of the first start that worked. Without `items` only the
    speed is measured, for example with random weights, whose answers are meaningless.
    """
    if not variants:
        raise ConfigError("there is no precision to try")
    reference: list[Answer] = []
    points = []
    for name, args in [(None, ()), *variants.items()]:
        answers: list[Answer] = []
        inspect = partial(_ask_and_compare, items, load.model, reference, answers) if items else None
        point = tuner.measure({} if name is None else {"precision": name}, load, args=args, inspect=inspect)
        points.append(point)
        if not reference and point.ok:
            reference += answers
    return points


def ask_items(api: Api, items: Sequence[EvalItem], model: str | None) -> list[Answer]:
    """Send every item once with greedy decoding, a few concurrently. Return the answers in the order of the items."""
    name = model or api.resolve_model()[0]
    with ThreadPoolExecutor(max_workers=CONCURRENCY, thread_name_prefix="ask") as pool:
        return list(pool.map(lambda item: _ask(api, {**item.body, "model": name}), items))


def compare_answers(items: Sequence[EvalItem], first: Sequence[Answer], second: Sequence[Answer]) -> AnswerComparison:
    """Return the grades of the answers `second`, and their differences from the answers `first`, item by item."""
    differences: list[float] = []
    for first_answer, second_answer in zip(first, second, strict=True):
        for (token, logprob), (other_token, other_logprob) in zip(
            first_answer.tokens, second_answer.tokens, strict=False
        ):
            if token != other_token:
                break
            differences.append(abs(logprob - other_logprob))
    return AnswerComparison(
        asked=len(items),
        correct=sum(
            not answer.failed and item.is_correct(answer.text) for item, answer in zip(items, second, strict=True)
        ),
        failed=sum(answer.failed for answer in second),
        identical=sum(
            not first_answer.failed and not second_answer.failed and first_answer.text == second_answer.text
            for first_answer, second_answer in zip(first, second, strict=True)
        ),
        tokens_compared=len(differences),
        logprob_diff_mean=sum(differences) / len(differences) if differences else None,
        logprob_diff_max=max(differences, default=None),
    )


def precision_finding(points: Sequence[TuningPoint]) -> str:
    """Return the result in a sentence: the fastest precision relative to the first one, and its answers."""
    completed_points = [point for point in points if point.ok]
    if not completed_points:
        return "No precision ran."
    first, best = completed_points[0], max(completed_points, key=lambda point: point.output_tokens_per_s or 0.0)
    text = f"{_name(best)} is the fastest: {format_number(best.output_tokens_per_s)} output tok/s"
    if best is not first and (relative_gain := gain(best, first)) is not None:
        text += f", {format_change(relative_gain)} over {_name(first)}"
    if best.answers is not None:
        text += f"; {best.answers.correct} of {best.answers.asked} correct"
        text += "" if best is first else f", {best.answers.identical} with the same text"
    failed_names = [_name(point) for point in points if not point.ok]
    return text + (f". Did not run: {', '.join(failed_names)}." if failed_names else ".")


def _name(point: TuningPoint) -> str:
    return str(point.settings.get("precision", "the default"))


def _ask_and_compare(
    items: Sequence[EvalItem],
    model: str | None,
    reference: Sequence[Answer],
    answers: list[Answer],
    server: ServerProcess,
    point: TuningPoint,
) -> None:
    """Send the items to the running server, append the answers to `answers`, and store their comparison in `point`.

    The answers are compared with `reference`, or with themselves while `reference` is empty.
    """
    answers += ask_items(Api(server.url), items, model)
    point.answers = compare_answers(items, reference or answers, answers)
    if point.answers.failed:
        point.ok, point.reason = False, f"{point.answers.failed} of {len(items)} questions got no answer"


def _ask(api: Api, body: dict[str, Any]) -> Answer:
    """Return the answer, with log probabilities of its tokens if the server accepts the field `logprobs`."""
    body = {**body, "temperature": 0.0}
    try:
        reply = api.post("/v1/chat/completions", {**body, "logprobs": True})
        if reply.status == 400:
            reply = api.post("/v1/chat/completions", body)
        choice = reply.json()["choices"][0]
        text = choice["message"]["content"]
        entries = (choice.get("logprobs") or {}).get("content") or []
        tokens = tuple((entry["token"], float(entry["logprob"])) for entry in entries)
        return Answer(str(text or ""), tokens=tokens)
    except (ApiError, KeyError, IndexError, TypeError):
        return Answer("", failed=True)
