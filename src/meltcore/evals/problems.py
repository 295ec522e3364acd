"""Asks a server arithmetic problems it was never trained on and reports the share it got right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from meltcore.evals.api import Api, ApiError
from meltcore.problems import Problem, evaluation_set, is_right
from meltcore.results.intervals import wilson
from meltcore.results.schema import Evaluation, WrongAnswer

CONCURRENCY = 8  # low enough that the load itself is not what is tested
MAX_TOKENS = 512
_WRONG_KEPT = 10
_TEXT_END = 300  # characters kept of a wrongly answered question and of its answer


def evaluate(
    api: Api,
    model: str,
    *,
    problems: Sequence[Problem] | None = None,
    concurrency: int = CONCURRENCY,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> Evaluation:
    """Ask every problem (default: the 200 held-out ones) once, greedily, not streamed.

    `on_progress(done, right, asked)` is called after each answer. A request that fails is in `failed`, and not right.
    """
    asked = list(evaluation_set() if problems is None else problems)
    right = failed = done = 0
    wrong: list[WrongAnswer] = []
    pool = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="eval")
    try:
        waiting = {pool.submit(_ask, api, model, problem): problem for problem in asked}
        for future in as_completed(waiting):
            problem, answer = waiting[future], future.result()
            done += 1
            failed += answer.failed
            if not answer.failed and is_right(problem, answer.text):
                right += 1
            elif len(wrong) < _WRONG_KEPT:
                question, got = problem.question[-_TEXT_END:], answer.text[-_TEXT_END:]
                wrong.append(WrongAnswer(question=question, expected=str(problem.value), got=got))
            if on_progress is not None:
                on_progress(done, right, len(asked))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    low, high = wilson(right, len(asked))
    return Evaluation(asked=len(asked), right=right, failed=failed, low=low, high=high, wrong=wrong)


class _Answer:
    """What came back: the text, or why there is none."""

    __slots__ = ("failed", "text")

    def __init__(self, text: str, failed: bool) -> None:
        self.text = text
        self.failed = failed


def _ask(api: Api, model: str, problem: Problem) -> _Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": problem.question}],
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
    }
    try:
        reply = api.post("/v1/chat/completions", body)
        if reply.status != 200:
            return _Answer(f"request failed: status {reply.status}: {reply.body[:200].decode(errors='replace')}", True)
        content = reply.json()["choices"][0]["message"]["content"]
    except ApiError as error:
        return _Answer(f"request failed: {error}", True)
    except (KeyError, IndexError, TypeError):
        return _Answer(f"request failed: not in OpenAI's form: {reply.body[:200].decode(errors='replace')}", True)
    return _Answer(content, False) if isinstance(content, str) else _Answer("request failed: content is no text", True)
