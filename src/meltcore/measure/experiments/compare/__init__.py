"""Compares servers by fresh starts of their command lines, and stores sets of starts as baselines."""
