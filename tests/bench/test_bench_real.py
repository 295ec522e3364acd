"""The command on our own engine, on a CPU."""

import json
from pathlib import Path

import pytest

from meltcore.cli.main import main


@pytest.mark.slow
def test_a_cpu_climbs_its_ladder_and_says_that_it_compares_with_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--cpu", "--duration", "20", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "NOT COMPARABLE: measured on a CPU" in out
    result = json.loads(next(tmp_path.glob("*-bench/result.json")).read_text())
    score = result["score"]
    assert (score["workload"], score["weights"], score["dtype"]) == ("gpu-score/1", "real", "float32")
    levels = score["devices"][0]["levels"]
    assert [level["concurrency"] for level in levels] == [1, 10, 100]
    assert all(level["output_tokens"] > 0 for level in levels)
    assert score["output_tokens_per_s"] > 0
