"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split form: i turns with i + size / 2.

Some networks turn only the first dimensions of a head. A score is a sum over dimensions, so these may stand in any
order that queries and keys share: in that of `half_split` both halves begin with what turns, the others turn by an
angle of zero, and no kernel has to know.
"""

import torch


def rotary_table(
    head_dim: int, max_positions: int, theta: float, device: torch.device, turning: int | None = None
) -> torch.Tensor:
    """Cosines and sines of every position: [max_positions, head_dim] float32, cosines in the first half.

    turning: how many dimensions of a published head turn, all unless it is given; heads are then in half-split order.
    """
    turning = turning or head_dim
    frequencies = 1.0 / theta ** (torch.arange(0, turning, 2, dtype=torch.float32, device=device) / turning)
    frequencies = torch.nn.functional.pad(frequencies, (0, (head_dim - turning) // 2))
    angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def half_split(head_dim: int, turning: int) -> torch.Tensor:
    """Which dimension of a published head, of which the first `turning` turn, stands at each place: [head_dim]."""
    halves = zip(torch.arange(turning).tensor_split(2), torch.arange(turning, head_dim).tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])


def apply_rotary(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its token's position.

    heads: [tokens, heads, head_dim]; table: from `rotary_table`; positions: [tokens] int64.
    Computed in float32, returned in the type of `heads`.
    """
    cos, sin = table[positions][:, None, :].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
