"""Submissions: the public schema field by field, the rules, and what is missing."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import CheckResult, Evaluation, Fingerprint, LevelChecks, LevelResult, RunResult
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.evals.submission_files import decision_items, find_section
from meltcore.measure.experiments.servers import MeltcoreServer

# A checkout of the public harness, whose own programs then read our files and check our server.
HARNESS = os.environ.get("MELTCORE_PUBLIC_HARNESS")
needs_harness = pytest.mark.skipif(not HARNESS, reason="set MELTCORE_PUBLIC_HARNESS to a checkout of the harness")
SERVED = {
    "model": "Qwen/Qwen3.5-35B-A3B", "weights": "real", "weight_dtypes": ["bfloat16", "float32"], "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16", "speculative_decoding": "none", "device": "8 x NVIDIA H200", "replicas": 8,
    "tokenizer": "real",
}  # fmt: skip
ASKED = {"what": "gsm8k", "data": "openai/gsm8k", "limit": 200, "shots": "lm-eval", "comparable": True}
LOADED = {
    "what": "throughput", "levels": list(WEIGHTS), "num_prompts": 64, "input_len": 1024, "output_len": 1024,
    "ignore_eos": False, "reuse_prompts": False, "speed_only": False,
}  # fmt: skip
FINGERPRINT = Fingerprint(
    cpu="Example CPU", cores=2, memory_bytes=2**30, kernel="Linux", python="3.12", versions={"meltcore": "0.2.0"},
    git_revision="0123abcd", taken="2026-11-23T00:00:00+00:00",
)  # fmt: skip


def level(concurrency: int) -> LevelResult:
    """63 of 64 answered in 8 s: 64,000 prompt tokens without a template of 12, 20,000 of answers."""
    return LevelResult(
        concurrency=concurrency, requests=64, succeeded=63, failed=1, peak_in_flight=concurrency, duration_s=8.004,
        output_tokens_per_s=2_506.2, total_tokens_per_s=10_596.9, prompt_tokens=64_756, output_tokens=20_060,
        checks=LevelChecks(
            spot_checks=2, spot_checks_correct=1, counted_prompt_tokens=64_000, counted_output_tokens=20_050,
            counts_agree=concurrency != 4, counted_content_tokens=20_000,
        ),
    )  # fmt: skip


def result(settings: dict[str, Any], started: str = "2026-11-23T01:00:00+00:00", **parts: Any) -> RunResult:
    return RunResult(
        command="eval", status=parts.pop("status", "complete"), started=started, duration_s=9.0,
        fingerprint=FINGERPRINT, settings=settings, **parts,
    )  # fmt: skip


def gsm8k_parts(correct: int = 183) -> dict[str, Any]:
    return {
        "evaluation": Evaluation(total=200, correct=correct, strict_correct=182, failed=0, ci_low=0.8, ci_high=0.9),
        "gates": [CheckResult(name="GSM8K", status="PASS" if correct >= 175 else "FAIL", detail=f"{correct}")],
    }


def write(folder: Path, found: RunResult, answers: list[str] | None = None) -> Path:
    folder.mkdir(parents=True)
    RunFolder(folder).write_result(found)
    if answers is not None:
        (folder / "gsm8k.jsonl").write_text("".join(json.dumps({"answer": each}) + "\n" for each in answers))
    return folder


def runs(root: Path, asked: dict[str, Any] | None = None, loaded: dict[str, Any] | None = None, **more: Any) -> Path:
    """A GSM8K run and a throughput run; `asked` and `loaded` change the settings, None as a value removes one."""
    settings = [
        {name: value for name, value in (SERVED | own | (changes or {})).items() if value is not None}
        for own, changes in ((ASKED, asked), (LOADED, loaded))
    ]
    answers = more.get("answers", ["The answer is 3."])
    write(root / "asked", result(settings[0], **gsm8k_parts(more.get("correct", 183))), answers)
    gates = [CheckResult(name="every request answered completely", status="PASS")]
    write(root / "loaded", result(settings[1], levels=[level(load) for load in WEIGHTS], gates=gates))
    return root


def submit(folder: Path, *arguments: Path | str) -> int:
    return main(["submit", str(folder), *map(str, arguments)])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# --- the result files


def test_files_have_the_public_schema_field_by_field(tmp_path: Path) -> None:
    assert submit(tmp_path / "out", runs(tmp_path / "runs")) == 0
    correct = read(tmp_path / "out/results/correctness.json")
    assert correct == {
        "task": "gsm8k_cot",
        "limit": 200,
        "seed": None,
        "accuracy": 0.915,
        "full_results": {
            "alias": "gsm8k_cot",
            "exact_match,strict-match": 0.91,
            "exact_match_stderr,strict-match": pytest.approx(math.sqrt(0.91 * 0.09 / 199)),
            "exact_match,flexible-extract": 0.915,
            "exact_match_stderr,flexible-extract": pytest.approx(math.sqrt(0.915 * 0.085 / 199)),
        },
    }
    measured = read(tmp_path / "out/results/throughput.json")
    assert (measured.keys(), measured["model"]) == ({"model", "config", "results"}, "Qwen/Qwen3.5-35B-A3B")
    assert measured["config"] == {
        "input_tokens": 1024,
        "output_tokens": 1024,
        "num_requests_per_level": 64,
        "num_prompts": 7 * (2 + 62),
        "spot_checks_per_level": 2,
    }
    assert measured["results"] == [
        {
            "concurrency": concurrency,
            "throughput_tok_per_sec": 10_494.75,  # 84,000 verified tokens in 8.004 s
            "total_tokens": 84_000,
            "total_prompt_tokens": 64_000,
            "total_completion_tokens": 20_000,
            "reported_prompt_tokens": 64_756,
            "reported_completion_tokens": 20_060,
            "successful_requests": 63,
            "failed_requests": 1,
            "wall_time_sec": 8.0,
            "token_discrepancy": concurrency == 4,
            "spot_checks_passed": 1,
            "spot_checks_total": 2,
        }
        for concurrency in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert read(tmp_path / "out/submission.json")["public_score"] == pytest.approx(22 * 10_494.75)


def test_prompts_that_levels_share_are_counted_once(tmp_path: Path) -> None:
    submit(tmp_path / "out", runs(tmp_path / "runs", loaded={"reuse_prompts": True}))
    assert read(tmp_path / "out/results/throughput.json")["config"]["num_prompts"] == 128


def test_other_problems_do_not_pass_for_gsm8k(tmp_path: Path) -> None:
    submit(tmp_path / "out", runs(tmp_path / "runs", asked={"comparable": False, "data": "mine.jsonl"}))
    found = read(tmp_path / "out/results/correctness.json")
    assert (found["task"], found["full_results"]["alias"]) == ("mine.jsonl (not gsm8k_cot)", "mine.jsonl")


@needs_harness
@pytest.mark.parametrize(("correct", "score"), [(183, "230884.50"), (150, "0")])
def test_harness_scores_our_files(tmp_path: Path, correct: int, score: str) -> None:
    submit(tmp_path / "out", runs(tmp_path / "runs", correct=correct))
    files = tmp_path / "out/results"
    command = [sys.executable, "-m", "eval.score", "--correctness", str(files / "correctness.json"),
               "--throughput", str(files / "throughput.json")]  # fmt: skip
    done = subprocess.run(command, cwd=HARNESS, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"Score(?: =|:) (\S+)", done.stdout)[1] == score  # type: ignore[index]
    assert read(tmp_path / "out/submission.json")["public_score"] == pytest.approx(float(score))


# --- the folder


def test_submission_holds_script_write_up_report_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert submit(out, runs(tmp_path / "runs"), "--rules", "hackathon") == 0
    printed = capsys.readouterr().out
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    listed = {"start_server.sh", "WRITEUP.md", "results/correctness.json", "results/throughput.json"}
    assert files == listed | {"report.html", "result.json", "submission.json"}
    assert os.access(out / "start_server.sh", os.X_OK)
    assert (out / "start_server.sh").read_bytes() == (ROOT / "scripts/start_server.sh").read_bytes()
    record = read(out / "submission.json")
    assert (record["verdict"], record["rules"]) == ("ACCEPTED", "hackathon")
    assert {gate["status"] for gate in record["gates"]} == {"PASS"}
    assert record["settings"] == {"asked": SERVED, "loaded": SERVED}
    assert record["files"] == {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in listed}
    assert "KV cache in BF16" in (out / "report.html").read_text()
    assert "score of the result files: 230,884.50" in printed


def test_failed_gate_is_a_score_of_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(tmp_path / "out", runs(tmp_path / "runs", correct=174)) == 1
    assert read(tmp_path / "out/submission.json")["public_score"] == 0
    assert "score: 0, because of GSM8K: 174" in " ".join(capsys.readouterr().out.split())
    assert "our own score is 0" in (tmp_path / "out/WRITEUP.md").read_text()


def test_folder_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/results.txt").touch()
    assert submit(tmp_path / "out", runs(tmp_path / "runs")) == 2
    assert "out is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.txt"]


# --- rules


@pytest.mark.parametrize("part", ["asked", "loaded"])
@pytest.mark.parametrize(
    ("name", "value", "rule", "status"),
    [
        ("weight_dtypes", ["bfloat16", "float8_e4m3fn"], "weights in BF16", "FAIL"),
        ("weight_dtypes", ["int8"], "weights in BF16", "FAIL"),
        ("weight_dtypes", ["float32"], "weights in BF16", "FAIL"),
        ("weight_dtypes", None, "weights in BF16", "NOT RUN"),
        ("kv_cache_dtype", "float8_e4m3fn", "KV cache in BF16", "FAIL"),
        ("kv_cache_dtype", None, "KV cache in BF16", "NOT RUN"),
        ("dtype", "bfloat16+fp8-weights", "computation in BF16", "FAIL"),
        ("speculative_decoding", "ngram", "no speculative decoding", "FAIL"),
        ("speculative_decoding", None, "no speculative decoding", "NOT RUN"),
        ("weights", "dummy", "the checkpoint's weights", "FAIL"),
        ("debug", ["--no-async-scheduling", "uniform-routing"], "no option that changes answers", "FAIL"),
    ],
)
def test_forbidden_setting_of_either_run_is_refused_and_recorded(
    tmp_path: Path, part: str, name: str, value: object, rule: str, status: str
) -> None:
    found = runs(tmp_path / "runs", **{part: {name: value}})
    assert submit(tmp_path / "out", found, "--rules", "hackathon") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["submission.json"]
    record = read(tmp_path / "out/submission.json")
    assert (record["verdict"], record["public_score"], record["files"]) == ("REFUSED", None, {})
    [gate] = [gate for gate in record["gates"] if gate["status"] != "PASS"]
    assert (gate["name"].startswith(rule), gate["status"]) == (True, status)
    if value is not None:
        assert all(word in gate["detail"] for word in ([value] if isinstance(value, str) else value))
        assert record["settings"][part][name] == value


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"asked": {"model": "other"}, "loaded": {"model": "other"}}, "model Qwen"),
        ({"answers": ["<think>\n3"]}, "no <think> tag"),
        ({"answers": None}, "no <think> tag"),
        ({"loaded": {"output_len": 512}}, "the public harness's workload"),
        ({"asked": {"limit": 100}}, "the public harness's workload"),
        ({"asked": {"comparable": False}}, "GSM8K's own problems"),
        ({"asked": {"comparable": None}}, "GSM8K's own problems"),
    ],
)
def test_other_model_answers_or_workload_are_refused(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    assert submit(tmp_path / "out", runs(tmp_path / "runs", **changes), "--rules", "hackathon") == 1
    gates = read(tmp_path / "out/submission.json")["gates"]
    [gate] = [gate for gate in gates if gate["status"] != "PASS"]
    assert gate["name"].startswith(rule)


def test_debug_options_that_keep_answers_are_allowed(tmp_path: Path) -> None:
    found = runs(tmp_path / "runs", loaded={"debug": ["--no-async-scheduling"]})
    assert submit(tmp_path / "out", found, "--rules", "hackathon") == 0


def test_without_rules_nothing_is_refused(tmp_path: Path) -> None:
    assert submit(tmp_path / "out", runs(tmp_path / "runs", loaded={"kv_cache_dtype": "float8_e4m3fn"})) == 0
    record = read(tmp_path / "out/submission.json")
    assert (record["verdict"], record["rules"], record["gates"]) == ("NOT CHECKED", "none", [])


# --- which runs


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], *places: Path) -> str:
    assert submit(tmp_path / "out", *places) == 2
    assert not (tmp_path / "out").exists()
    return capsys.readouterr().err


def test_missing_results_name_the_command_that_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = runs(tmp_path / "runs")
    error = refusal(tmp_path, capsys, found / "loaded")
    assert "no finished GSM8K run in" in error
    assert "run `meltcore eval gsm8k URL --data test.jsonl`" in error
    error = refusal(tmp_path, capsys, found / "asked")
    assert "no finished throughput run in" in error
    assert "run `meltcore eval throughput URL --tokenizer MODEL_FOLDER`" in error
    assert "no finished GSM8K run in" in refusal(tmp_path, capsys, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("settings", "status", "reason"),
    [
        ({"speed_only": True}, "complete", "--speed-only: no answer was checked"),
        ({"what": "baseline"}, "complete", "another server's, as a baseline"),
        ({}, "partial", "partial"),
    ],
)
def test_unusable_run_is_named_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], status: str, reason: str
) -> None:
    found = runs(tmp_path / "runs")
    shutil.rmtree(found / "loaded")
    write(found / "other", result(SERVED | LOADED | settings, levels=[level(1)], status=status))
    assert f"skipped other ({reason})" in refusal(tmp_path, capsys, found)


@pytest.mark.parametrize(("hour", "chosen"), [("00", ["asked", "loaded"]), ("02", ["whole"])])
def test_newest_results_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hour: str, chosen: list[str]
) -> None:
    found = runs(tmp_path / "runs")
    settings = SERVED | ASKED | LOADED | {"what": "all"}
    parts = {**gsm8k_parts(), "levels": [level(load) for load in WEIGHTS]}
    write(found / "whole", result(settings, f"2026-11-23T{hour}:00:00+00:00", **parts), ["3"])
    assert submit(tmp_path / "out", found) == 0
    assert list(read(tmp_path / "out/submission.json")["settings"]) == chosen
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("run: ")] == [
        f"run: {found / name}" for name in chosen
    ]


def test_levels_counted_by_an_older_version_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = runs(tmp_path / "runs")
    stored = read(found / "loaded/result.json")
    del stored["levels"][0]["checks"]["counted_content_tokens"]
    (found / "loaded/result.json").write_text(json.dumps(stored))
    error = refusal(tmp_path, capsys, found)
    assert "at concurrency 1 were not counted as the public harness does; measure again: meltcore eval thr" in error


# --- the write-up


@pytest.fixture
def source(tmp_path: Path) -> Path:
    copy = tmp_path / "source"
    shutil.copytree(ROOT / "docs", copy / "docs")
    (copy / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/start_server.sh", copy / "scripts")
    return copy


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def test_write_up_is_made_of_the_documents(tmp_path: Path, source: Path) -> None:
    edit(source / "docs/architecture.md", lambda text: text.replace("1. **Connection.**", "1. **Changed words.**"))
    edit(source / "docs/decisions/all-reduce.md", lambda text: text.replace("**Decision:** ", "**Decision:** first, "))
    found = runs(tmp_path / "runs")
    assert submit(tmp_path / "out", found, "--source", source, "--rules", "hackathon") == 0
    text = (tmp_path / "out/WRITEUP.md").read_text()
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    assert headings == ["Approach", "Architecture", "Optimizations", "Results", "Rules", "Reproduce"]
    assert "1. **Changed words.** The supervisor accepts" in text
    assert "- All-reduce: first, small messages use" in text
    assert "| 64 | 8 | 10,494.75 | 63 of 64 | 8.00 |" in text
    assert "- PASS: KV cache in BF16 (kv_cache_dtype: bfloat16)" in text
    assert "183 of 200 correct" in text
    assert "FP8 KV cache" not in text
    assert "](" not in text  # no link to a page that is not part of the submission
    assert len(text.split()) < 1450  # 23 decisions of about 35 words among them


def test_document_without_its_part_is_named(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = runs(tmp_path / "runs")
    edit(source / "docs/decisions/all-reduce.md", lambda text: text.replace("**Decision:**", "Decision:"))
    assert submit(tmp_path / "out", found, "--source", source) == 2
    assert "all-reduce.md states no decision for the write-up" in capsys.readouterr().err
    assert submit(tmp_path / "out", found, "--source", tmp_path) == 2
    assert f"{tmp_path} has no docs and no scripts/start_server.sh" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_section_is_what_stands_below_its_heading() -> None:
    text = "# Title\n\nFirst.\n\n## One\n\nBody.\n\n### Deeper\n\nMore.\n\n## Two\nEnd.\n"
    assert find_section(text, None) == "First."
    assert find_section(text, "One") == "Body.\n\n### Deeper\n\nMore."
    assert find_section(text, "Two") == "End."
    with pytest.raises(ConfigError, match="no section 'Three'"):
        find_section(text, "Three")


def test_fp8_cache_is_described_only_where_it_served() -> None:
    assert any(item.startswith("- FP8 KV cache: both caches are read") for item in decision_items(ROOT, fp8_cache=True))
    assert not any("FP8 KV cache" in item for item in decision_items(ROOT, fp8_cache=False))


# --- a real server


@needs_harness
@pytest.mark.slow
def test_our_server_passes_the_harness_own_check(tmp_path: Path) -> None:
    command = [
        "serve",
        "meltcore/sums",
        "--port",
        "0",
        "--device",
        "cpu",
        "--served-model-name",
        "Qwen/Qwen3.5-35B-A3B",
    ]
    with MeltcoreServer(command, tmp_path / "log", report=print) as server:
        command = [sys.executable, "-m", "eval.check_server", "--base-url", server.wait_ready()]
        done = subprocess.run(command, cwd=HARNESS, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, "All checks passed." in done.stdout) == (0, True), done.stdout
