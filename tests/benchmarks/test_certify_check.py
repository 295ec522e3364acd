"""A series of certificates that is continued by another command."""

import json
from pathlib import Path

import pytest
from certify_check import compare, go_on_from


def test_a_series_goes_on_with_what_was_measured_before(tmp_path: Path) -> None:
    rows = compare({("peer/1way", (0, 1)): [390.0, 391.0]}, {("peer/1way", (0, 1)): [392.0, 389.0], ("x", ()): [1.0]})
    machine = {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}
    earlier = tmp_path / "earlier.json"
    earlier.write_text(
        json.dumps({"tier": "standard", "runs": [{"verdict": "PASS"}], "figures": rows, "machine": machine})
    )
    ours, theirs, runs, gpus = go_on_from(str(earlier), "standard")
    assert ours == {("peer/1way", (0, 1)): [390.0, 391.0]}
    assert theirs == {("peer/1way", (0, 1)): [392.0, 389.0], ("x", ()): [1.0]}
    assert gpus == ["GPU-a", "GPU-b"]
    assert [run["verdict"] for run in runs] == ["PASS"]
    with pytest.raises(SystemExit, match="is of the tier standard, not quick"):
        go_on_from(str(earlier), "quick")
