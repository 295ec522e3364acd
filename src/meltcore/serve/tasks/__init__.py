"""Serves the requests of each task.

What all tasks share is here: the choice of a model, and the endpoint of a route.
"""
