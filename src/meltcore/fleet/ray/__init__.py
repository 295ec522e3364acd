"""Ray clusters. This is the only package that imports ray, in a driver process of its own (`protocol/cluster.py`)."""
