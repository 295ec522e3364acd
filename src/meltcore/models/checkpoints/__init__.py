"""Checkpoints: folders, the hub, and the files of every format."""
