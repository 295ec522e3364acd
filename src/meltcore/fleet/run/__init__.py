"""Models of a running fleet: their engines and replicas, API server processes, and logs."""
