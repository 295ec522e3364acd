"""Linear layers. Checkpoint matrices that read the same input are merged into one weight and one GEMM."""

import torch
from torch import nn

from meltcore.kernels.norm import Norm
from meltcore.layers.norm import RMSNorm
from meltcore.layers.quantization import UNQUANTIZED, LinearWeight, QuantizationMethod
from meltcore.layers.residual import ResidualStream
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import MatrixPart, WeightLoader, as_slice, permuted_loader, shard_loader


class LinearBase(nn.Module):
    """Computes y = x W^T, where W [sum(output_sizes), input_size] merges one checkpoint matrix per output size.

    The layer holds all rows and columns of each matrix until a subclass shards it; then it holds this rank's part.
    """

    weight: LinearWeight

    def __init__(self, input_size: int, *output_sizes: int) -> None:
        super().__init__()
        self._checkpoint_outputs, self._checkpoint_inputs = output_sizes, input_size
        self._outputs = tuple(range(size) for size in output_sizes)
        self._inputs = range(input_size)
        self.quantize(UNQUANTIZED)

    @property
    def input_size(self) -> int:
        """Number of inputs that this rank keeps."""
        return len(self._inputs)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Number of outputs that this rank keeps, per matrix."""
        return tuple(map(len, self._outputs))

    def quantize(self, method: QuantizationMethod) -> None:
        """Allocate the weight in the format of `method`. Call this before weights are loaded."""
        self._method = method
        self._allocate()

    def tensors(
        self, first: int, row_order: torch.Tensor | None = None, *, stop: int | None = None
    ) -> dict[str, WeightLoader]:
        """Return the loader of each tensor of checkpoint matrix `first`, by the last part of the tensor's name.

        Row i of this rank's rows is row `row_order[i]` of the checkpoint; None keeps the order. With `stop` the
        checkpoint has matrices `first` to `stop` - 1 of this layer concatenated in one.
        """
        indices = range(first, first + 1 if stop is None else stop)
        num_rows = sum(self._checkpoint_outputs[index] for index in indices)
        rows = range(self._weight_rows(first).start, self._weight_rows(indices[-1]).stop)
        outputs: list[range] = []
        start = 0
        for index in indices:
            kept_outputs = self._outputs[index]
            outputs.append(range(start + kept_outputs.start, start + kept_outputs.stop))
            start += self._checkpoint_outputs[index]
        shape = (num_rows, self._checkpoint_inputs)
        return self.weight.tensors(MatrixPart(shape, tuple(outputs), self._inputs, rows, row_order))

    def _allocate(self) -> None:
        self._method.check_columns(self._checkpoint_inputs, self._inputs)
        self.weight = self._method.linear(self.output_sizes, self.input_size)

    def _weight_rows(self, index: int) -> range:
        """Return the rows of the merged weight that hold checkpoint matrix `index`."""
        start = sum(self.output_sizes[:index])
        return range(start, start + self.output_sizes[index])


class ColumnParallelLinear(LinearBase):
    """A merged linear layer whose outputs can be sharded over ranks, with an optional bias [sum(output_sizes)]."""

    def __init__(self, input_size: int, *output_sizes: int, bias: bool = False) -> None:
        self._has_bias = bias
        super().__init__(input_size, *output_sizes)

    def shard(self, *local_outputs: range) -> None:
        """Keep the outputs local_outputs[i] of matrix i. Call this before weights are loaded."""
        self._outputs = local_outputs
        self._allocate()

    def bias_loader(self, index: int, row_order: torch.Tensor | None = None) -> WeightLoader:
        """Return the loader of the bias of checkpoint matrix `index`. Raises ValueError if the layer has no bias."""
        if self.bias is None:
            raise ValueError("this layer has no bias")
        target = permuted_loader(self.bias[as_slice(self._weight_rows(index))], row_order)
        return shard_loader(target, self._checkpoint_outputs[index : index + 1], as_slice(self._outputs[index]))

    def forward(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """Return norm(hidden) W^T + bias: [tokens, input_size] -> [tokens, sum(output_sizes)]."""
        output = self.weight.matmul(hidden, norm)
        return output if self.bias is None else output.add_(self.bias)

    def silu_and_mul(self, hidden: torch.Tensor, norm: Norm | None = None) -> torch.Tensor:
        """Return silu(gate) * up, where gate and up are the two halves of norm(hidden) W^T."""
        return self.weight.matmul(hidden, norm, gated=True)

    def _allocate(self) -> None:
        super()._allocate()
        size = sum(self.output_sizes)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if self._has_bias else None


class RowParallelLinear(LinearBase):
    """A linear layer that adds its output to the residual stream.

    Its inputs can be sharded over ranks, which then all-reduce their outputs.
    """

    _group: TensorParallelGroup | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the inputs are sharded, so that an all-reduce follows the matmul."""
        return self._group is not None

    def shard(self, local_inputs: range, group: TensorParallelGroup) -> None:
        """Keep the inputs `local_inputs`. Call this before weights are loaded."""
        self._inputs, self._group = local_inputs, group
        self._allocate()

    def add_to(self, residual: ResidualStream, hidden: torch.Tensor, post_norm: RMSNorm | None = None) -> None:
        """Add hidden W^T to `residual`, after an all-reduce if the layer is sharded. `hidden` is [tokens, input_size].

        `post_norm` normalizes the output before it is added.
        """
        if post_norm is not None:
            residual.add_normalized(self.weight.matmul(hidden), post_norm.parameters_for_fusion(), self._group)
        elif self._group is None:
            self.weight.matmul(hidden, residual=residual.values)
        else:
            residual.add_all_reduce(self._group, self.weight.matmul(hidden))
