"""The demo with our server, engines, bundled models and load generator, on fewer problems.

A second bundled language model takes the place of the one with real weights, which `make demo` fetches.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import meltcore
from meltcore.cli.main import main
from meltcore.measure.experiments.demo import run
from meltcore.measure.load.tasks.task import MeasuredTask, tasks
from meltcore.measure.problems import evaluation_set

SECOND_MODEL = Path(meltcore.__file__).parent / "bundled" / "sums-gemma"


def with_fewer_problems(task: MeasuredTask) -> MeasuredTask:
    step, read_back = task.step, task.read_back
    if step is not None:
        make = step.make_problems
        return replace(task, step=replace(step, make_problems=lambda seed: make(seed)[:12]))
    if read_back is not None:
        speak = read_back.make_problems
        return replace(task, read_back=replace(read_back, make_problems=lambda seed: speak(seed)[:4]))
    return task


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_demo_serves_loads_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "evaluate", partial(run.evaluate, problems=evaluation_set()[:12]))
    monkeypatch.setattr(run, "tasks", lambda: {name: with_fewer_problems(task) for name, task in tasks().items()})
    problem = next(problem for problem in evaluation_set() if problem.kind == "short")
    conversation = run.Conversation((problem.question,), str(problem.value))
    monkeypatch.setattr(run, "CONVERSATIONS", (conversation,))
    levels = ["--levels", "10", "--level-duration", "1"]
    assert main(["demo", *levels, "--chat-model", str(SECOND_MODEL), "--out", str(tmp_path)]) == 0
    [folder] = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["command"]) == ("complete", "demo")
    assert result["accuracy"] >= 0.95
    by_task = {level["task"]["task"]: level for level in result["levels"]}
    assert by_task.keys() == {"translation", "transcription"}
    assert all(level["failed"] == 0 and level["accuracy"] >= 0.75 for level in result["levels"])
    [level] = result["mixed"]
    assert (level["connections"], level["peak_in_flight"]) == (10, 10)
    loads = {stream["name"]: stream["level"] for stream in level["streams"]}
    assert loads.keys() == {"sums", "phrases", "tones", "voice"}
    for load in loads.values():
        assert load["requests"] == load["succeeded"] >= load["concurrency"] >= 1
    assert loads["sums"]["accuracy"] >= 0.95
    assert f"sums-gemma answers {problem.question[:40]!r}" in {check["name"] for check in result["checks"]}
    names = [check["name"] for check in result["checks"] if check["status"] == "PASS"]
    for client in ("openai: ", "dwani: ", "HTTP: "):
        assert sum(name.startswith(client) for name in names) >= 6
    assert "every route of /openapi.json was opened" in names
    log = (folder / "server.log").read_text()
    assert "meltcore: a model that does not know kan_Knda gets it as guj_Gujr or hin_Deva" in log
    for path in ("/v1/chat/completions", "/v1/indic_chat", "/v1/speech_to_speech", "/transcribe_batch/", "/v1/ocr"):
        assert f"path={path} " in log, "a check that passes has sent its request"
    assert all(level["failed"] == 0 for level in by_task.values())
    assert all(by_task[task]["accuracy"] >= 0.75 for task in ("translation", "transcription"))
    page = (folder / "report.html").read_text()
    assert "All models, mixed" in page
    assert "sums, phrases, tones, voice" in page
    num_clips = sum(sample.get("audio_wav") is not None for sample in result["samples"])
    assert page.count("<audio") == num_clips >= 3
    assert (folder / "requests.jsonl").stat().st_size > 0
