"""The main job end to end: serve a model, check it, load it level by level, report."""

from meltcore.demo.run import DEFAULT_LEVELS, DemoConfig, run_demo

__all__ = ["DEFAULT_LEVELS", "DemoConfig", "run_demo"]
