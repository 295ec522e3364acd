"""The feed-forward block of routed experts."""

import torch
from torch import nn

from meltcore.kernels.experts import expert_outputs, experts_add
from meltcore.kernels.norm import Norm
from meltcore.kernels.router import to_experts
from meltcore.kernels.routing import Routing
from meltcore.layers.destination import Destination
from meltcore.layers.group import Group
from meltcore.layers.norm import MakeNorm
from meltcore.layers.pieces import Pieces, piece, within
from meltcore.layers.residual import Residual
from meltcore.layers.uniform_routing import drawing_seed, note_drawn


class RoutedMLP(nn.Module):
    """residual + the weighted sum of the gated feed-forwards of the experts that the router chooses for norm(residual).

    router: [experts, hidden_size]; gate_up: [experts, 2 * width, hidden_size]; down: [experts, hidden_size, width].
    renormalised: a token's weights add up to one. shared: every token goes through one more expert, whose weight is the
    sigmoid of a gate. It stands last in all three: the product with the router gives its gate, too.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        experts: int,
        choices: int,
        norm: MakeNorm,
        *,
        renormalised: bool,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.experts, self.choices, self.renormalised, self.shared = experts, choices, renormalised, shared
        self._published_width, self._kept = width, range(width)
        self._group: Group | None = None
        self.norm = norm(hidden_size)
        self.router = nn.Parameter(torch.empty(experts + shared, hidden_size), requires_grad=False)
        self._allocate(hidden_size)

    @property
    def width(self) -> int:
        return len(self._kept)

    def divide(self, group: Group) -> None:
        """Keep this rank's share of every expert's width."""
        self._kept = group.share(self._published_width, "columns of an expert (moe_intermediate_size)")
        self._group = group
        self._allocate(self.router.shape[1])

    def forward(self, residual: Residual) -> None:
        hidden, routing = self._to_experts(*residual.read(self.norm))
        if len(hidden) > 1:
            outputs = expert_outputs(hidden, routing, self.gate_up, self.down)
            residual.add_choices(outputs, routing.weights, self._group)
        elif self._group is None:  # one token's experts are added up where they are multiplied
            experts_add(residual.values, hidden, routing, self.gate_up, self.down)
        else:
            residual.add_sum(self._group, experts_add(None, hidden, routing, self.gate_up, self.down))

    def _to_experts(self, tokens: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, Routing]:
        """The tokens normalised, by `norm` where they are not yet, and where they go."""
        seed = drawing_seed()
        hidden, routing = to_experts(
            tokens,
            norm,
            self.router,
            self.choices,
            renormalised=self.renormalised,
            shared=self.shared,
            drawn=seed,
        )
        if seed is not None:
            note_drawn(id(self), routing.experts[:, : self.choices])
        return hidden, routing

    # --- where a checkpoint's tensors go ---

    def gate_part(self, expert: int) -> Destination:
        """[published width, hidden_size], as `up_part` is. The shared expert's number is `experts`."""
        return self._rows(self.gate_up[expert, : self.width])

    def up_part(self, expert: int) -> Destination:
        return self._rows(self.gate_up[expert, self.width :])

    def down_part(self, expert: int) -> Destination:
        """[hidden_size, published width]."""
        target = self.down[expert]
        return piece(target, (target.shape[0], self._published_width), slice(None), within(self._kept))

    def gate_up_of_all(self) -> Destination:
        """[experts, 2 * published width, hidden_size], without the shared one's."""
        gate_up = self.gate_up[: self.experts]
        if self._group is None:
            return gate_up
        whole, kept = self._published_width, self._kept
        ups = range(whole + kept.start, whole + kept.stop)
        return Pieces(
            (self.experts, 2 * whole, gate_up.shape[2]),
            ((slice(None), within(kept)), gate_up[:, : self.width]),
            ((slice(None), within(ups)), gate_up[:, self.width :]),
        )

    def down_of_all(self) -> Destination:
        """[experts, hidden_size, published width], without the shared one's."""
        shape = (self.experts, self.down.shape[1], self._published_width)
        return piece(self.down[: self.experts], shape, slice(None), slice(None), within(self._kept))

    def _rows(self, target: torch.Tensor) -> Destination:
        return piece(target, (self._published_width, target.shape[1]), within(self._kept))

    def _allocate(self, hidden_size: int) -> None:
        experts, width = self.experts + self.shared, self.width
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(experts, hidden_size, width), requires_grad=False)
