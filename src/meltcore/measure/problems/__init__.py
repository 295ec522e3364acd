"""Generates problems with known answers, to train the bundled models and to test servers."""

from meltcore.measure.problems.generate import evaluation_set, generate
from meltcore.measure.problems.sums import Problem, extract_answer, is_correct

__all__ = ["Problem", "evaluation_set", "extract_answer", "generate", "is_correct"]
