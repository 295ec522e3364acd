"""Handles a request between HTTP and an engine: its fields, exchange and queue, and what is counted and logged."""
