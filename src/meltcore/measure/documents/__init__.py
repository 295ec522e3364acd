"""Defines the result documents of all commands that measure, and the run folders that hold them."""
