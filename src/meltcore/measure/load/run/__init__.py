"""Runs levels of load in worker processes, and summarizes their records."""
