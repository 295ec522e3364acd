"""The HTML report of a run: one self-contained file, no script, no network."""

from meltcore.report.page import render, save

__all__ = ["render", "save"]
