"""Engines: a process shell, and the engine of each task that runs in it."""
