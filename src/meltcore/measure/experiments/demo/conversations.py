"""The demo's conversations with a language model of real weights: questions, three turns and a summary."""

from __future__ import annotations

from typing import Any, NamedTuple

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.schema import CheckResult, DemoSample
from meltcore.measure.experiments.servers.api import Api
from meltcore.measure.load.tasks.generation import CHAT_PATH

MAX_TOKENS = 80
REPETITION_PENALTY = 1.1  # greedy answers of a model of 135M parameters repeat a sentence without it
_TEXT = (
    "Marta found an old violin in her grandmother's attic. She took it to Mr. Olsen, who repairs "
    "instruments, and he told her that it was made in 1890. He put on new strings and closed a crack in its side. "
    "In May she played it at the school concert, and her grandmother, who had not heard it for fifty years, cried."
)


class Conversation(NamedTuple):
    """Messages of a user, sent one after another. The last answer must contain `expected`."""

    messages: tuple[str, ...]
    expected: str = ""


CONVERSATIONS = (
    Conversation(("What is the capital of France?",), "Paris"),
    Conversation(("Name three fruits.",)),
    Conversation(("What do bees make?",), "honey"),
    Conversation(("My cat is called Bella.", "What is my cat called?", "Write one short sentence about her."), "Bella"),
    Conversation((f"Summarize this story in one sentence: {_TEXT}",), "violin"),
)


def converse(api: Api, model: str) -> tuple[list[CheckResult], list[DemoSample]]:
    """Hold the conversations. Returns one check per conversation, and all questions with their answers.

    A check passes if every answer is text and the last answer contains the expected text.
    """
    checks, samples = [], []
    for conversation in CONVERSATIONS:
        name = f"{model} answers {conversation.messages[0][:40]!r}"
        try:
            answers = _answers(api, model, conversation.messages)
        except MeltcoreError as error:
            checks.append(CheckResult(name=name, status="FAIL", detail=str(error)))
            continue
        samples += [
            DemoSample(given=given, answer=answer) for given, answer in zip(conversation.messages, answers, strict=True)
        ]
        right = all(answers) and conversation.expected in answers[-1]
        checks.append(CheckResult(name=name, status="PASS" if right else "FAIL", detail=answers[-1][:120]))
    return checks, samples


def _answers(api: Api, model: str, questions: tuple[str, ...]) -> list[str]:
    """Return the greedy answer to each question, which is sent with all earlier questions and answers.

    Raises MeltcoreError if a request fails.
    """
    messages: list[dict[str, str]] = []
    answers: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        body["repetition_penalty"] = REPETITION_PENALTY
        response = api.post(CHAT_PATH, body)
        if response.status != 200:
            raise MeltcoreError(f"status {response.status}: {response.body[:200]!r}")
        answers.append(response.json()["choices"][0]["message"]["content"].strip())
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers
