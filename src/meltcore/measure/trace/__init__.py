"""Analyzes profiler traces: the times and causes of an idle GPU, and whether the trace is complete."""
