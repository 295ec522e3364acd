"""Runs the models of a fleet: their engines and replicas, API server processes, and logs."""
