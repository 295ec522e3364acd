"""Starts and ends the servers of experiments, waits until they are ready, and sends requests to them."""
