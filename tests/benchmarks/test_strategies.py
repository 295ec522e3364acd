"""strategies.py: the workers' numbers become one table, and whatever a worker does, none is left."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import bench_output
import pytest
import strategies
from strategies import Strategy

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
    while not os.path.exists("interrupts.0.pid") or not os.path.getsize("interrupts.0.pid"):
        time.sleep(0.01)
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
    return status, json.loads((bench_output.RESULTS / "strategies.json").read_text())


def gone(*names: str) -> bool:
    return not any(Path(f"/proc/{Path(f'{name}.pid').read_text()}").exists() for name in names)


def test_each_strategy_has_a_row_with_ours_beside_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    status, result = run(arguments, monkeypatch)
    assert status == 0
    rates = {row["work"]: row["value"] for row in result["rows"]}
    assert rates == {
        "transformers, one request at a time": 320.0,
        "transformers, generate on batches of 64": 320.0,
        "transformers, 4 processes, one request each": pytest.approx(4 * 1280 / 7.0),
        "meltcore, all at once, 1,000 requests": 320.0,
    }
    assert [row.get("ratio") for row in result["rows"]] == [1.0, 1.0, pytest.approx(7 / 16), None]
    notes = "\n".join(result["notes"])
    assert "transformers, 4 processes, one request each: 731 output tokens/s, of 40 requests in 7.0 s" in notes
    assert "vLLM, 1,000 requests at once: skipped: vLLM is not installed" in notes
    assert gone(*(f"transformers.{place}" for place in range(4)), "meltcore.0")


def test_a_worker_that_dies_is_a_reason_and_the_rest_goes_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, result = run(arguments, monkeypatch, Strategy("bad", "dies", 1), Strategy("good", "works", 1))
    assert (status, [row["work"] for row in result["rows"]]) == (0, ["good"])
    assert "bad: skipped: ended with status 1 within 600 s: CUDA out of memory" in result["notes"]
    status, result = run(arguments, monkeypatch, Strategy("bad", "dies", 1))
    assert (status, result["rows"]) == (1, [])


def test_a_worker_that_takes_too_long_is_ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "WORK_LIMIT_S", 0.5)
    (Path.cwd() / "worker.py").write_text(WORKER.replace("sys.stdin.readline()", "time.sleep(60)"))
    _, result = run(arguments, monkeypatch, Strategy("slow", "works", 1))
    assert result["notes"] == ["slow: skipped: ended with status -9 within 0.5 s: it said nothing"]
    assert gone("works.0")


def test_an_interruption_keeps_what_was_measured(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (Strategy("first", "works", 1), Strategy("second", "interrupts", 1, 2), Strategy("third", "works", 1))
    status, result = run(arguments, monkeypatch, *wanted)
    assert (status, [row["work"] for row in result["rows"]]) == (130, ["first"])
    assert result["notes"][1:] == ["second: skipped: interrupted", "third: skipped: interrupted"]
    assert gone("interrupts.0", "interrupts.1")


def test_a_folder_without_vllm_is_no_site(tmp_path: Path) -> None:
    assert strategies.missing(Strategy("v", "vllm", 1, site=str(tmp_path))) == f"{tmp_path.name} holds no vllm package"
    (tmp_path / "vllm").mkdir()
    assert strategies.missing(Strategy("v", "vllm", 1, site=str(tmp_path))) is None


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["transformers", "meltcore"])
def test_a_real_worker_answers_whole_batches(worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = argparse.Namespace(model="meltcore/sums", device="cpu", dtype="float32", seconds=0.01)
    found = strategies.measure(Strategy(worker, worker, 2), args)
    assert (found.requests, found.tokens) == (2, 256)
