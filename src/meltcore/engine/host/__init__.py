"""Runs the process shell: the part of an engine process that does not depend on the engine's task."""
