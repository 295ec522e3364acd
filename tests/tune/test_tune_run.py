"""Tuning from end to end: a scripted server with a known knee and known limits, and the bundled model on a CPU."""

import sys
from pathlib import Path

import msgspec
import pytest

import meltcore
from meltcore.cli.main import main
from meltcore.results.tuning import Tuning, TuningPoint

TUNED = f"{sys.executable} {Path(__file__).parent / 'tuned_server.py'} --port {{port}}"
BUNDLED = str(Path(meltcore.__file__).parent / "bundled" / "sums")
LENGTH = ["--flag", "length=--length"]


def tune(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> Tuning:
    assert main(["tune", *arguments, "--out", str(tmp_path / "runs"), "--json"]) == code
    [folder] = (tmp_path / "runs").iterdir()
    kept = msgspec.json.decode((folder / "tuning.json").read_bytes(), type=Tuning)
    assert msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=Tuning) == kept
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert kept.command in page.replace("&#39;", "'")
    return kept


def command_file(tmp_path: Path) -> str:
    (tmp_path / "server.cmd").write_text(TUNED + "\n")
    return str(tmp_path / "server.cmd")


def test_a_sweep_finds_the_knee_and_keeps_to_the_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "4", "--requests", "12", "--workload", "random:in=8,out=8"]
    sweep = ["batching", "--run", command_file(tmp_path), "--seqs", "1,4,8", "--slo", "e2e:120"]
    found = tune([*sweep, *load], tmp_path, capsys)
    assert [point.settings for point in found.points] == [{}, {"seqs": 1}, {"seqs": 4}, {"seqs": 8}]
    assert [point.words for point in found.points[:2]] == [[], ["--max-num-seqs", "1"]]
    assert found.points[1].within_limits == 0.0  # 8 tokens of 20 ms each
    assert found.knee in (2, 3)
    assert found.points[found.knee].output_tokens_per_s == pytest.approx(4 * 8 / 0.045, rel=0.3)
    assert found.shipped is found.points[0]  # it ships with 4 sequences
    assert "Against the server as it is shipped" in found.finding


def test_the_search_finds_the_limits_that_the_server_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["context", "--run", command_file(tmp_path), *LENGTH, "--most", "8192", "--length", "1024"]
    found = tune([*search, "--most-seqs", "8"], tmp_path, capsys)
    facts = {fact.name: fact.value for fact in found.facts}
    assert facts["largest context"] == "4,096 tokens"
    assert facts["sequences of 1,024 tokens at once"] == "5"
    assert facts["sequences of 1,024 tokens that it holds"] == "5"
    refused = next(point for point in found.points if point.settings == {"length": 8192})
    assert "8192 tokens need more memory than there is" in refused.why
    assert any("memory ran out" in point.why for point in found.points)


def test_nothing_that_runs_is_an_answer_of_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.cmd").write_text(f"{sys.executable} -c 'import sys; sys.exit(9)' {{port}} {{args}}")
    found = tune(["batching", "--run", str(tmp_path / "broken.cmd"), "--seqs", "1"], tmp_path, capsys, code=1)
    assert all("ended with code 9" in point.why for point in found.points)
    assert found.shipped is None
    assert found.finding == "No setting ran."
    [folder] = (tmp_path / "runs").iterdir()
    lines = (folder / "points.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line, type=TuningPoint) for line in lines] == found.points, "kept as they came"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["batching"], "takes a MODEL for our engine, or --run FILE"),
        (["batching", "m", "--run", "x.cmd"], "takes a MODEL for our engine, or --run FILE"),
        (["batching", "m", "--concurrency", "1,2"], "give one --concurrency"),
        (["batching", "m", "--slo", "beauty:1"], "unknown beauty"),
        (["batching", "m", "--seqs", "4,0"], "--seqs must each be at least 1; got 4,0"),
        (["batching", "m", "--workload", "missing.jsonl"], "workload missing.jsonl: cannot be read"),
        (["batching", "m", "--start-timeout", "nan"], "--start-timeout must be more than 0 seconds"),
        (["context", "m", "--step", "0"], "--step must be at least 1; got 0"),
        (["context", "m", "--most-seqs", "0"], "--most-seqs must be at least 1"),
        (["context", "m", "--least", "16"], "--least must be at least 17"),
        (["precision", "m", "--questions", "-1"], "--questions must be at least 0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments, "--out", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err


def test_speed_alone_is_compared_where_nothing_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.cmd").write_text(f"{TUNED} --max-num-seqs 2\n")
    words = [
        "--dtypes",
        "",
        "--questions",
        "0",
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--workload",
        "random:in=8,out=8",
    ]
    found = tune(["precision", "--run", str(tmp_path / "server.cmd"), *words], tmp_path, capsys)
    assert [point.ok for point in found.points] == [True, False, False, False], "that server knows no fp8"
    assert [point.words for point in found.points[1:3]] == [["--quantization", "fp8"], ["--kv-cache-dtype", "fp8"]]
    assert found.points[0].answers is None
    assert found.finding.startswith("the server as shipped is the fastest")
    assert "right" not in found.finding


@pytest.mark.slow
def test_our_engine_is_tuned_by_its_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most sequences that run without preemption are those that arithmetic says fit the cache."""
    size = ["--serve", "--memory 14MiB", "--length", "512", "--most", "512", "--least", "256", "--step", "256"]
    found = tune(["context", BUNDLED, *size, "--most-seqs", "3", "--kv-bytes", "4"], tmp_path, capsys)
    facts = {fact.name: fact.value for fact in found.facts}
    assert facts["largest context"] == "512 tokens"
    assert facts["sequences of 512 tokens at once"] == facts["sequences of 512 tokens that it holds"] == "2"
    assert facts["keys and values"].startswith("4,096 bytes a token")


@pytest.mark.slow
def test_precisions_of_our_engine_are_set_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "4", "--requests", "8", "--questions", "12", "--no-fp8"]
    found = tune(["precision", BUNDLED, "--dtypes", "float32,bfloat16", *load], tmp_path, capsys)
    shipped, first, second = (point.answers for point in found.points)
    assert shipped is not None
    assert first is not None
    assert second is not None
    assert shipped.same_text == 12
    assert first.same_text == 12
    assert first.logprob_most is not None
    assert first.logprob_most < 1e-3, "as shipped, but for what the company in a batch rounds differently"
    assert second.right >= 11
    assert second.tokens_compared > 50
    assert second.logprob_most is not None
    assert 0 < second.logprob_most < 1
