"""The synthesis engine: steps, graphs, voices and samples."""
