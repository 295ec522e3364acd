"""The feed-forward block of routed experts."""

import torch
from torch import nn

from meltcore.kernels.experts import experts_add
from meltcore.kernels.linear import linear
from meltcore.kernels.routing import route
from meltcore.layers.norm import RMSNorm


class RoutedMLP(nn.Module):
    """residual + the weighted sum of the gated feed-forwards of the experts that the router chooses for norm(residual).

    router: [experts, hidden_size]; gate_up: [experts, 2 * width, hidden_size]; down: [experts, hidden_size, width].
    renormalised: a token's weights add up to one.
    """

    def __init__(
        self, hidden_size: int, width: int, experts: int, choices: int, eps: float, *, renormalised: bool
    ) -> None:
        super().__init__()
        self.width, self.experts, self.choices, self.renormalised = width, experts, choices, renormalised
        self.norm = RMSNorm(hidden_size, eps)
        self.router = nn.Parameter(torch.empty(experts, hidden_size), requires_grad=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(experts, hidden_size, width), requires_grad=False)

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """residual: [tokens, hidden_size], changed in place and returned."""
        hidden = self.norm(residual)
        routing = route(linear(hidden, self.router), self.choices, renormalised=self.renormalised)
        return experts_add(residual, hidden, routing, self.gate_up, self.down)
