"""Defines the result documents of all commands that measure, and their run folders."""
