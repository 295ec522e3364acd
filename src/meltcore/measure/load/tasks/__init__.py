"""Describes each task to everything that measures. There is one module for what differs by task."""
