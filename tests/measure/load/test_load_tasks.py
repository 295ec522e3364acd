"""The load on translation, transcription and synthesis: what is sent, what is measured, and what is refused."""

from __future__ import annotations

import io
import json
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_results import sample_run
from task_server import SPEECH, SPEECH_S, serve_tasks

from meltcore.common import tasks as declared
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult, TaskLoad
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.fleet.bound import jobs_of
from meltcore.measure.load.fleet.fleet_config import parse_mix
from meltcore.measure.load.fleet.simulation import Job
from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.run.loops import ClosedLoop
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.tasks.task import check_workload, open_workload, tasks
from meltcore.measure.load.tasks.translation import TranslationResponse
from meltcore.measure.load.wire.response import COMPLETE
from meltcore.measure.load.workloads.clips import encode_wav
from meltcore.measure.report.comparisons.compare_runs import metrics_of
from meltcore.measure.report.render import render

FINE = ("OK", "CLIENT_BOUND")  # a busy machine may slow the client
TRANSLATE = "translate:src=eng_Latn,tgt=kan_Knda,words=3-5,sentences=1-3"
TRANSCRIBE = "transcribe:language=kn,seconds=1-3,clips=8"
SPEAK = "speak:voice=a voice (low),words=4"


def load(url: str, workload: str, **fields: Any) -> tuple[LevelResult, TaskLoad]:
    settings = {"concurrency": (4,), "num_prompts": (24,), "num_warmups": 0, **fields}
    [level] = run_levels(LoadConfig(url=url, workload=workload, **settings))
    assert level.task is not None
    return level, level.task


ECHO = """
from meltcore.common.tasks import Task
from meltcore.measure.load.record import TaskWork
from meltcore.measure.load.tasks.task import MeasuredTask, ThroughputUnit
from meltcore.measure.load.tasks.translation import TranslationResponse
from meltcore.measure.load.workloads.workload import Prompt, Workload

def open_workload(config, num_requests, clips):
    work = TaskWork(sentences=1)
    prompt = lambda index: Prompt("/v1/translate", {"sentences": [str(index)]}, work=work)
    return Workload(config.workload, prompt, False, TranslationResponse)

load = MeasuredTask(
    open=open_workload, default_workload=lambda model, sizes: "echo:",
    work_of=lambda record: 2.0, unit=ThroughputUnit("echoes_per_s", "Echoes per second", "echoes/s", "echo/s"),
)
task = Task(
    name="echo", title="echo", paths={"/v1/echo": "echo"}, backend="", engine="", messages="", needs="", concurrency=1,
    workload="echo_task:load",
)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A task of another package, found by its entry point."""
    (tmp_path / "echo_task.py").write_text(ECHO)
    metadata = tmp_path / "echo_task-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-task\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[meltcore.tasks]\necho = echo_task:task\n")
    monkeypatch.syspath_prepend(tmp_path)
    for each in (declared.tasks, tasks):
        each.cache_clear()
    yield
    for each in (declared.tasks, tasks):
        each.cache_clear()


@pytest.mark.usefixtures("echo")
def test_task_of_another_package_is_loaded_and_reported() -> None:
    with serve_tasks() as server:
        level, task = load(server.url, "echo:")
    assert (level.failed, level.verdict in FINE, task.task, task.work) == (0, True, "echo", 48.0)
    html = render(sample_run([level]))
    assert "echoes/s" in html
    assert parse_mix("generation=1,echo=2") == {"generation": 1.0, "echo": 2.0}
    assert [metric.name for metric in metrics_of(level)] == ["echoes/s", "E2E p50 ms", "E2E p99 ms", "accuracy"]


@pytest.mark.parametrize("tokens", [None, 7])
def test_translation_counts_sentences_and_source(tokens: int | None) -> None:
    with serve_tasks(delay_s=0.02, **({} if tokens is None else {"tokens": tokens})) as server:
        level, task = load(server.url, TRANSLATE)
        requests = server.received
    assert (level.failed, level.verdict in FINE, task.task) == (0, True, "translation")
    assert task.work == sum(len(request["sentences"]) for request in requests) > 24
    assert task.work_per_s == pytest.approx(task.work / level.duration_s)
    num_chars = sum(len(sentence) for request in requests for sentence in request["sentences"])
    assert (task.source_unit, task.source) == (("character", num_chars) if tokens is None else ("token", 24 * tokens))
    assert (level.e2e_ms.min or 0) >= 20
    assert {(request["src_lang"], request["tgt_lang"], request["model"]) for request in requests} == {
        ("eng_Latn", "kan_Knda", "scripted")
    }
    assert all(3 <= len(sentence.split()) <= 5 for request in requests for sentence in request["sentences"])
    assert len({str(request["sentences"]) for request in requests}) == 24, "each request has sentences of its own"


