"""Tests of models that need a whole engine have the engine's tools."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
