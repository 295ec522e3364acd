"""Runs the engine of each task in a process shell."""
