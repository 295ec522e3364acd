"""Pages of load runs."""
