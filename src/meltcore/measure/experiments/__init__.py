"""Experiments on servers: evaluations, comparisons, tunings and the demo."""