def test_transcription_sends_every_clip_and_counts_its_seconds() -> None:
    with serve_tasks(text="") as server:
        level, task = load(server.url, TRANSCRIBE, extra_body={"timestamp_granularities[]": "word"})
        requests = server.received
    assert (level.failed, level.verdict in FINE) == (0, True), "clips without speech have empty transcripts"
    assert task.empty_answers == 24
    lengths_s = []
    for request in requests:
        assert (request["language"], request["timestamp_granularities[]"]) == (b"kn", b"word")
        with wave.open(io.BytesIO(request["file"])) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
            lengths_s.append(file.getnframes() / 16_000)
    assert task.work == pytest.approx(sum(lengths_s)) == pytest.approx(24 * 2.0), "the mean of 1 to 3 s"
    assert len(set(lengths_s)) == 8
    assert task.work_per_s == pytest.approx(task.work / level.duration_s)


@pytest.mark.parametrize("speech_format", ["wav", "pcm"])
def test_synthesis_measures_first_audio_and_real_time_factor(speech_format: str) -> None:
    with serve_tasks(part_s=0.06) as server:
        level, task = load(
            server.url, f"{SPEAK},format={speech_format}", num_prompts=(8,), slo_ms={"first_audio": 100_000.0}
        )
    assert (level.failed, level.verdict in FINE) == (0, True)
    assert task.work == pytest.approx(8 * SPEECH_S)
    # WAV: the header comes 60 ms before the first sample, and is no audio.
    floor_ms, num_parts = (60, 3) if speech_format == "wav" else (0, 2)
    assert floor_ms <= (task.first_audio_ms.min or 0) < (level.e2e_ms.min or 0)
    assert task.real_time_factor.mean == pytest.approx((level.e2e_ms.mean or 0) / 1000 / SPEECH_S)
    assert (level.e2e_ms.min or 0) >= 60 * num_parts
    assert level.goodput_per_s == pytest.approx(8 / level.duration_s)
    assert server.received[0]["voice"] == "a voice (low)"


@pytest.mark.parametrize(
    ("workload", "behavior", "failure"),
    [
        (TRANSLATE, {"status": 429}, "http 429: the queue is full"),
        (TRANSLATE, {"drop": True}, "connection closed: connection closed before a response"),
        (TRANSLATE, {"translations": []}, "wrong answer: 0 translations of"),
        (TRANSLATE, {"tokens": -1}, "implausible usage: prompt_tokens -1"),
        (TRANSCRIBE, {"status": 503}, "http 503"),
        (TRANSCRIBE, {"text": None}, "bad json: Expected `str`, got `null`"),
        (SPEAK, {"audio": b""}, "empty answer: no audio"),
        (SPEAK, {"data_size": len(SPEECH) + 2}, "truncated audio: 2 bytes"),
    ],
)
def test_failures_are_counted_with_their_reason(workload: str, behavior: dict[str, Any], failure: str) -> None:
    with serve_tasks(**behavior) as server:
        level, task = load(server.url, workload, num_prompts=(4,))
    assert (level.failed, level.verdict, task.work) == (4, "FAILED", 0)
    assert next(iter(level.failures)).startswith(failure)


def test_empty_translations_are_no_clean_result() -> None:
    with serve_tasks(text="") as server:
        level, task = load(server.url, TRANSLATE, num_prompts=(4,))
    assert (level.verdict, task.empty_answers) == ("NO_TEXT", 4)
    assert "4 of 4 answers have an empty translation" in level.reasons[0]


