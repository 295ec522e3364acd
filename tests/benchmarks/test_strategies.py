"""strategies.py: the workers' numbers become one table, and whatever a worker does, none is left."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import bench_output
import pytest
import strategies
import strategy_worker
from places import ROOT
from strategies import Strategy

RESULTS = bench_output.RESULTS  # before a test replaces it
DOCUMENT = ROOT / "docs" / "decisions" / "earlier-measurements.md"
# Speaks as strategy_worker.py does. Its first argument is the strategy: what it is to do.
WORKER = """
import json, os, sys, time
kind, place = sys.argv[1], int(sys.argv[sys.argv.index("--process") + 1])
open(f"{kind}.{place}.pid", "w").write(str(os.getpid()))
print("a library says hello")
if kind == "dies":
    sys.exit("CUDA out of memory")
print("warm", flush=True)
if kind == "interrupts" and place == 1:
    sys.stdin.readline()  # both have been started
    os.kill(os.getppid(), 2)
    time.sleep(60)
sys.stdin.readline()
done = {"tokens": 1280, "requests": 10, "started_s": 100.0 + place, "ended_s": 104.0 + place}
print("done " + json.dumps(done), flush=True)
time.sleep(60)
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(strategies, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(bench_output, "RESULTS", tmp_path / "results")
    return ["strategies.py", "--device", "cpu", "--dtype", "float32", "--seconds", "0.1"]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, *wanted: Strategy) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", arguments)
    if wanted:
        monkeypatch.setattr(strategies, "strategies", lambda args: list(wanted))
    status = strategies.main()
    return status, json.loads((bench_output.RESULTS / "strategies" / "cpu.json").read_text())["runs"][-1]


def gone(*names: str) -> bool:
    return not any(Path(f"/proc/{Path(f'{name}.pid').read_text()}").exists() for name in names)


def test_each_strategy_has_a_row_with_ours_beside_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "find_spec", lambda name: name if name == "transformers" else None)
    status, result = run(arguments, monkeypatch)
    assert status == 0
    rates = {row["work"]: row["value"] for row in result["rows"]}
    assert rates == {
        "transformers, one request at a time": 320.0,
        "transformers, generate on batches of 64": 320.0,
        "transformers, torch.compile and a static cache, batches of 64": 320.0,
        "transformers, 16 asynchronous tasks, one request each": 320.0,
        "transformers, 4 processes, batches of 64 each": pytest.approx(4 * 1280 / 7.0),
        "transformers, 4 processes, one request each": pytest.approx(4 * 1280 / 7.0),
        "meltcore, all concurrently, 1,000 requests": 320.0,
    }
    assert [row.get("ratio") for row in result["rows"]] == [1.0] * 4 + [pytest.approx(7 / 16)] * 2 + [None]
    notes = "\n".join(result["notes"])
    assert "transformers, 4 processes, one request each: 731 output tokens/s, of 40 requests in 7.0 s" in notes
    for name, reason in {
        "transformers, INT8 weights (bitsandbytes), batches of 64": "not installed: bitsandbytes, accelerate; name a",
        "transformers, 16 CUDA streams, one request each": "needs a GPU: only CUDA has streams",
        "ONNX Runtime, batches of 64": "not installed: onnxruntime-gpu, onnx; name a folder",
        "TensorRT-LLM, 1,000 concurrent requests": "needs a GPU: TensorRT-LLM",
        "SGLang, 1,000 concurrent requests": "needs a GPU: SGLang",
        "vLLM, 1,000 concurrent requests": "needs a GPU: vLLM",
    }.items():
        assert f"{name}: not run: {reason}" in notes
    assert len(result["notes"]) == 13, "every strategy has a row or a reason"
    assert gone(*(f"transformers.{place}" for place in range(4)), "meltcore.0")


def test_worker_that_dies_is_a_reason_and_the_rest_goes_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, result = run(arguments, monkeypatch, Strategy("bad", "dies", 1), Strategy("good", "works", 1))
    assert (status, [row["work"] for row in result["rows"]]) == (0, ["good"])
    assert "bad: not run: ended with status 1 within 600 s: CUDA out of memory" in result["notes"]
    status, result = run(arguments, monkeypatch, Strategy("bad", "dies", 1))
    assert (status, result["rows"]) == (1, [])


