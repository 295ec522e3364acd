"""Linear layers. Checkpoint matrices that read the same input share one weight, so that one product serves them."""

import torch
from torch import nn

from meltcore.kernels.norm import Norm
from meltcore.layers.destination import Destination, reordered
from meltcore.layers.group import Group
from meltcore.layers.pieces import piece, stacked_piece, within
from meltcore.layers.residual import Residual
from meltcore.layers.weight import DenseWeight, Fp8Weight


class Linear(nn.Module):
    """y = x W^T, plus a bias of [sum(output_sizes)] where there is one.

    weight: [sum(output_sizes), input_size], in the form that layers/weight.py gives it; `part(i)` is where the i-th
    matrix of a checkpoint goes. In a group of ranks each may keep some outputs of every matrix, or some inputs.
    """

    def __init__(self, input_size: int, *output_sizes: int, bias: bool = False) -> None:
        super().__init__()
        self._published = (output_sizes, input_size)
        self._outputs = tuple(range(size) for size in output_sizes)
        self._inputs = range(input_size)
        self._group: Group | None = None
        self.weight: DenseWeight | Fp8Weight = DenseWeight(sum(output_sizes), input_size)
        self.bias = nn.Parameter(torch.empty(sum(output_sizes)), requires_grad=False) if bias else None

    @property
    def input_size(self) -> int:
        return len(self._inputs)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self._outputs))

    def keep_outputs(self, *kept: range) -> None:
        """Hold only these outputs of each matrix, before anything is loaded."""
        self._outputs = kept
        self.weight = DenseWeight(sum(self.output_sizes), self.input_size)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty(sum(self.output_sizes)), requires_grad=False)

    def keep_inputs(self, kept: range, group: Group) -> None:
        """Hold only these inputs, before anything is loaded: `add_to` adds the sum over the group from now on."""
        self._inputs, self._group = kept, group
        self.weight = DenseWeight(sum(self.output_sizes), self.input_size)

    def to_fp8(self) -> None:
        """Hold the weight in FP8, before anything is loaded into it."""
        self.weight = Fp8Weight(sum(self.output_sizes), self.input_size)

    def part(self, index: int, order: torch.Tensor | None = None) -> Destination:
        """order: in which the outputs of that matrix that are kept stand here, see `reordered`."""
        rows = self._rows_of(index)
        output_sizes, input_size = self._published
        return piece(
            reordered(self.weight.rows(rows.start, rows.stop), order),
            (output_sizes[index], input_size),
            within(self._outputs[index]),
            within(self._inputs),
        )

    def joint_part(self, first: int, stop: int) -> Destination:
        """Where a checkpoint's matrix goes that is several of ours, one below the other."""
        own = [self._rows_of(index) for index in range(first, stop)]
        sizes, input_size = self._published[0][first:stop], self._published[1]
        whole = self.weight.rows(own[0].start, own[-1].stop)
        if whole.shape[0] == sum(sizes):
            return whole
        targets = [self.weight.rows(rows.start, rows.stop) for rows in own]
        return stacked_piece((sum(sizes), input_size), self._outputs[first:stop], sizes, targets)

    def bias_part(self, index: int, order: torch.Tensor | None = None) -> Destination:
        if self.bias is None:
            raise ValueError("this layer has no bias")
        target = reordered(self.bias[within(self._rows_of(index))], order)
        return piece(target, self._published[0][index : index + 1], within(self._outputs[index]))

    def forward(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """Of norm(hidden) where a norm is given."""
        product = self.weight.product(hidden, norm)
        return product if self.bias is None else product.add_(self.bias)

    def gated(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """silu(gate) * up, where the two halves of the product are gate and up."""
        return self.weight.gated_product(hidden, norm)

    def add_to(self, residual: Residual, hidden: torch.Tensor) -> None:
        """Add forward(hidden), or in a group the sum of every rank's forward of its own inputs."""
        if self._group is None:
            self.weight.add_product(residual.values, hidden)
        else:
            residual.add_sum(self._group, self.weight.product(hidden, None))

    def _rows_of(self, index: int) -> range:
        """Where the i-th matrix stands in the weight."""
        start = sum(self.output_sizes[:index])
        return range(start, start + self.output_sizes[index])
