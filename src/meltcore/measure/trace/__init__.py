"""Analysis of profiler traces: when a GPU was idle, why, and whether the trace can be trusted."""
