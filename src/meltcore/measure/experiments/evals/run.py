"""Runs short evaluations of one server: the held-out arithmetic problems, and API conformance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import CheckResult, Evaluation, IncorrectAnswer, RunResult
from meltcore.measure.documents.served_model import model_notes
from meltcore.measure.documents.values.formatting import format_percent
from meltcore.measure.documents.values.intervals import wilson_interval
from meltcore.measure.experiments.evals.config import CONCURRENCY
from meltcore.measure.experiments.evals.conformance import run_checks
from meltcore.measure.experiments.evals.gsm8k_data import GradedAnswer, Item
from meltcore.measure.experiments.servers import Answer, Api, ask_all, death_reason, failure_reasons
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
    """Send every problem once, greedily and unstreamed, and return the evaluation of the answers.

    The default is the 200 held-out problems. A failed request counts in `failed` and is not correct.
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

    def grade(index: int, answer: Answer) -> GradedAnswer:
        problem = problem_list[index]
        is_right = not answer.failed and is_correct(problem, answer.text)
        return GradedAnswer(Item(problem.question, str(problem.value)), answer, is_right)

    return make_evaluation(ask_and_grade(api, bodies, concurrency, grade, on_progress))


def ask_and_grade(
    api: Api,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    grade: Callable[[int, Answer], GradedAnswer],
    on_progress: OnAnswer | None,
) -> list[GradedAnswer]:
    """Send every chat body once, and return the graded answers in the order of `bodies`.

    `grade` receives the index and the answer of each body as it arrives.
    """
    graded: dict[int, GradedAnswer] = {}
    report = on_progress or (lambda _done, _correct, _total: None)
    report(0, 0, len(bodies))
    for index, answer in ask_all(api, bodies, concurrency):
        graded[index] = grade(index, answer)
        report(len(graded), sum(each.flexible_correct for each in graded.values()), len(bodies))
    return [graded[index] for index in range(len(bodies))]


def make_evaluation(graded: Sequence[GradedAnswer]) -> Evaluation:
    """Return an Evaluation: the number of correct answers by flexible extraction, and the first incorrect answers."""
    num_correct = sum(each.flexible_correct for each in graded)
    ci_low, ci_high = wilson_interval(num_correct, len(graded))
    has_strict_grades = all(each.strict_correct is not None for each in graded)
    incorrect = [
        IncorrectAnswer(
            question=item.question[-MAX_TEXT_CHARS:],
            expected=item.reference,
            actual=answer.text[-MAX_TEXT_CHARS:],
        )
        for item, answer, is_right, _ in graded
        if not is_right
    ]
    return Evaluation(
        total=len(graded),
        correct=num_correct,
        failed=sum(each.answer.failed for each in graded),
        ci_low=ci_low,
        ci_high=ci_high,
        strict_correct=sum(bool(each.strict_correct) for each in graded) if has_strict_grades else None,
        first_failure=next((each.answer.failure for each in graded if each.answer.failed), None),
        incorrect=incorrect[:MAX_KEPT_INCORRECT],
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
    on_check: Callable[[CheckResult], None] = lambda _check: None,
) -> RunResult:
    """Run the evaluation `mode` on the server at `url` and return the result.

    The verdict is FAILED if a check or a request fails, or if the accuracy is below `min_accuracy`. If the server dies
    before the last problem, the run is partial and has the verdict SERVER_DIED. Raises ConfigError if the server cannot
    be reached or names no model.
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
