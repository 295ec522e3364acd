"""Synthesizes speech: engine, steps, graphs, voices and samples."""
