"""Runs GSM8K with chain of thought: eight worked examples as a conversation, greedy answers, graded in two ways."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import CheckResult, Evaluation, RunResult
from meltcore.measure.documents.served_model import model_notes
from meltcore.measure.experiments.evals.config import CONCURRENCY, GSM8K_DATASET, GSM8K_LIMIT, Gsm8kConfig
from meltcore.measure.experiments.evals.gsm8k_data import (
    GradedAnswer,
    Item,
    Shots,
    conversation,
    grade,
    read_items,
    read_shots,
)
from meltcore.measure.experiments.evals.harness import compare, failed_comparison, find_package, run_harness
from meltcore.measure.experiments.evals.run import OnAnswer, ask_and_grade, make_evaluation
from meltcore.measure.experiments.servers.api import Answer, Api, death_reason, failure_reasons

MAX_TOKENS = 256  # that of lm-evaluation-harness for an API model
STOP_STRINGS = ("Q:", "</s>", "<|im_end|>")  # of the task gsm8k_cot
# 175 of 200. As a fraction, because a ratio such as 0.875 times a count need not be a whole number.
GATE_NUMERATOR, GATE_DENOMINATOR = 7, 8
ANSWERS_FILE = "gsm8k.jsonl"
# Of the first GSM8K_LIMIT problems of the data set's test split, as computed by `_digest`.
_PUBLISHED_SHA256 = "7c16294687f5eeaeb0cb5c225df9cf25455497ede5912a000a9597f492c19a0a"


def run_gsm8k(
    url: str,
    config: Gsm8kConfig,
    *,
    model: str | None = None,
    api_key: str | None = None,
    harness: str | None = None,
    arguments: Sequence[str] = (),
    on_answer: OnAnswer | None = None,
    folder: Path | None = None,
) -> RunResult:
    """Evaluate GSM8K with the problems of `config`. The verdict is FAILED if a gate or a request fails.

    `harness` is a Python that has lm-evaluation-harness. The harness then runs the same problems, and its items are
    compared with Meltcore's. If the harness fails, the comparison is a failed gate, and Meltcore's answers are kept.
    Every answer is written into `folder` as it arrives. If the server dies, the run is partial and has the verdict
    SERVER_DIED.

    Raises ConfigError if data or examples cannot be read, or if the server cannot be reached or names no model.
    """
    harness_package = find_package(harness) if harness is not None else None
    items, shots = read_items(config.data, config.limit), read_shots(config.shots, harness_package)
    api = Api(url, api_key=api_key)
    model, facts = api.resolve_model(model)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    on_graded = None if folder is None else answer_writer(folder / ANSWERS_FILE)
    graded_answers = ask_items(
        api, model, items, shots, concurrency=config.concurrency, on_progress=on_answer, on_graded=on_graded
    )
    evaluation = summarize(graded_answers)
    server_death = death_reason(api, evaluation)
    gates = [gate(evaluation)]
    if server_death is not None:
        gates = [gate_not_run(len(items), server_death)]
    elif harness is not None:
        try:
            harness_items = run_harness(
                harness, api.chat_url, model, items, shots, api_key=api_key, concurrency=config.concurrency
            )
            gates += compare(graded_answers, harness_items, shots)
        except MeltcoreError as error:  # our own answers are kept
            gates.append(failed_comparison(error))
    reasons = [f"gate failed: {gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"]
    reasons += failure_reasons(evaluation) if server_death is None else [server_death]
    data_name = config.data if config.data == GSM8K_DATASET else Path(config.data).resolve().name
    return RunResult(
        command="eval",
        status="complete" if server_death is None else "partial",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments),
        settings={
            "what": "gsm8k",
            "model": model,
            "concurrency": config.concurrency,
            "data": data_name,
            "limit": config.limit,
            "shots": shots.source,
            "comparable": is_published(items) and shots.is_comparable,
            **facts,
        },
        accuracy=evaluation.accuracy if server_death is None else None,
        evaluation=evaluation if server_death is None else None,
        gates=gates,
        verdict="SERVER_DIED" if server_death else "FAILED" if reasons else "OK",
        reasons=reasons,
        notes=[*_items_notes(items), *_shots_notes(shots), *model_notes(facts)],
    )


def ask_items(
    api: Api,
    model: str,
    items: Sequence[Item],
    shots: Shots,
    *,
    concurrency: int = CONCURRENCY,
    on_progress: OnAnswer | None = None,
    on_graded: Callable[[int, GradedAnswer], None] | None = None,
) -> list[GradedAnswer]:
    """Ask every item once, greedily and unstreamed, and return the graded answers in the order of `items`.

    `on_graded` receives each item's index and graded answer as it arrives.
    """
    common_fields = {
        "model": model,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": MAX_TOKENS,
        "stop": list(STOP_STRINGS),
    }
    bodies = [{**common_fields, "messages": conversation(shots.examples, item)} for item in items]
    graded_by_index: dict[int, GradedAnswer] = {}

    def grade_item(index: int, answer: Answer) -> bool:
        graded_by_index[index] = grade(items[index], answer)
        if on_graded is not None:
            on_graded(index, graded_by_index[index])
        return graded_by_index[index].flexible_correct

    ask_and_grade(api, bodies, concurrency, grade_item, on_progress)
    return [graded_by_index[index] for index in range(len(items))]


def answer_writer(path: Path) -> Callable[[int, GradedAnswer], None]:
    """Return an `on_graded` callback that appends one JSON line per answer to `path`.

    An interrupted run thus keeps its answers. The callback raises ConfigError if a line cannot be written.
    """
    encoder = msgspec.json.Encoder()

    def write_line(index: int, graded_answer: GradedAnswer) -> None:
        line = {
            "item": index,
            "question": graded_answer.item.question,
            "reference": graded_answer.item.reference,
            "answer": graded_answer.answer.text,
            "failed": graded_answer.answer.failed,
            **graded_answer.grades,
        }
        try:
            with path.open("ab") as file:
                file.write(encoder.encode(line) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    return write_line


def is_published(items: Sequence[Item]) -> bool:
    """Return whether `items` are the problems of published results."""
    return len(items) == GSM8K_LIMIT and _digest(items) == _PUBLISHED_SHA256


def _digest(items: Sequence[Item]) -> str:
    """Return the SHA-256 of all questions and references. Differences in white space do not change the digest."""
    digest = hashlib.sha256()
    for item in items:
        for text in (item.question, item.reference):
            digest.update(" ".join(text.split()).encode() + b"\n")
    return digest.hexdigest()


def summarize(graded_answers: Sequence[GradedAnswer]) -> Evaluation:
    """Count the graded answers. `correct` is the number of correct answers by flexible extraction, as in the gate."""
    evaluation = make_evaluation(
        [(graded.item.question, graded.item.reference) for graded in graded_answers],
        [graded.answer for graded in graded_answers],
        [graded.flexible_correct for graded in graded_answers],
    )
    evaluation.strict_correct = sum(graded.strict_correct for graded in graded_answers)
    return evaluation


def gate(evaluation: Evaluation) -> CheckResult:
    """Return the gate of the evaluation, which requires 87.5 % correct by flexible extraction."""
    return CheckResult(
        name=gate_name(evaluation.total),
        status="PASS" if evaluation.correct >= min_correct(evaluation.total) else "FAIL",
        detail=f"{evaluation.correct} by flexible extraction, {evaluation.strict_correct} by strict",
    )


def gate_not_run(total: int, reason: str) -> CheckResult:
    """Return the gate of an evaluation that did not run."""
    return CheckResult(name=gate_name(total), status="NOT RUN", detail=reason)


def gate_name(total: int) -> str:
    """Return the name of the gate for `total` problems."""
    return f"GSM8K: at least {min_correct(total)} of {total} correct"


def min_correct(total: int) -> int:
    """Return the minimum number of correct answers of `total` that passes the gate."""
    return -(-total * GATE_NUMERATOR // GATE_DENOMINATOR)


def _items_notes(items: Sequence[Item]) -> list[str]:
    if is_published(items):
        return []
    return [f"Not the first {GSM8K_LIMIT} problems of GSM8K's test split: it compares with no published result."]


def _shots_notes(shots: Shots) -> list[str]:
    if shots.is_comparable:
        return []
    if not shots.examples:
        return ["Asked without examples: not comparable with published GSM8K results, which have eight."]
    return [
        "Asked with eight examples of our own: not comparable with published GSM8K results. Install lm-eval or give "
        "--shots FILE."
    ]
