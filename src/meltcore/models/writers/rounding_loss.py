"""Measures how much quantization changes the values of matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]


class RoundingLoss:
    """Sums up the errors of rounded values, relative to the original values."""

    def __init__(self) -> None:
        self._squared_error = self._squared_values = 0.0

    def add(self, values: Values, rounded: Values) -> None:
        """Add a part of a matrix: its original and its rounded values in float32."""
        self._squared_error += float(np.square(rounded - values).sum(dtype=np.float64))
        self._squared_values += float(np.square(values).sum(dtype=np.float64))

    @property
    def relative_error(self) -> float:
        """The root of the mean squared error, relative to the root of the mean squared value."""
        return math.sqrt(self._squared_error / self._squared_values) if self._squared_values else 0.0
