"""Checks of what a server answers: arithmetic problems, GSM8K, API forms, and speed with its answers checked."""

from meltcore.evals.api import Api
from meltcore.evals.conformance import run_checks
from meltcore.evals.gsm8k_run import run_gsm8k
from meltcore.evals.problems import evaluate
from meltcore.evals.run import run_eval
from meltcore.evals.throughput import run_throughput
from meltcore.evals.throughput_plan import ThroughputConfig

__all__ = ["Api", "ThroughputConfig", "evaluate", "run_checks", "run_eval", "run_gsm8k", "run_throughput"]
