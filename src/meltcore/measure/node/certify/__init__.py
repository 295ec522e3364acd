"""Certifies a node: a check plans metrics, its probe measures in a separate process, and `judge` gives verdicts."""
