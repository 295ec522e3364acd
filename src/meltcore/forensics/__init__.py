"""Where a GPU was idle and why: read from a profiler's trace, with a word on how far the trace can be trusted."""
