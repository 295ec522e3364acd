"""Serves the requests of each task.

Here are the parts that all tasks share: the choice of a model, and the endpoint.
"""
