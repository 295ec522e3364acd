"""Runs the demo's steps after chat: for each task, problems with known answers.

Speech has no single right answer. So the transcriber must read back what the synthesizer has spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.schema import DemoSample, LevelResult
from meltcore.measure.experiments.servers.api import Api
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.run import level_bars
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.tasks.task import MeasuredTask, Problem

NUM_SAMPLES = 3  # of each step, in the report


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

    def on_level(level: LevelResult, records: list[RequestRecord]) -> None:
        del level
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
