"""Engines: a process shell, and the generation engine that runs in it."""
