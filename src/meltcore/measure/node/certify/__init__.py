"""Certifies a node: a check plans metrics, its probe measures them in a process of its own, and `judge` judges them."""
