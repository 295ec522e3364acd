"""Scales the frequencies of rotary embeddings, so that a model reads texts longer than its training texts.

This module does not import torch, because plans of memory read configurations too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LinearScaling:
    """Divides every frequency by `factor`: position interpolation (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor = 1.0
    rope_type = "linear"

    def scale_frequencies(self, frequencies: torch.Tensor, theta: float, context: int) -> torch.Tensor:  # noqa: ARG002 - same for all types
        """Return the scaled `frequencies`, [rotary_dim / 2] float64."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divides low frequencies by `factor`, keeps high frequencies, and interpolates between them, as in Llama 3.1.

    A frequency is low with fewer than `low_freq_factor` turns in `original_max_position_embeddings` positions, and high
    with more than `high_freq_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float
    attention_factor = 1.0
    rope_type = "llama3"

    def scale_frequencies(self, frequencies: torch.Tensor, theta: float, context: int) -> torch.Tensor:  # noqa: ARG002 - same for all types
        """Return the scaled `frequencies`, [rotary_dim / 2] float64."""
        num_rotations = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        smooth_factor = ((num_rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(
            0.0, 1.0
        )
        return frequencies * (smooth_factor + (1 - smooth_factor) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): keeps high frequencies, divides low ones by `factor`.

    Between the dimensions with `beta_fast` and `beta_slow` turns in `original_max_position_embeddings` positions, the
    frequencies change linearly from kept to divided. `attention_factor` scales cosines and sines, so it scales scores
    by its square. With `truncate` the bounds are rounded to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rope_type = "yarn"

    def scale_frequencies(self, frequencies: torch.Tensor, theta: float, context: int) -> torch.Tensor:  # noqa: ARG002 - same for all types
        """Return the scaled `frequencies`, [rotary_dim / 2] float64."""
        import torch

        num_frequencies = len(frequencies)
        low_dim, high_dim = (
            self._correction_dim(num_rotations, 2 * num_frequencies, theta)
            for num_rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low_dim, high_dim = math.floor(low_dim), math.ceil(high_dim)
        low_dim, high_dim = max(low_dim, 0), min(high_dim, 2 * num_frequencies - 1)
        if low_dim == high_dim:
            high_dim += 0.001  # no division by zero; the value is that of published implementations
        ramp = ((torch.arange(num_frequencies, dtype=torch.float64) - low_dim) / (high_dim - low_dim)).clamp(0.0, 1.0)
        return frequencies * (1 - ramp + ramp / self.factor)

    def _correction_dim(self, num_rotations: float, rotary_dim: int, theta: float) -> float:
        """Return the fractional dimension that makes `num_rotations` turns in the original context length."""
        ratio = self.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(theta))


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): divides each frequency by a factor of its own.

    A context of more than `original_max_position_embeddings` tokens has the long factors at all positions, so that all
    keys of a cache are rotated alike. Any other context has the short factors. `attention_factor` scales cosines and
    sines, so it scales scores by its square.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    rope_type = "longrope"

    def scale_frequencies(self, frequencies: torch.Tensor, theta: float, context: int) -> torch.Tensor:  # noqa: ARG002 - same for all types
        """Return the scaled `frequencies`, [rotary_dim / 2] float64. A sequence may have `context` tokens."""
        import torch

        factors = self.long_factor if context > self.original_max_position_embeddings else self.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float64, device=frequencies.device)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling
