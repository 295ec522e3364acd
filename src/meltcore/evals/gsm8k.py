"""GSM8K with chain of thought: eight worked examples as a conversation, greedy answers, marked in two ways."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meltcore.evals import extraction
from meltcore.evals.api import Api
from meltcore.evals.ask import Answer, ask_all
from meltcore.evals.gsm8k_data import Item, Shots, conversation
from meltcore.evals.problems import CONCURRENCY, TEXT_END, WRONG_KEPT
from meltcore.results.intervals import wilson
from meltcore.results.schema import Evaluation, Gate, WrongAnswer

LIMIT = 200
MAX_TOKENS = 256  # what lm-evaluation-harness asks of an API model
STOP = ("Q:", "</s>", "<|im_end|>")  # of the task gsm8k_cot
# 175 of 200. As a fraction, because a share such as 0.875 times a count need not be a whole number.
GATE_RIGHT, GATE_OF = 7, 8
# Of the first LIMIT problems of the data set's test split, as `_digest` makes it.
_PUBLISHED_SHA256 = "7c16294687f5eeaeb0cb5c225df9cf25455497ede5912a000a9597f492c19a0a"


@dataclass(frozen=True)
class Marked:
    """One item's answer and its two marks. A failed request is right in neither."""

    item: Item
    answer: Answer
    strict: bool
    flexible: bool


def ask_items(
    api: Api,
    model: str,
    items: Sequence[Item],
    shots: Shots,
    *,
    concurrency: int = CONCURRENCY,
    on_progress: Callable[[int, int, int], None] | None = None,
    on_marked: Callable[[int, Marked], None] | None = None,
) -> list[Marked]:
    """Ask every item once, greedily, not streamed; marks in the order of `items`.

    `on_progress(done, right, asked)` is called before the first answer and after each, `on_marked` with each item's
    place and marks as they come.
    """
    bodies = [_body(model, item, shots) for item in items]
    marked: dict[int, Marked] = {}
    right = 0
    if on_progress is not None:
        on_progress(0, 0, len(items))
    for index, answer in ask_all(api, bodies, concurrency):
        marked[index] = mark(items[index], answer)
        right += marked[index].flexible
        if on_marked is not None:
            on_marked(index, marked[index])
        if on_progress is not None:
            on_progress(len(marked), right, len(items))
    return [marked[index] for index in range(len(items))]


def mark(item: Item, answer: Answer) -> Marked:
    if answer.failed:
        return Marked(item, answer, strict=False, flexible=False)
    found = (extraction.strict(answer.text), extraction.flexible(answer.text))
    strict, flexible = (extraction.exact_match(each, item.reference) for each in found)
    return Marked(item, answer, strict, flexible)


def written_to(path: Path) -> Callable[[int, Marked], None]:
    """For `on_marked`: a JSON line an answer as it comes, so that each mark can be looked into, and what was asked is
    not lost where a run is cut short. The file appears with the first of them.
    """
    encoder = msgspec.json.Encoder()

    def write(index: int, marked: Marked) -> None:
        line = {
            "item": index,
            "question": marked.item.question,
            "reference": marked.item.reference,
            "answer": marked.answer.text,
            "failed": marked.answer.failed,
            "strict": marked.strict,
            "flexible": marked.flexible,
        }
        with path.open("ab") as file:
            file.write(encoder.encode(line) + b"\n")

    return write


def published(items: Sequence[Item]) -> bool:
    """Whether these are the problems that published results are of."""
    return len(items) == LIMIT and _digest(items) == _PUBLISHED_SHA256


def _digest(items: Sequence[Item]) -> str:
    """Of questions and results, white space aside."""
    digest = hashlib.sha256()
    for item in items:
        for text in (item.question, item.reference):
            digest.update(" ".join(text.split()).encode() + b"\n")
    return digest.hexdigest()


def sum_up(marked: Sequence[Marked]) -> Evaluation:
    """`right` is by flexible extraction, which the gate asks for; `strict_right` stands beside it."""
    right = sum(each.flexible for each in marked)
    low, high = wilson(right, len(marked))
    wrong = [each for each in marked if not each.flexible][:WRONG_KEPT]
    return Evaluation(
        asked=len(marked),
        right=right,
        strict_right=sum(each.strict for each in marked),
        failed=sum(each.answer.failed for each in marked),
        first_failure=next((each.answer.why_failed for each in marked if each.answer.failed), None),
        low=low,
        high=high,
        wrong=[
            WrongAnswer(
                question=each.item.question[-TEXT_END:], expected=each.item.reference, got=each.answer.text[-TEXT_END:]
            )
            for each in wrong
        ],
    )


def gate(evaluation: Evaluation) -> Gate:
    """87.5 % right by flexible extraction."""
    return Gate(
        name=gate_name(evaluation.asked),
        status="PASS" if evaluation.right >= needed(evaluation.asked) else "FAIL",
        detail=f"{evaluation.right} by flexible extraction, {evaluation.strict_right} by strict",
    )


def gate_not_run(asked: int, why: str) -> Gate:
    return Gate(name=gate_name(asked), status="NOT RUN", detail=why)


def gate_name(asked: int) -> str:
    return f"GSM8K: at least {needed(asked)} of {asked} right"


def needed(asked: int) -> int:
    """The least whole number of right answers that passes."""
    return -(-asked * GATE_RIGHT // GATE_OF)


def _body(model: str, item: Item, shots: Shots) -> dict[str, Any]:
    return {
        "model": model,
        "messages": conversation(shots.examples, item),
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": MAX_TOKENS,
        "stop": list(STOP),
    }
