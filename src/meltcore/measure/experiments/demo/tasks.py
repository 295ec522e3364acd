"""The demo's steps after chat: translation, synthesis and transcription of problems whose right answers are known.

Speech has no right answer of its own. The transcriber must read back what the synthesizer has said.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.schema import LevelResult, Sample, Task
from meltcore.measure.experiments.demo.config import DemoConfig
from meltcore.measure.experiments.servers.api import Api
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.runner import OnProgress, run_levels
from meltcore.measure.load.workloads.clips import SAMPLE_RATE, encode_wav
from meltcore.measure.load.workloads.task_workload import SPEECH_PATH
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate_phrases
from meltcore.measure.problems.tones import in_alphabet, random_word, render, tone_clip

TRANSCRIBED_LANGUAGE = "en"
CLIP_S = (3.0, 8.0)
NUM_SAMPLES = 3  # of each step, in the report
NUM_TEXTS = 8  # to speak: the slowest work of all on a CPU
SPEECH_RATE = 24_000


class Problem(NamedTuple):
    """What a request sends, its right answer, and the audio where it sends some."""

    given: str
    answer: str
    audio_wav: bytes | None = None


@dataclass(frozen=True)
class TaskStep:
    """A task, and the problems that it gets `concurrency` at a time, where there are as many.

    `write(folder, problems)` writes the problems and returns the workload of the load generator.
    """

    task: Task
    concurrency: int
    make_problems: Callable[[int], list[Problem]]
    write: Callable[[Path, Sequence[Problem]], str]


def task_steps(config: DemoConfig) -> list[TaskStep]:
    """Return the steps of the tasks of `config`. Synthesis has none: what it speaks is read back by transcription."""
    steps = [
        TaskStep("translation", 32, phrases, _write_texts),
        TaskStep("transcription", 16, clips, _write_clips),
    ]
    return [step for step in steps if step.task in config.tasks]


def run_step(
    step: TaskStep,
    problems: Sequence[Problem],
    address: str,
    model: str,
    folder: Path,
    records_path: Path,
    on_progress: OnProgress,
) -> tuple[LevelResult, list[Sample]]:
    """Load `model` at `address` with `problems`, written to `folder`; return some answers with text too."""
    samples: list[Sample] = []
    concurrency = min(step.concurrency, len(problems))
    config = LoadConfig(
        url=address,
        model=model,
        concurrency=(concurrency,),
        num_prompts=(len(problems),),
        num_warmups=concurrency,
        workload=step.write(folder, problems),
        keep_text=True,
        records_path=records_path,
    )

    def on_level(level: LevelResult, records: list[RequestRecord]) -> None:
        del level
        answered = sorted((record for record in records if record.failure is None), key=lambda record: record.index)
        for record in answered[:NUM_SAMPLES]:
            problem = problems[(concurrency + record.index) % len(problems)]  # warm-ups have sent the first
            samples.append(
                Sample(
                    task=step.task,
                    given=problem.given,
                    answer=record.text or "",
                    expected=problem.answer,
                    audio_wav=problem.audio_wav,
                )
            )

    [level] = run_levels(config, on_progress, on_level)
    return level, samples


def speak(address: str, model: str, problems: Sequence[Problem]) -> list[Problem]:
    """Return the speech of the texts, to be read back by a transcriber. Raises MeltcoreError without speech."""
    api, spoken = Api(address), []
    for problem in problems:
        response = api.post(SPEECH_PATH, {"model": model, "input": problem.given, "response_format": "pcm"})
        if response.status != 200:
            raise MeltcoreError(f"no speech of {problem.given!r}: status {response.status}, {response.body[:200]!r}")
        samples = np.frombuffer(response.body, dtype="<i2")
        expected = in_alphabet(problem.answer, TRANSCRIBED_LANGUAGE)
        spoken.append(Problem(f"spoken: {problem.given}", expected, encode_wav(samples, SPEECH_RATE)))
    return spoken


def spoken_texts(seed: int) -> list[Problem]:
    """Return texts of held-out words to speak."""
    rng = random.Random(f"demo/texts/{seed}")  # noqa: S311 - must repeat for a seed
    texts = (" ".join(random_word(rng, "heldout") for _ in range(rng.randint(2, 3))) for _ in range(NUM_TEXTS))
    return [Problem(text, text) for text in texts]


def phrases(seed: int, num_phrases: int = 200) -> list[Problem]:
    """Return held-out sentences with their translations."""
    found = generate_phrases("heldout", num_phrases=num_phrases, seed=seed)
    return [Problem(each.source, each.target) for each in found]


def clips(seed: int, num_clips: int = 48) -> list[Problem]:
    """Return held-out clips with their transcripts."""
    rng = random.Random(f"demo/{seed}")  # noqa: S311 - must repeat for a seed
    problems = []
    for index in range(num_clips):
        clip = tone_clip(rng, "heldout", rng.uniform(*CLIP_S))
        samples = np.asarray(render(clip, SAMPLE_RATE, seed=index) * 32767, dtype=np.int16)
        text = clip.text(TRANSCRIBED_LANGUAGE)
        problems.append(Problem(f"clip {index}, {clip.duration_s:.1f} s", text, encode_wav(samples)))
    return problems


def _write_texts(folder: Path, problems: Sequence[Problem]) -> str:
    path = folder / "sentences.tsv"
    path.write_text("".join(f"{problem.given}\t{problem.answer}\n" for problem in problems), encoding="utf-8")
    return f"translate:src={SOURCE_LANGUAGE},tgt={TARGET_LANGUAGE},file={path}"


def _write_clips(folder: Path, problems: Sequence[Problem]) -> str:
    lines = []
    for index, problem in enumerate(problems):
        (folder / f"clip-{index}.wav").write_bytes(problem.audio_wav or b"")
        lines.append(json.dumps({"audio_filepath": f"clip-{index}.wav", "text": problem.answer}) + "\n")
    path = folder / "clips.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return f"transcribe:language={TRANSCRIBED_LANGUAGE},manifest={path}"
