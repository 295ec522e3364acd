"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split form: i turns with i + size / 2."""

import torch


def rotary_table(head_dim: int, max_positions: int, theta: float, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: [max_positions, head_dim] float32, cosines in the first half."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its token's position.

    heads: [tokens, heads, head_dim]; table: from `rotary_table`; positions: [tokens] int64.
    Computed in float32, returned in the type of `heads`.
    """
    cos, sin = table[positions][:, None, :].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
