"""Runs the generation engine, and has a program that serves it over two pipes."""
