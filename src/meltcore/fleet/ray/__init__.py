"""A Ray cluster: the only package that imports ray. Its driver is a process of its own (`protocol/cluster.py`)."""
