"""Servers started for a trial: from a command line, measured, ended. Comparisons, baselines and tuning stand on it."""
