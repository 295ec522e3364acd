"""Pages that compare runs and servers."""
