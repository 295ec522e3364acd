"""The demo's steps after chat, against a server that knows the right answers, and their part of the page."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from rich.console import Console
from sample_results import sample_run
from task_server import SPEECH, serve_tasks

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.options import add_options, from_options
from meltcore.measure.documents.schema import CheckResult, DemoSample, Evaluation, LevelResult
from meltcore.measure.experiments.demo.config import DemoConfig, parse_tasks
from meltcore.measure.experiments.demo.run import run_step, speak
from meltcore.measure.experiments.demo.verdict import judge
from meltcore.measure.load.tasks.task import tasks
from meltcore.measure.load.workloads.clips import encode_wav
from meltcore.measure.report.render import render

CHECKS = [CheckResult(name="health", status="PASS")]
UNLOADED = Evaluation(total=200, correct=200, failed=0, ci_low=0.0, ci_high=1.0)
STEPS = {name: task.step for name, task in tasks().items() if task.step is not None}
SPEAKER = tasks()["synthesis"]


def run(task: str, folder: Path, num_wrong: int = 0) -> tuple[LevelResult, list[DemoSample]]:
    """The step against a server that answers all problems right but the last `num_wrong`."""
    step = STEPS[task]
    problems = step.make_problems(7)
    known = {problem.audio_wav or problem.given: problem.answer for problem in problems[: len(problems) - num_wrong]}
    with serve_tasks(answers=known) as server:
        return run_step(
            tasks()[task], problems, server.url, "scripted", folder, folder / "requests.jsonl", Console(quiet=True)
        )


def test_transcriber_reads_back_what_was_spoken(tmp_path: Path) -> None:
    assert SPEAKER.read_back is not None
    texts = SPEAKER.read_back.make_problems(7)
    with serve_tasks() as server:
        spoken = speak(server.url, "scripted", SPEAKER, texts)
        assert server.received[-1]["input"] == texts[7].given
        assert len(spoken) == 8
        read_back, _ = run_step(
            tasks()["transcription"],
            spoken,
            server.url,
            "scripted",
            tmp_path,
            tmp_path / "requests.jsonl",
            Console(quiet=True),
        )
        assert (read_back.failed, read_back.concurrency, read_back.peak_in_flight) == (0, 8, 8)
        server.behavior["status"] = 429
        with pytest.raises(MeltcoreError, match="the queue is full"):
            speak(server.url, "scripted", SPEAKER, texts)
    assert {each.audio_wav for each in spoken} == {encode_wav(np.frombuffer(SPEECH, dtype="<i2"), 24_000)}


@pytest.mark.slow
@pytest.mark.parametrize("task", STEPS)
def test_step_grades_held_out_problems_and_keeps_samples(task: str, tmp_path: Path) -> None:
    level, samples = run(task, tmp_path)
    assert (level.failed, level.accuracy, level.peak_in_flight) == (0, 1.0, STEPS[task].concurrency)
    assert level.task is not None
    assert level.task.task == task
    assert len(samples) == 3
    assert all(sample.answer == sample.expected for sample in samples)
    assert all((sample.audio_wav is not None) is (task == "transcription") for sample in samples)


@pytest.mark.slow
def test_step_below_95_percent_fails_the_demo(tmp_path: Path) -> None:
    level, _ = run("transcription", tmp_path, num_wrong=3)
    assert level.accuracy == pytest.approx(45 / 48)
    assert level.verdict in ("OK", "CLIENT_BOUND"), "a busy machine binds the client"
    level = structs.replace(level, verdict="OK")
    verdict, reasons = judge(CHECKS, UNLOADED, [level], [], [])
    assert verdict == "FAILED"
    assert reasons == ["transcription, concurrency 16: accuracy is 93.75 %; the limit is 95 %"]
    assert judge(CHECKS, UNLOADED, [level], [], [], read_back=level) == ("OK", [])
    worse = structs.replace(level, accuracy=5 / 8)
    _, reasons = judge(CHECKS, UNLOADED, [worse], [], [], read_back=worse)
    assert reasons == ["transcription, concurrency 16: accuracy is 62.50 %; the limit is 75 %"]


def test_tasks_are_chosen_by_name() -> None:
    assert list(STEPS) == ["translation", "transcription"]
    with pytest.raises(ConfigError, match="tasks must hold generation; got transcription"):
        DemoConfig(tasks=("transcription",))
    with pytest.raises(ConfigError, match="--tasks: 'vision' is not one of generation, "):
        parse_tasks("generation,vision")
    parser = ArgumentParser()
    add_options(parser, DemoConfig)
    config = from_options(DemoConfig, parser.parse_args(["--tasks", "generation,synthesis"]))
    assert config.tasks == ("generation", "synthesis"), "instead of the default, not beside it"


def test_page_plays_clips_beside_their_transcripts() -> None:
    audio = b"RIFF...."
    samples = [
        DemoSample(task="translation", given="A dog runs.", answer="<b>", expected="<b>"),
        DemoSample(task="transcription", given="clip 1", answer="abc", expected="abd", audio_wav=audio),
    ]
    html = render(sample_run(samples=samples))
    assert "&lt;b&gt;" in html, "answers are text, not markup"
    [data] = re.findall(r'<audio controls preload="none" src="data:audio/wav;base64,([^"]+)"', html)
    assert b64decode(data) == audio
    assert "not right; expected: abd" in html
    assert "<audio" not in render(sample_run())
