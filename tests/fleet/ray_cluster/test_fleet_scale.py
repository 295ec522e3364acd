"""A fleet of simulated nodes, as in the benchmark: streams are balanced, and a silent rack ends its own ones only."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from places import ROOT

BENCHMARK = ROOT / "benchmarks" / "fleet_scale.py"


@pytest.mark.slow
def test_streams_are_balanced_and_engines_of_a_silent_rack_run_elsewhere() -> None:
    size = ["--racks", "2", "--nodes", "2", "--gpus", "4", "--models", "2"]
    load = ["--streams", "208", "--step-s", "0.4"]
    command = [sys.executable, str(BENCHMARK), *size, *load, "--repeats", "1", "--check-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    found = re.findall(r"^(?!FAIL: )(.+): ([-+.e\d]+) \w+$", done.stdout, re.MULTILINE)
    rows = {name: float(value) for name, value in found}
    # Times, and the balance over a time, have targets of a machine with nothing else to do.
    timed = re.compile(r"off the mean|: [-+.e\d]+ s\b")
    problems = [line for line in done.stdout.splitlines() if line.startswith("FAIL") and not timed.search(line)]
    assert problems == [], done.stdout + done.stderr
    assert rows["208 streams of 640 tokens in one burst: most on one engine, over the ideal 13"] == 0
    assert rows["a rack of 2 nodes is silent: last error of its 104 requests"] > 2
    assert rows["a rack of 2 nodes is silent: others that fail"] == 0
