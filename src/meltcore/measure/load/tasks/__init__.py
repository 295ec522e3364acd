"""Describes each task to the commands that measure. Each task has one module with everything that is specific to it."""
