"""The gated activation of the feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension. [tokens, 2 * size] -> [tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
