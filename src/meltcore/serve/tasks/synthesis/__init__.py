"""Synthesis: its routes, and the backend of its engines."""
