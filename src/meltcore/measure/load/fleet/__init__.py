"""Load on all models of a server."""
