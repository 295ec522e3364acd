"""Runs short evaluations of one server: the held-out arithmetic problems, and API conformance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import CheckResult, Evaluation, IncorrectAnswer, RunResult
from meltcore.measure.documents.served_model import model_notes
from meltcore.measure.documents.values.formatting import format_percent
from meltcore.measure.documents.values.intervals import wilson_interval
from meltcore.measure.experiments.evals.config import CONCURRENCY
from meltcore.measure.experiments.evals.conformance import run_checks
from meltcore.measure.experiments.servers.api import Api, ask_all, death_reason, failure_reasons
from meltcore.measure.problems import Problem, evaluation_set, is_correct

MAX_TOKENS = 512
MAX_KEPT_INCORRECT = 10
MAX_TEXT_CHARS = 300  # kept of the end of an incorrectly answered question and of its answer

EvaluationMode = Literal["problems", "conformance"]
OnAnswer = Callable[[int, int, int], None]  # (done, correct, total), before the first answer and after each


def evaluate(
    api: Api,
    model: str,
    *,
    problems: Sequence[Problem] | None = None,
    concurrency: int = CONCURRENCY,
    on_progress: OnAnswer | None = None,
) -> Evaluation:
    """Ask every problem (default: the 200 held-out ones) once, greedily and unstreamed, and count the correct answers.

    A failed request counts in `failed`, and is not correct.
    """
    problem_list = list(evaluation_set() if problems is None else problems)
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": problem.question}],
            "temperature": 0.0,
            "max_tokens": MAX_TOKENS,
        }
        for problem in problem_list
    ]
    num_correct = 0
    failure_by_index: dict[int, str | None] = {}  # by index of the problem
    incorrect: list[IncorrectAnswer] = []
    if on_progress is not None:
        on_progress(0, 0, len(problem_list))
    for num_done, (index, answer) in enumerate(ask_all(api, bodies, concurrency), 1):
        problem = problem_list[index]
        if answer.failed:
            failure_by_index[index] = answer.failure
        if not answer.failed and is_correct(problem, answer.text):
            num_correct += 1
        elif len(incorrect) < MAX_KEPT_INCORRECT:
            question, actual = problem.question[-MAX_TEXT_CHARS:], answer.text[-MAX_TEXT_CHARS:]
            incorrect.append(IncorrectAnswer(question=question, expected=str(problem.value), actual=actual))
        if on_progress is not None:
            on_progress(num_done, num_correct, len(problem_list))
    ci_low, ci_high = wilson_interval(num_correct, len(problem_list))
    return Evaluation(
        total=len(problem_list),
        correct=num_correct,
        failed=len(failure_by_index),
        ci_low=ci_low,
        ci_high=ci_high,
        first_failure=failure_by_index[min(failure_by_index)] if failure_by_index else None,
        incorrect=incorrect,
    )


def run_eval(
    url: str,
    mode: EvaluationMode,
    *,
    model: str | None = None,
    api_key: str | None = None,
    min_accuracy: float | None = None,
    concurrency: int = CONCURRENCY,
    arguments: Sequence[str] = (),
    on_answer: OnAnswer | None = None,
    on_check: Callable[[CheckResult], None] | None = None,
) -> RunResult:
    """Run the evaluation `mode` on the server at `url` and return the result.

    The verdict is FAILED where a check or a request fails, or the accuracy is below `min_accuracy`. A server that dies
    before the last problem makes the run partial, with the verdict SERVER_DIED. Raises ConfigError where the server
    cannot be reached or names no model.
    """
    api = Api(url, api_key=api_key)
    model, facts = api.resolve_model(model)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    checks: list[CheckResult] = []
    evaluation = None
    if mode == "conformance":
        checks = run_checks(api, model, on_check)
    else:
        evaluation = evaluate(api, model, concurrency=concurrency, on_progress=on_answer)
    server_death = None if evaluation is None else death_reason(api, evaluation)
    if server_death is not None:
        evaluation = None  # the accuracy of an unknown selection of problems means nothing
    reasons = _failure_sentences(checks, evaluation, min_accuracy) if server_death is None else [server_death]
    return RunResult(
        command="eval",
        status="complete" if server_death is None else "partial",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments),
        settings={"what": mode, "model": model, "concurrency": concurrency, "min_accuracy": min_accuracy, **facts},
        accuracy=evaluation.accuracy if evaluation else None,
        evaluation=evaluation,
        checks=checks,
        verdict="SERVER_DIED" if server_death else "FAILED" if reasons else "OK",
        reasons=reasons,
        notes=model_notes(facts),
    )


def _failure_sentences(
    checks: Sequence[CheckResult], evaluation: Evaluation | None, min_accuracy: float | None
) -> list[str]:
    num_failed = sum(check.status == "FAIL" for check in checks)
    reasons = [f"{num_failed} of {len(checks)} API checks failed"] if num_failed else []
    if evaluation is not None:
        reasons += failure_reasons(evaluation)
    if evaluation is not None and min_accuracy is not None and evaluation.accuracy < min_accuracy:
        reasons.append(
            f"{format_percent(evaluation.accuracy)} correct; at least {format_percent(min_accuracy)} is required"
        )
    return reasons
