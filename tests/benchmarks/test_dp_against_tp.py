"""dp_against_tp.py: what it starts, and its arithmetic for eight GPUs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import bench_output
import dp_against_tp
import msgspec
import pytest

from meltcore.measure.documents.comparison import COMPARISON_FILE, ComparedMetric, ComparisonResult
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.servers import read_command

TENSOR = {1: 700.0, 2: 1_000.0, 4: 1_600.0, 8: 2_400.0, 16: 3_500.0, 32: 5_000.0, 64: 7_000.0}
DATA = {1: 500.0, 2: 990.0, 4: 1_500.0, 8: 2_500.0, 16: 4_000.0, 32: 6_000.0, 64: 9_000.0}


def test_eight_gpus_are_as_many_pairs_as_the_concurrency_keeps_busy() -> None:
    """Of DP=2 a pair holds two replicas, so two concurrent requests need one pair; of TP=2 they need two."""
    assert dp_against_tp.on_eight(DATA, 2) == {
        1: 500.0, 2: 990.0, 4: 2 * 990.0, 8: 4 * 990.0, 16: 4 * 1_500.0, 32: 4 * 2_500.0, 64: 4 * 4_000.0,
    }  # fmt: skip
    assert dp_against_tp.on_eight(TENSOR, 1) == {
        1: 700.0, 2: 2 * 700.0, 4: 4 * 700.0, 8: 4 * 1_000.0, 16: 4 * 1_600.0, 32: 4 * 2_400.0, 64: 4 * 3_500.0,
    }  # fmt: skip


def comparison() -> ComparisonResult:
    rows = [
        ComparedMetric(load=f"concurrency {load}", metric=metric, better="higher", old_values=[old], new_values=[new],
                       old=old * factor, new=new * factor)
        for metric, factor in (("total tok/s", 4.0), ("output tok/s", 1.0))
        for load, old, new in ((load, TENSOR[load], DATA[load]) for load in WEIGHTS)
    ]  # fmt: skip
    return ComparisonResult(verdict="NO EVIDENCE", reason="", old_name="A", new_name="B", primary=rows[-1], rows=rows)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of `meltcore compare`, in whose place a folder with a comparison is written."""
    words: list[str] = []

    def compare(arguments: list[str]) -> int:
        words.extend(arguments)
        folder = tmp_path / "runs" / "20261123T000000Z-compare"
        folder.mkdir()
        (folder / COMPARISON_FILE).write_bytes(msgspec.json.encode(comparison()))
        return 3

    monkeypatch.setattr(dp_against_tp, "meltcore_command", compare)
    monkeypatch.setattr(dp_against_tp, "need_gpu", lambda *_: None)
    monkeypatch.setattr(bench_output, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["dp_against_tp.py", "--out", str(tmp_path / "runs"), "--device", "cpu"])
    return words


def test_both_sides_are_started_and_computed_rows_are_marked(tmp_path: Path, asked: list[str]) -> None:
    dp_against_tp.main()
    files = asked[asked.index("--run") + 1 : asked.index("--starts")]
    tensor, data = (" ".join(read_command(name).argv(8000)) for name in files)
    assert "serve Qwen/Qwen3.5-35B-A3B -tp 2 " in tensor
    assert data == tensor.replace("-tp 2", "-dp 2")
    assert "--debug uniform-routing" in tensor
    assert asked[asked.index("--concurrency") + 1] == "1,2,4,8,16,32,64"
    assert asked[asked.index("--workload") + 1] == "random:in=1024,out=277"
    [run] = bench_output.read_runs("dp_against_tp", "cpu")
    rows: dict[str, dict[str, Any]] = {row["work"]: row for row in run["rows"]}
    measured = rows["DP=2, 64 concurrent, random:in=1024,out=277"]
    assert (measured["value"], measured["peer_value"], measured["unit"]) == (9_000.0, 7_000.0, "output tokens/s")
    computed = rows["DP=8, 64 concurrent, random:in=1024,out=277"]
    assert (computed["value"], computed["peer_value"]) == (16_000.0, 14_000.0)
    assert computed["unit"] == "output tokens/s, computed"
    assert len(rows) == 14


def test_comparison_that_could_not_be_made_writes_nothing(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dp_against_tp, "meltcore_command", lambda _: 2)
    with pytest.raises(SystemExit) as left:
        dp_against_tp.main()
    assert left.value.code == 2
    assert not (tmp_path / "results").exists()


def test_real_weights_need_no_uniform_routing() -> None:
    args = argparse.Namespace(model="m", weights="auto", device="auto")
    assert "--debug" not in dp_against_tp.server_command(args, dp_against_tp.Side(2, 1))


def test_eight_gpus_are_measured_in_three_ways(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP=8 against DP=8 and against four replicas of TP=2; no row is arithmetic."""
    compare = dp_against_tp.meltcore_command
    commands = []

    def next_comparison(words: list[str]) -> int:
        first = words.index("--run") + 1
        commands.append([" ".join(read_command(name).argv(8000)) for name in words[first : first + 2]])
        for folder in (tmp_path / "runs").glob("*-compare"):
            folder.rename(folder.with_name(f"{folder.name}-earlier"))
        return compare(words)

    monkeypatch.setattr(dp_against_tp, "meltcore_command", next_comparison)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--gpus", "8"])
    dp_against_tp.main()
    [(tensor, data), (tensor_again, both)] = commands
    assert asked
    assert "serve Qwen/Qwen3.5-35B-A3B -tp 8 --load-format" in tensor
    assert data == tensor.replace("-tp 8", "-dp 8")
    assert tensor_again == tensor
    assert both == tensor.replace("-tp 8", "-tp 2 -dp 4")
    [run] = bench_output.read_runs("dp_against_tp", "cpu")
    rows: dict[str, dict[str, Any]] = {row["work"]: row for row in run["rows"]}
    assert {row["peer"] for row in rows.values()} == {"TP=8"}
    assert {row["unit"] for row in rows.values()} == {"output tokens/s"}
    assert rows["DP=4, TP=2, 64 concurrent, random:in=1024,out=277"]["value"] == 9_000.0
    assert len(rows) == 14
