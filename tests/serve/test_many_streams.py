"""Many concurrent streams, as in the benchmark: all finish, health stays ready, and no memory leaks."""

import subprocess
import sys

import pytest
from places import ROOT

BENCHMARK = ROOT / "benchmarks" / "many_streams.py"


def run_benchmark(*arguments: str, limit_s: float) -> None:
    """The benchmark's own check, whose exit status is the verdict."""
    command = [sys.executable, str(BENCHMARK), "--check-only", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_many_streams_of_the_bundled_model_leak_no_memory() -> None:
    # More than after which the engine gives memory back (256): fewer may leave it as much as its largest step took.
    small = [
        "--model",
        "meltcore/sums",
        "--load-format",
        "auto",
        "--api-server-count",
        "2",
        "--streams",
        "300",
        "--before",
        "50",
    ]
    small += ["--inlen", "32", "--out", "24", "--vocab", "800"]
    run_benchmark(*small, limit_s=180)


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_ten_thousand_streams_of_the_full_size_model_leak_no_memory() -> None:
    run_benchmark(limit_s=550)
