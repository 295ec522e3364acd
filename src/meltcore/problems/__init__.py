"""Arithmetic problems with known answers: what the bundled model is trained on, and what a server is marked on."""

from meltcore.problems.generate import evaluation_set, generate
from meltcore.problems.problem import Problem, extract_answer, is_right

__all__ = ["Problem", "evaluation_set", "extract_answer", "generate", "is_right"]
