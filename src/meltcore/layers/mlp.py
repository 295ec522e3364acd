"""The feed-forward block."""

from torch import nn

from meltcore.layers.group import Group
from meltcore.layers.linear import Linear
from meltcore.layers.norm import MakeNorm
from meltcore.layers.residual import Residual


class GatedMLP(nn.Module):
    """residual + down(silu(gate(x)) * up(x)), x = norm(residual); gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, norm: MakeNorm) -> None:
        super().__init__()
        self.norm = norm(hidden_size)
        self.gate_up = Linear(hidden_size, intermediate_size, intermediate_size)
        self.down = Linear(intermediate_size, hidden_size)

    def divide(self, group: Group) -> None:
        """Keep this rank's share of the width."""
        kept = group.share(self.down.input_size, "columns of the feed-forward (intermediate_size)")
        self.gate_up.keep_outputs(kept, kept)
        self.down.keep_inputs(kept, group)

    def forward(self, residual: Residual) -> None:
        self.down.add_to(residual, self.gate_up.gated(*residual.read(self.norm)))
