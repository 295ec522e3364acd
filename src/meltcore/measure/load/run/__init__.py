"""Runs the load generator: worker processes, loops and summaries."""
