"""Defines the record of each task for everything that measures, with one module for what differs by task."""
