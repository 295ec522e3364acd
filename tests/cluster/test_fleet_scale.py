"""A fleet of simulated nodes, as in the benchmark: streams are balanced, and a silent rack ends its own ones only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fleet_scale.py"


@pytest.mark.slow
def test_streams_are_balanced_and_engines_of_a_silent_rack_run_elsewhere() -> None:
    size = ["--racks", "2", "--nodes", "2", "--gpus", "4", "--models", "2"]
    load = ["--streams", "208", "--tokens", "12", "--step-s", "0.5"]
    command = [sys.executable, str(BENCHMARK), *size, *load, "--repeats", "1", "--check-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "most on one engine, over the ideal 13: 0 share" in done.stdout
    assert "last error of its 104 requests" in done.stdout
