"""Defines the requests that the load generator sends, and the readers of each task's answers."""