@pytest.mark.slow
def test_worker_processes_send_the_clips_of_the_run(tmp_path: Path) -> None:
    records = tmp_path / "requests.jsonl"
    with serve_tasks(delay_s=0.01) as server:
        level, task = load(server.url, TRANSCRIBE, processes=2, records_path=records)
        files = {request["file"] for request in server.received}
    clips = open_workload(LoadConfig(url="", workload=TRANSCRIBE), 24).clips
    assert files == {clip.data for clip in clips}, "the same clips in every process"
    assert (level.failed, task.work) == (0, pytest.approx(48.0))
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert sum(line["audio_s"] for line in lines) == pytest.approx(48.0)


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "is_bound"), [(TRANSCRIBE, True), (TRANSLATE, False)])
def test_slow_burst_of_uploads_is_the_clients(workload: str, is_bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    release = ClosedLoop.release

    def release_slowly(self: ClosedLoop, at_s: float) -> None:
        release(self, at_s)
        time.sleep(1.1)

    monkeypatch.setattr(ClosedLoop, "release", release_slowly)
    with serve_tasks() as server:
        level, _ = load(server.url, workload, num_prompts=(4,))
    assert (level.verdict == "CLIENT_BOUND") is is_bound, level.reasons


def test_files_of_texts_and_clips_are_graded(tmp_path: Path) -> None:
    texts, manifest = tmp_path / "pairs.tsv", tmp_path / "clips.jsonl"
    texts.write_text("one\t<one>\ntwo\t<other>\n")
    (tmp_path / "tone.wav").write_bytes(encode_wav(np.zeros(8000, dtype=np.int16)))
    entries = [{"audio_filepath": "tone.wav", "text": text} for text in ("hello", "bye")]
    manifest.write_text("\n".join(map(json.dumps, entries)))
    with serve_tasks() as server:
        level, _ = load(server.url, f"translate:src=a,tgt=b,file={texts}", num_prompts=(4,))
        assert (level.accuracy, level.workload) == (0.5, "translate:src=a,tgt=b,file=pairs.tsv")
        level, task = load(server.url, f"transcribe:language=kn,manifest={manifest}", num_prompts=(4,))
    assert (level.accuracy, task.work, level.workload) == (0.5, 2.0, "transcribe:language=kn,manifest=clips.jsonl")


@pytest.mark.parametrize(
    ("workload", "fields", "message"),
    [
        ("translate:src=eng_Latn", {}, "needs src=LANGUAGE and tgt=LANGUAGE"),
        ("translate:src=a,tgt=b,words=9-3", {}, "not run backwards"),
        ("translate:src=a,tgt=b,script=Grek", {}, "script 'Grek' is not one of Latn"),
        ("translate:src=a,tgt=b,file=none.txt", {}, "none.txt: cannot be read"),
        (TRANSCRIBE.replace("language=kn,", ""), {}, "needs language=CODE"),
        ("transcribe:language=kn,clips=10001", {}, "at most 10,000; got 10,001"),
        ("transcribe:language=kn,seconds=40000", {}, "1 clips take 1,280,000,000 bytes; the limit is 1,073,741,824"),
        ("transcribe:language=kn,manifest=none.jsonl", {}, "none.jsonl: cannot be read"),
        ("speak:voice=a,format=mp3", {}, "format mp3 is not one of wav, pcm"),
        (TRANSLATE, {"slo_ms": {"first_audio": 1.0}}, "first_audio is not measured of translation; e2e is"),
        (SPEAK, {"slo_ms": {"ttft": 1.0}}, "ttft is not measured of synthesis; e2e, first_audio is"),
        (
            "problems:short",
            {"slo_ms": {"first_audio": 1.0}},
            "first_audio is not measured of generation; ttft, tpot, itl, e2e is",
        ),
        (SPEAK, {"max_tokens": 5}, "--max-tokens is for generation"),
        (TRANSLATE, {"tokenizer": "."}, "--tokenizer is for generation"),
    ],
)
def test_bad_descriptions_are_refused(workload: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_workload(LoadConfig(url="", workload=workload, **fields))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"x"', "line 1: not a JSON object"),
        ('{"audio_filepath": "none.wav"}', "line 1: none.wav cannot be read"),
        ('{"audio_filepath": "clips.jsonl"}', "line 1: clips.jsonl is no WAV file with samples, so it needs its"),
        ("", "has no clips"),
    ],
)
def test_bad_manifests_are_refused(tmp_path: Path, entry: str, message: str) -> None:
    manifest = tmp_path / "clips.jsonl"
    manifest.write_text(entry)
    with pytest.raises(ConfigError, match=message):
        check_workload(LoadConfig(url="", workload=f"transcribe:language=kn,manifest={manifest}"))


def test_steps_of_a_translation_are_its_target_tokens() -> None:
    work = TaskWork(sentences=2, source_chars=80)
    record = RequestRecord(index=0, intended_s=5.0, ended_s=6.0, work=work)
    response = TranslationResponse(record, lambda _: None, keep_text=False)
    answer = {"translations": ["a", "b"], "usage": {"prompt_tokens": 20, "completion_tokens": 14}}
    assert response._read(json.dumps(answer).encode()) == (["a", "b"], COMPLETE)
    assert record.work == TaskWork(sentences=2, source_chars=80, target_tokens=14)
    assert jobs_of([record], 4.0) == [Job(1.0, 2, 80.0, 7)]
