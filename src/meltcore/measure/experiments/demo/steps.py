"""The steps of a demo after the start: conversations, and for each task problems with known answers.

The conversations are with a language model of real weights: questions, three turns and a summary. Speech has no single
right answer. So the transcriber must read back what the synthesizer has spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.schema import CheckResult, DemoSample, LevelResult
from meltcore.measure.experiments.servers import Api
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.run import level_bars
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.tasks.generation import CHAT_PATH
from meltcore.measure.load.tasks.task import MeasuredTask, Problem

MAX_TOKENS = 80
REPETITION_PENALTY = 1.1  # greedy answers of a model of 135M parameters repeat a sentence without it
_TEXT = (
    "Marta found an old violin in her grandmother's attic. She took it to Mr. Olsen, who repairs "
    "instruments, and he told her that it was made in 1890. He put on new strings and closed a crack in its side. "
    "In May she played it at the school concert, and her grandmother, who had not heard it for fifty years, cried."
)
NUM_SAMPLES = 3  # of each step, in the report


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


def run_step(
    task: MeasuredTask,
    problems: Sequence[Problem],
    address: str,
    model: str,
    folder: Path,
    records_path: Path,
    console: Console,
) -> tuple[LevelResult, list[DemoSample]]:
    """Load `model` at `address` with `problems`. Returns the level, and some answers with their text.

    The problems are written to `folder`. A bar on `console` shows the progress.
    """
    samples: list[DemoSample] = []
    assert task.step is not None
    concurrency = min(task.step.concurrency, len(problems))
    config = LoadConfig(
        url=address,
        model=model,
        concurrency=(concurrency,),
        num_prompts=(len(problems),),
        num_warmups=concurrency,
        workload=task.step.write(folder, problems),
        keep_text=True,
        records_path=records_path,
    )

    def on_level(_level: LevelResult, records: list[RequestRecord]) -> None:
        answered = sorted((record for record in records if record.failure is None), key=lambda record: record.index)
        for record in answered[:NUM_SAMPLES]:
            problem = problems[(concurrency + record.index) % len(problems)]  # warm-ups have sent the first
            samples.append(
                DemoSample(
                    task=task.name,
                    given=problem.given,
                    answer=record.text or "",
                    expected=problem.answer,
                    audio_wav=problem.audio_wav,
                )
            )

    with level_bars(config.levels, console, task.name) as on_progress:
        [level] = run_levels(config, on_progress, on_level)
    return level, samples


def speak(address: str, model: str, task: MeasuredTask, problems: Sequence[Problem]) -> list[Problem]:
    """Synthesize `problems`, and return problems for the task that reads the answers of `task` back.

    Raises MeltcoreError if a request gets no answer.
    """
    assert task.read_back is not None
    api, spoken = Api(address), []
    for problem in problems:
        response = api.post(task.path, {"model": model, **task.read_back.fields(problem.given)})
        if response.status != 200:
            raise MeltcoreError(f"no speech of {problem.given!r}: status {response.status}, {response.body[:200]!r}")
        spoken.append(task.read_back.heard(problem, response.body))
    return spoken
