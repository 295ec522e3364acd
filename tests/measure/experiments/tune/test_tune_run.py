"""Tuning from end to end: a scripted server with a known knee and known limits, and the bundled model on a CPU."""

import sys
from pathlib import Path

import msgspec
import pytest
from places import program

import meltcore
from meltcore.cli.main import main
from meltcore.measure.documents.tuning import Tuning, TuningPoint

TUNED = f"{sys.executable} {program('tuned_server.py')} --port {{port}}"
BUNDLED = str(Path(meltcore.__file__).parent / "bundled" / "sums")
LENGTH = ["--flag", "max_model_len=--length"]


def tune(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> Tuning:
    assert main(["tune", *arguments, "--out", str(tmp_path / "runs"), "--json"]) == code
    [folder] = (tmp_path / "runs").iterdir()
    kept = msgspec.json.decode((folder / "tuning.json").read_bytes(), type=Tuning)
    assert msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=Tuning) == kept
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert kept.command in page.replace("&#39;", "'")
    return kept


def command_file(tmp_path: Path, more: str = "") -> str:
    (tmp_path / "server.cmd").write_text(f"{TUNED} {more}\n")
    return str(tmp_path / "server.cmd")


@pytest.mark.slow
def test_sweep_finds_the_knee_within_the_slo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "4", "--num-prompts", "4", "--workload", "random:in=8,out=8"]
    # One sequence takes 2.4 s by the script, more of them 40 ms, and on a busy machine far below 2 s too.
    file = command_file(tmp_path, "--alone-s 0.3")
    sweep = ["batching", "--run", file, "--max-num-seqs", "1,4,8", "--goodput", "e2e:2000"]
    found = tune([*sweep, *load], tmp_path, capsys)
    assert [point.settings for point in found.points] == [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 4},
        {"max_num_seqs": 8},
    ]
    assert [point.args for point in found.points[:2]] == [[], ["--max-num-seqs", "1"]]
    assert found.points[1].slo_attainment == 0.0
    assert found.knee in (2, 3)
    assert 0 < found.points[found.knee].output_tokens_per_s < 1.05 * 4 * 8 / 0.040, "none is faster than the script"
    assert found.default is found.points[0]  # with 4 sequences
    assert "Against the default settings" in found.finding
    assert found.default_settings == {"max_num_seqs": 4}
    [repeated] = [note for note in found.notes if "second start of the same setting" in note]
    assert repeated.startswith("seqs 4 is the server's default")


@pytest.mark.slow
def test_search_finds_the_limits_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["context", "--run", command_file(tmp_path), *LENGTH, "--max-model-len", "8192", "--seq-len", "1024"]
    found = tune([*search, "--max-num-seqs", "8"], tmp_path, capsys)
    facts = {fact.name: fact.value for fact in found.facts}
    assert facts["largest context"] == "4,096 tokens"
    assert facts["concurrent sequences of 1,024 tokens"] == "5"
    assert facts["sequences of 1,024 tokens that fit in it"] == "5"
    refused = next(point for point in found.points if point.settings == {"max_model_len": 8192})
    assert "8192 tokens need more memory than there is" in refused.reason
    assert any("out of memory" in point.reason for point in found.points)


def test_no_running_setting_exits_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.cmd").write_text(f"{sys.executable} -c 'import sys; sys.exit(9)' {{port}} {{args}}")
    found = tune(["batching", "--run", str(tmp_path / "broken.cmd"), "--max-num-seqs", "1"], tmp_path, capsys, code=1)
    assert all("ended with code 9" in point.reason for point in found.points)
    assert found.default is None
    assert found.finding == "No setting ran."
    [folder] = (tmp_path / "runs").iterdir()
    lines = (folder / "points.jsonl").read_text().splitlines()
    assert [msgspec.json.decode(line, type=TuningPoint) for line in lines] == found.points, "kept as they came"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["batching"], "takes a MODEL for our engine, or --run FILE"),
        (["batching", "m", "--run", "x.cmd"], "takes a MODEL for our engine, or --run FILE"),
        (["batching", "m", "--concurrency", "1,2"], "give one value as --concurrency"),
        (["batching", "m", "--goodput", "beauty:1"], "beauty is not measured of generation; ttft, "),
        (["batching", "m", "--max-num-seqs", "4,0"], "'0' is not a whole number of at least 1"),
        (["batching", "m", "--workload", "missing.jsonl"], "workload missing.jsonl: cannot be read"),
        (["batching", "m", "--start-timeout", "nan"], "'nan' is not a number of more than 0"),
        (["context", "m", "--model-len-step", "0"], "'0' is not a whole number of at least 1"),
        (["context", "m", "--max-num-seqs", "0"], "'0' is not a whole number of at least 1"),
        (["context", "m", "--min-model-len", "16"], "'16' is not a whole number of at least 17"),
        (["precision", "m", "--questions", "-1"], "'-1' is not a whole number of at least 0"),
    ],
)
def test_invalid_arguments_start_no_server(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["tune", *arguments, "--out", str(tmp_path)])
    except SystemExit as error:  # of argparse
        code = int(error.code or 0)
    assert code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_precision_without_questions_compares_speed_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.cmd").write_text(f"{TUNED} --max-num-seqs 2\n")
    options = [
        "--dtypes",
        "",
        "--questions",
        "0",
        "--concurrency",
        "2",
        "--num-prompts",
        "4",
        "--workload",
        "random:in=8,out=8",
    ]
    found = tune(["precision", "--run", str(tmp_path / "server.cmd"), *options], tmp_path, capsys)
    assert [point.ok for point in found.points] == [True, False, False, False], "this server has no FP8"
    assert [point.args for point in found.points[1:3]] == [["--quantization", "fp8"], ["--kv-cache-dtype", "fp8"]]
    assert found.points[0].answers is None
    assert found.finding.startswith("the default is the fastest")
    assert "correct" not in found.finding


@pytest.mark.slow
def test_our_engine_needs_only_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most sequences that run without preemption are those that fit in the cache by calculation."""
    size = ["--serve-args", "--memory 12MiB", "--seq-len", "512"]
    size += ["--max-model-len", "512", "--min-model-len", "256", "--model-len-step", "256"]
    found = tune(["context", BUNDLED, *size, "--max-num-seqs", "2", "--kv-bytes", "4"], tmp_path, capsys)
    facts = {fact.name: fact.value for fact in found.facts}
    assert facts["largest context"] == "512 tokens"
    assert facts["concurrent sequences of 512 tokens"] == facts["sequences of 512 tokens that fit in it"] == "1"
    assert facts["keys and values"].startswith("4,096 bytes per token")


@pytest.mark.slow
def test_precisions_of_our_engine_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency", "4", "--num-prompts", "4", "--questions", "12", "--no-fp8"]
    found = tune(["precision", BUNDLED, "--dtypes", "bfloat16", *load], tmp_path, capsys)
    default, second = (point.answers for point in found.points)
    assert default is not None
    assert second is not None
    assert default.identical == 12
    assert second.correct >= 11
    assert second.tokens_compared > 50
    assert second.logprob_diff_max is not None
    assert 0 < second.logprob_diff_max < 1
