"""Tests of batch engines have the tools of the models that they run."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / "models"), str(Path(__file__).parents[1])]
