"""Asks a server arithmetic problems it was never trained on and reports the share it got right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meltcore.evals.api import Api
from meltcore.evals.ask import ask_all
from meltcore.problems import Problem, evaluation_set, is_right
from meltcore.results.intervals import wilson
from meltcore.results.schema import Evaluation, WrongAnswer

CONCURRENCY = 8  # low enough that the load itself is not what is tested
MAX_TOKENS = 512
WRONG_KEPT = 10
TEXT_END = 300  # characters kept of a wrongly answered question and of its answer


def evaluate(
    api: Api,
    model: str,
    *,
    problems: Sequence[Problem] | None = None,
    concurrency: int = CONCURRENCY,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Evaluation:
    """Ask every problem (default: the 200 held-out ones) once, greedily, not streamed.

    `on_progress(done, right, asked)` is called before the first answer and after each. A request that fails is in
    `failed`, and not right.
    """
    asked = list(evaluation_set() if problems is None else problems)
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": problem.question}],
            "temperature": 0.0,
            "max_tokens": MAX_TOKENS,
        }
        for problem in asked
    ]
    right = 0
    failed: dict[int, str | None] = {}  # by place among the problems
    wrong: list[WrongAnswer] = []
    if on_progress is not None:
        on_progress(0, 0, len(asked))
    for done, (index, answer) in enumerate(ask_all(api, bodies, concurrency), 1):
        problem = asked[index]
        if answer.failed:
            failed[index] = answer.why_failed
        if not answer.failed and is_right(problem, answer.text):
            right += 1
        elif len(wrong) < WRONG_KEPT:
            question, got = problem.question[-TEXT_END:], answer.text[-TEXT_END:]
            wrong.append(WrongAnswer(question=question, expected=str(problem.value), got=got))
        if on_progress is not None:
            on_progress(done, right, len(asked))
    low, high = wilson(right, len(asked))
    first_failure = failed[min(failed)] if failed else None
    return Evaluation(
        asked=len(asked),
        right=right,
        failed=len(failed),
        low=low,
        high=high,
        first_failure=first_failure,
        wrong=wrong,
    )
