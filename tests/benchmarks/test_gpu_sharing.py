"""gpu_sharing.py with scripted workers: a means that hangs, dies or is missing costs the others nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import gpu_sharing
import pytest
import result_tables
from bench_output import merge_run

# Answers orders immediately, but a stream with priority never, and green contexts with an error; some SMs: it dies.
WORKER = """
import json, os, sys, time
def answer(value): print(json.dumps(value), flush=True)
answer({"ready": True})
for line in sys.stdin:
    order = json.loads(line)
    if order.get("means") == "priority": time.sleep(60)
    if os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"): sys.exit(3)
    took_s = 0.01 if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or order.get("sharing") else 0.02
    side = {"latencies_s": [took_s] * 20, "units": 100, "elapsed_s": 1.0, "unit_s": 0.001}
    if "means" not in order: answer(side)
    elif order["means"] == "green": answer({"error": "RuntimeError: cuGreenCtxCreate: CUDA_ERROR_NOT_SUPPORTED"})
    else: answer({"sms": [0, 0], "interactive": side | {"latencies_s": [0.005] * 20}, "busy": side})
"""
CONTROL = """#!/bin/sh
if [ "$1" = -f ]; then
    echo $$ > "$PIDS"
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
else
    read words
    [ "$words" = get_server_list ] || touch "$CUDA_MPS_PIPE_DIRECTORY/quit"
fi
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_sharing.Bench:
    monkeypatch.setattr(gpu_sharing, "WORKER", [sys.executable, "-c", WORKER])
    monkeypatch.setattr(gpu_sharing, "MAKE_LIMIT_S", 0.3)
    monkeypatch.setattr("sharing_work.new_folder", lambda: Path(os.fspath(tmp_path / "run")))
    (tmp_path / "run").mkdir()
    options = argparse.Namespace(device="cuda", small=True, seconds=0.1, budget=60.0, only=None, out=tmp_path / "out")
    return gpu_sharing.Bench(options)


def control(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an MPS control program first in PATH."""
    path = folder / "bin" / "nvidia-cuda-mps-control"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PIDS", str(folder / "pid"))


@pytest.mark.slow
def test_means_that_fail_are_named_and_the_others_measured(
    bench: gpu_sharing.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(tmp_path, CONTROL, monkeypatch)
    bench.run()
    measured = {result.means for result in bench.results}
    assert measured == {
        *("alone busy", "alone interactive", "time-slicing", "pacing", "pacing, short steps", "streams"),
        *("MPS", "MPS and pacing", "MPS, busy at low priority"),
    }
    assert [note for note in bench.notes if "not measured" in note] == [
        "streams, priority: not measured: a worker gave no answer within 0 s",
        *(
            f"green, {sms} SMs: not measured: RuntimeError: cuGreenCtxCreate: CUDA_ERROR_NOT_SUPPORTED"
            for sms in (16, 32, 64)
        ),
        "MPS, busy at 75 %: not measured: a worker ended: exit status 3",
    ]
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["notes"] == bench.notes
    assert len(written["results"]) == len(bench.results) == 4 + 2 * 7
    with pytest.raises(ProcessLookupError):  # the daemon has ended
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not (tmp_path / "run").exists()

    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    assert result_tables.sharing() == ["Not measured yet on a GPU."]
    machine, rows = {"gpus": ["NVIDIA H200"]}, [row.as_json() for row in bench.rows()]
    run = {"subject": "", "machine": machine, "versions": {"torch": "2"}, "command": "c", "date": "d", "commit": "e"}
    run |= {"rows": rows}
    merge_run(tmp_path / result_tables.SHARING, run | {"notes": bench.notes})
    lines = result_tables.sharing()
    assert "| MPS | decode beside gemm | 20 | 10.00 | 10.00 | 10.00 | 0.50× | 100 % |" in lines
    assert "| alone | gemm | 20 | 20.00 | 20.00 | 20.00 |  |  |" in lines
    assert "By the rule one process for several engines is worth it: streams." in lines
    assert f"- {bench.notes[0]}" in lines


def test_daemon_that_does_not_start_says_why(
    bench: gpu_sharing.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(tmp_path, '#!/bin/sh\necho "no permission" > "$CUDA_MPS_LOG_DIRECTORY/control.log"\nexit 4\n', monkeypatch)
    bench.measure_mps(tmp_path / "mps")
    assert bench.notes == [
        "MPS: not measured: nvidia-cuda-mps-control ended with code 4: no permission",
    ]


def test_nothing_is_begun_when_the_time_is_over(bench: gpu_sharing.Bench) -> None:
    bench._budget_s = 0.0
    with gpu_sharing.Workers() as workers:
        bench.attempt("streams", workers, lambda *_: pytest.fail("was measured"))
    assert bench.notes == ["streams: not measured: the time was over"]


@pytest.mark.parametrize(
    ("p95_ms", "busy", "verdict"),
    [(10.0, 0.8, "is worth it: green"), (10.5, 0.8, "stay processes"), (10.0, 0.7, "stay processes")],
)
def test_rule_of_one_process(p95_ms: float, busy: float, verdict: str) -> None:
    """1.3 times better than the best of MPS and of pacing, at no cost to the busy work, on every pair of works."""

    def units(p95_ms: float, busy: float) -> dict[str, float]:
        return {"p95 ms": p95_ms, "busy share of alone": busy}

    found = {
        "MPS": {"a": units(13.0, 0.8), "b": units(13.0, 0.5)},
        "MPS, busy at 75 %": {"a": units(14.0, 0.9)},
        "pacing": {"a": units(20.0, 0.8), "b": units(30.0, 0.5)},
        "green": {"a": units(p95_ms, busy), "b": units(9.0, 0.8)},
    }
    assert verdict in result_tables.sharing_verdict(found)
    del found["pacing"]["b"]
    assert result_tables.sharing_verdict(found).startswith("Undecided")