def test_worker_that_takes_too_long_is_ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "WORK_LIMIT_S", 0.5)
    (Path.cwd() / "worker.py").write_text(WORKER.replace("sys.stdin.readline()", "time.sleep(60)"))
    _, result = run(arguments, monkeypatch, Strategy("slow", "works", 1))
    assert result["notes"] == ["slow: not run: ended with status -9 within 0.5 s: it said nothing"]
    assert gone("works.0")


def test_interruption_keeps_what_was_measured(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (Strategy("first", "works", 1), Strategy("second", "interrupts", 1, 2), Strategy("third", "works", 1))
    status, result = run(arguments, monkeypatch, *wanted)
    assert (status, [row["work"] for row in result["rows"]]) == (130, ["first"])
    assert result["notes"][1:] == ["second: not run: interrupted", "third: not run: interrupted"]
    assert gone("interrupts.0", "interrupts.1")


def test_folder_without_vllm_is_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "find_spec", lambda name: name)
    strategy = Strategy("v", "vllm", 1, site=str(tmp_path))
    assert strategies.missing(strategy, "cuda") == f"{tmp_path.name} holds none of vllm"
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    assert strategies.missing(strategy, "cuda") is None
    assert strategies.missing(Strategy("v", "vllm", 1), "cuda") == (
        "not installed: vllm; name a folder that holds it with --site vllm=FOLDER"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--site", "vlm=."], "vlm=.: no such worker; one of transformers, compile"),
        (["--site", "vllm=absent"], "vllm=absent: must name a folder"),
        (["--only", "compile,vlm"], "--only vlm: no such worker; one of transformers, compile"),
        (["--seconds", "-1"], "--seconds must be above 0 and finite; got -1"),
        (["--seconds", "nan"], "--seconds must be above 0 and finite; got nan"),
        (["--requests", "0"], "--requests must be above 0 and finite; got 0"),
    ],
)
def test_unknown_workers_and_folders_and_counts_are_refused(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", arguments + options)
    with pytest.raises(SystemExit) as refused:
        strategies.main()
    assert message in f"{refused.value}{capsys.readouterr().err}"


def test_list_names_every_worker_and_starts_none(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*arguments, "--list"])
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    assert strategies.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(strategies.PACKAGES) == set(strategy_worker.STRATEGIES)
    assert [line.split()[0] for line in lines if "cannot run" not in line] == ["meltcore"]
    assert not list(Path.cwd().glob("*.pid"))


def test_strategies_without_a_measured_row_are_named_in_the_docs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    runs = json.loads((RESULTS / "strategies" / "h200.json").read_text())["runs"]
    measured = {row["work"] for run in runs for row in run["rows"]}
    unmeasured = DOCUMENT.read_text().partition("## Strategies that have not run")[2].partition("\n## ")[0]
    for strategy in strategies.strategies(strategies.parse_arguments()):
        assert (f"- {strategy.name}" in unmeasured) is (strategy.name not in measured), strategy.name


@pytest.mark.slow
def test_real_worker_answers_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = argparse.Namespace(model="meltcore/sums", device="cpu", dtype="float32", seconds=0.01)
    found = strategies.measure(Strategy("meltcore", "meltcore", 2), args)
    assert (found.requests, found.tokens) == (2, 256)


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["transformers", "async", "compile", "int8", "onnxruntime"])
def test_other_workers_answer_whole_batches(
    worker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that can run on a CPU, in this process, which has imported what each of theirs would import first.

    Compiling would take a minute: the compiled strategy runs with dynamo off.
    """
    import torch._dynamo

    if reason := strategies.missing(Strategy(worker, worker, 2), "cpu"):
        pytest.skip(reason)
    options = ["--model", "meltcore/sums", "--device", "cpu", "--dtype", "float32", "--batch", "2", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["strategy_worker.py", worker, *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    monkeypatch.setattr(strategy_worker, "OUTPUT_TOKENS", 8)  # of the 128, which the test above answers
    with torch._dynamo.config.patch(disable=True):
        strategy_worker.main()
    warm, done = capsys.readouterr().out.splitlines()[-2:]
    assert (warm, done.partition(" ")[0]) == ("warm", "done")
    found = json.loads(done.removeprefix("done "))
    assert (found["requests"], found["tokens"]) == (2, 16)


@pytest.mark.slow
def test_worker_ends_with_the_reason_why_it_cannot_run() -> None:
    args = argparse.Namespace(model="meltcore/sums", device="cpu", dtype="float32", seconds=0.01)
    with pytest.raises(strategies.StrategyError, match=r"status 1 .*: needs a GPU: only CUDA has streams"):
        strategies.measure(Strategy("streams", "streams", 2), args)
