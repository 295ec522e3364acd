"""Checks of what a server answers: arithmetic problems, GSM8K, API forms, speed with its answers checked, the score."""

from meltcore.evals.api import Api
from meltcore.evals.baseline import run_baseline
from meltcore.evals.conformance import run_checks
from meltcore.evals.gsm8k_run import run_gsm8k
from meltcore.evals.problems import evaluate
from meltcore.evals.run import run_eval
from meltcore.evals.throughput import run_throughput
from meltcore.evals.throughput_plan import ThroughputConfig
from meltcore.evals.whole import WholeConfig, run_whole, score_runs

__all__ = [
    "Api",
    "ThroughputConfig",
    "WholeConfig",
    "evaluate",
    "run_baseline",
    "run_checks",
    "run_eval",
    "run_gsm8k",
    "run_throughput",
    "run_whole",
    "score_runs",
]
