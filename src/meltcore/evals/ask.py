"""Asking chat questions, a few at once, and getting back the text or the reason why there is none."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
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
    left = deque(range(len(bodies)))
    answered: SimpleQueue[tuple[int, Answer] | Exception] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                index = left.popleft()
            except IndexError:
                return
            try:
                answered.put((index, _ask(api, bodies[index])))
            except Exception as error:  # whatever it is, it belongs to whoever waits for the answer
                answered.put(error)

    # Daemons: an interrupted program does not wait for answers that are under way, as a pool's threads have it do.
    for _ in range(min(concurrency, len(bodies))):
        threading.Thread(target=work, name="eval", daemon=True).start()
    try:
        for _ in bodies:
            found = answered.get()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        left.clear()


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


def server_died(api: Api, evaluation: Evaluation) -> str | None:
    """One sentence where requests failed and the server is gone: of those its answers say nothing."""
    if not evaluation.failed or api.is_there():
        return None
    whole = evaluation.asked - evaluation.failed
    return f"the server ended after {whole} of {evaluation.asked} answers"


def _failed(why: str) -> Answer:
    return Answer(f"{_FAILED}{why}", failed=True)
