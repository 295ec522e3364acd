"""The quick tier on real GPUs: it runs its short checks only, measures every metric, and passes or warns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meltcore.measure.node.certify.checks.run import checks_of


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.slow
def test_quick_certificate_of_real_gpus_measures_every_metric(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meltcore.cli.main", "certify", "--json", "--out", str(tmp_path)],
        capture_output=True,
        timeout=240,
        check=False,
    )
    certificate = json.loads(done.stdout)
    assert [check["name"] for check in certificate["checks"]] == [check.name for check in checks_of("quick")]
    measured = [row for check in certificate["checks"] for row in check["rows"] if check["name"] != "state"]
    assert measured
    assert [row["key"] for row in measured if row["verdict"] == "UNKNOWN"] == []
    assert done.returncode in (0, 1), [finding["message"] for finding in certificate["findings"]]
