"""The quick tier on real GPUs: it ends in time, measures every metric, and passes or warns."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.slow
def test_quick_certificate_of_real_gpus_measures_every_metric_within_a_minute(tmp_path: Path) -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "meltcore.cli.main", "certify", "--json", "--out", str(tmp_path)],
        capture_output=True,
        timeout=240,
        check=False,
    )
    took_s = time.monotonic() - began_s
    certificate = json.loads(done.stdout)
    measured = [row for check in certificate["checks"] for row in check["rows"] if check["name"] != "state"]
    assert measured
    assert [row["key"] for row in measured if row["verdict"] == "UNKNOWN"] == []
    assert done.returncode in (0, 1), [finding["message"] for finding in certificate["findings"]]
    assert took_s < 60
