"""Asking chat questions, a few at once, and getting back the text or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from meltcore.evals.api import Api, ApiError
from meltcore.results.schema import Evaluation

_CHAT = "/v1/chat/completions"
_FAILED = "request failed: "
_BODY_END = 200  # characters of an unusable body that are kept


@dataclass(frozen=True)
class Answer:
    """What came back: the text, or (`failed`) why there is none."""

    text: str
    failed: bool = False

    @property
    def why_failed(self) -> str | None:
        return self.text.removeprefix(_FAILED) if self.failed else None


def ask_all(api: Api, bodies: Sequence[dict[str, Any]], concurrency: int) -> Iterator[tuple[int, Answer]]:
    """POST every body once, `concurrency` at a time; (index, answer) in the order the answers come."""
    pool = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="eval")
    try:
        waiting = {pool.submit(_ask, api, body): index for index, body in enumerate(bodies)}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(api: Api, body: dict[str, Any]) -> Answer:
    try:
        reply = api.post(_CHAT, body)
        if reply.status != 200:
            return _failed(f"status {reply.status}: {reply.body[:_BODY_END].decode(errors='replace')}")
        content = reply.json()["choices"][0]["message"]["content"]
    except ApiError as error:
        return _failed(str(error))
    except (KeyError, IndexError, TypeError):
        return _failed(f"not in OpenAI's form: {reply.body[:_BODY_END].decode(errors='replace')}")
    return Answer(content) if isinstance(content, str) else _failed("content is no text")


def failures(evaluation: Evaluation) -> list[str]:
    """One sentence on the requests that failed, or none."""
    if not evaluation.failed:
        return []
    of = f"{evaluation.failed} of {evaluation.asked}"
    return [f"{of} requests failed, the first one: {evaluation.first_failure}"]


def _failed(why: str) -> Answer:
    return Answer(f"{_FAILED}{why}", failed=True)
