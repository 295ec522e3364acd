"""Runs of the load generator: worker processes, loops, summaries."""
