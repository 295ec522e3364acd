"""A series of certificates that another command continues."""

import json
from pathlib import Path

import pytest
from certify_check import compare, continue_from


def test_series_continues_earlier_result(tmp_path: Path) -> None:
    rows = compare({("peer/1way", (0, 1)): [390.0, 391.0]}, {("peer/1way", (0, 1)): [392.0, 389.0], ("x", ()): [1.0]})
    machine = {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}
    earlier = tmp_path / "earlier.json"
    earlier.write_text(
        json.dumps({"tier": "standard", "runs": [{"verdict": "PASS"}], "metrics": rows, "machine": machine})
    )
    certify, independent, runs, gpus = continue_from(str(earlier), "standard")
    assert certify == {("peer/1way", (0, 1)): [390.0, 391.0]}
    assert independent == {("peer/1way", (0, 1)): [392.0, 389.0], ("x", ()): [1.0]}
    assert gpus == ["GPU-a", "GPU-b"]
    assert [run["verdict"] for run in runs] == ["PASS"]
    with pytest.raises(SystemExit, match="has the tier standard, not quick"):
        continue_from(str(earlier), "quick")
