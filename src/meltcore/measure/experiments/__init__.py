"""Experiments on servers: evaluation, comparison, tuning, the demo."""
