"""The command with our own engine, on a CPU and on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from meltcore.cli.main import main


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A duration below the least that the command accepts: steps on a CPU are counted, not compared."""
    monkeypatch.setattr("meltcore.measure.score.config.MIN_DURATION_S", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_cpu_result_is_not_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cpu", "--duration", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "NOT COMPARABLE" in out
    assert "measured on a CPU" in out
    result = json.loads(next(tmp_path.glob("*-bench/result.json")).read_text())
    score = result["score"]
    assert (score["workload"], score["weights"], score["dtype"]) == ("gpu-score/1", "real", "float32")
    levels = score["devices"][0]["levels"]
    assert [level["concurrency"] for level in levels] == [1, 10, 100]
    assert all(level["output_tokens"] > 0 for level in levels)
    assert score["output_tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_cpu_sweeps_a_tiny_grid(tmp_path: Path) -> None:
    grid = ["--sweep-concurrency", "1,4", "--sweep-output-lens", "4", "--sweep-temperatures", "0,1"]
    assert main(["bench", "--cpu", "--sweep", *grid, "--duration", "5", "--out", str(tmp_path)]) == 0
    score = json.loads(next(tmp_path.glob("*-bench/result.json")).read_text())["score"]
    assert (score["workload"], score["output_tokens_per_s"]) == ("gpu-sweep/1", None)
    cells = score["devices"][0]["sweep"]
    assert [(each["concurrency"], each["temperature"]) for each in cells] == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert all(each["output_tokens"] > 0 for each in cells)


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "workload", "dtype"),
    [("bf16", "gpu-score/1", "bfloat16"), ("fp8", "gpu-score-fp8/1", "bfloat16+fp8-weights+fp8-kv")],
)
def test_gpu_runs_the_whole_ladder(tmp_path: Path, precision: str, workload: str, dtype: str) -> None:
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    assert main(["bench", "--gpu", "0", "--duration", "30", "--precision", precision, "--out", str(tmp_path)]) == 0
    result = json.loads(next(tmp_path.glob("*-bench/result.json")).read_text())
    score = result["score"]
    assert (score["workload"], score["dtype"], score["weights"]) == (workload, dtype, "dummy")
    assert score["not_comparable"] == []
    device = score["devices"][0]
    assert [level["concurrency"] for level in device["levels"]] == [1, 10, 100, 400, 1_000, 10_000]
    assert score["output_tokens_per_s"] > 2 * device["levels"][1]["output_tokens_per_s"], "the chip is used"
    assert device["health"]["verdict"] != "DEGRADED", device["health"]["reasons"]
    assert device["health"]["samples"] >= 200
    assert set(device["lines"]["values"]) >= {"output_tokens_per_s", "power_w", "sm_clock_mhz"}
