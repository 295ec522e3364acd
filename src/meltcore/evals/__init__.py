"""Checks of what a server answers: arithmetic problems with known values, GSM8K, and the forms of its API."""

from meltcore.evals.api import Api
from meltcore.evals.conformance import run_checks
from meltcore.evals.gsm8k_run import run_gsm8k
from meltcore.evals.problems import evaluate
from meltcore.evals.run import run_eval

__all__ = ["Api", "evaluate", "run_checks", "run_eval", "run_gsm8k"]
