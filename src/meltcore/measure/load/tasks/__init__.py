"""The record of each task, which everything that measures asks, and one folder for what differs by task."""
