"""Quantization methods define how layers store their weights and multiply by them.

A layer allocates its weights through a `QuantizationMethod` and uses only the methods of that weight class, so it does
not depend on the format. A layer may be sharded and quantized in either order before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Unpack

import torch
from torch import nn

from meltcore.common.errors import ShardError
from meltcore.kernels.embedding import sharded_embedding
from meltcore.kernels.gemm.linear import LinearOptions, linear
from meltcore.kernels.moe.experts import add_experts, expert_outputs
from meltcore.kernels.moe.routing import RouterLogits, Routing
from meltcore.kernels.norm import Norm
from meltcore.layers.weight_loader import (
    MatrixPart,
    ShardLoader,
    WeightLoader,
    as_slice,
    shard_loader,
)


class LinearWeight(Protocol):
    """The interface of a linear layer's weight, a module that is constructed with (output_sizes, input_size).

    The weight has the shape [sum(output_sizes), input_size]. `output_sizes` are the rows of each checkpoint matrix that
    the layer merges.
    """

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loader of each tensor of a checkpoint's matrix, by the last part of the tensor's name.

        Raises ValueError if the part's rows are in several formats.
        """

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Return norm(hidden) W^T: [tokens, input_size] -> [tokens, output_size].

        Args:
            hidden: [tokens, input_size].
            norm: None means that `hidden` is normalized already.
            options: as `linear` in kernels/gemm/linear.py explains them. Rows of `out` may be strided, and it is
                float32 for an output head.
        """


class EmbeddingWeight(LinearWeight, Protocol):
    """The interface of the weight of an embedding and of an output head, [vocab_size, hidden_size]."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows that `embeddings` returns: the model's dtype, not the format of the stored weight."""

    @property
    def device(self) -> torch.device:
        """The device of the weight."""

    def embeddings(self, token_ids: torch.Tensor, first_token: int | None) -> torch.Tensor:
        """Look up tokens, [tokens] int64 -> [tokens, hidden_size] of type `dtype`.

        `first_token` is the first token of the rows that this rank keeps. Tokens without a row there have zeros. With
        None every token has a row.
        """


class ExpertsWeight(Protocol):
    """The interface of the weights of routed experts, a module constructed as `DenseExperts` is."""

    def outputs(self, hidden: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute the unweighted outputs of each token's experts.

        [tokens, hidden_size] -> [tokens * top_k, hidden_size].
        """

    def selects(self, hidden: torch.Tensor, norm: Norm | None, pairs: int, /) -> bool:
        """Return whether `add_outputs` normalizes `hidden` and selects its experts itself, by `RouterLogits`."""

    def add_outputs(
        self, residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing | RouterLogits
    ) -> torch.Tensor:
        """Return `residual` with each token's weighted sum of expert outputs added in place, or else the sum alone."""

    def gate_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loaders of one expert's matrix gate_proj, [intermediate_size, hidden_size].

        The keys are the last part of the tensors' names.
        """

    def up_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loaders of one expert's matrix up_proj, [intermediate_size, hidden_size].

        The keys are the last part of the tensors' names.
        """

    def down_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loaders of one expert's matrix down_proj, [hidden_size, intermediate_size].

        The keys are the last part of the tensors' names.
        """

    def fused_gate_up_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loaders of checkpoint tensors with gate_up_proj of the first `num_experts` experts.

        The keys are the last part of the tensor names of a single expert. The result is empty if no checkpoint of the
        format merges experts.
        """

    def fused_down_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loaders of checkpoint tensors with down_proj of the first `num_experts` experts.

        The keys are the last part of the tensor names of a single expert. The result is empty if no checkpoint of the
        format merges experts.
        """


class DenseWeight(nn.Module):
    """An unquantized weight. values: [sum(output_sizes), input_size] in the model's type."""

    def __init__(self, output_sizes: Sequence[int], input_size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(sum(output_sizes), input_size), requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows that `embeddings` returns, which is the model's dtype."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.values.device

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loader of a checkpoint's matrix."""
        return {"weight": part.loader(lambda start, stop: self.values[start:stop])}

    def embeddings(self, token_ids: torch.Tensor, first_token: int | None) -> torch.Tensor:
        """Look up tokens, with zeros for tokens of other ranks. See `EmbeddingWeight.embeddings`."""
        return self.values[token_ids] if first_token is None else sharded_embedding(self.values, token_ids, first_token)

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        out = options.get("out")
        if out is not None and not out.is_contiguous():
            return out.copy_(linear(hidden, self.values, norm))
        return linear(hidden, self.values, norm, **options)


class DenseExperts(nn.Module):
    """Unquantized weights of experts. This rank keeps the range `local_columns` of their intermediate size.

    gate_up_proj: [experts, 2 * len(local_columns), hidden_size], gate rows above up rows; down_proj: [experts,
    hidden_size, len(local_columns)].
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, local_columns: range) -> None:
        super().__init__()
        self._intermediate_size, self._local_columns, local_size = intermediate_size, local_columns, len(local_columns)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * local_size, hidden_size), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, local_size), requires_grad=False)

    def outputs(self, hidden: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute the unweighted outputs of each token's experts.

        [tokens, hidden_size] -> [tokens * top_k, hidden_size].
        """
        return expert_outputs(hidden, routing, self.gate_up_proj, self.down_proj)

    def selects(self, *_: object) -> bool:
        """Return False, since the kernels of unquantized experts do not select experts."""
        return False

    def add_outputs(
        self, residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing | RouterLogits
    ) -> torch.Tensor:
        """Return `residual` with each token's weighted sum of expert outputs added in place, or else the sum alone."""
        assert isinstance(routing, Routing), "see selects"
        return add_experts(residual, hidden, routing, self.gate_up_proj, self.down_proj)

    def gate_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of one expert's gate_proj, [intermediate_size, hidden_size]."""
        return {"weight": self._rows_loader(self.gate_up_proj[expert, : len(self._local_columns)])}

    def up_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of one expert's up_proj, [intermediate_size, hidden_size]."""
        return {"weight": self._rows_loader(self.gate_up_proj[expert, len(self._local_columns) :])}

    def down_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of one expert's down_proj, [hidden_size, intermediate_size]."""
        target = self.down_proj[expert]
        shape = (len(target), self._intermediate_size)
        return {"weight": shard_loader(target, shape, slice(None), as_slice(self._local_columns))}

    def fused_gate_up_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loader of a checkpoint tensor with gate_up_proj of the first `num_experts` experts.

        Its shape is [num_experts, 2 * intermediate_size, hidden_size].
        """
        target, full_size, local_columns = self.gate_up_proj[:num_experts], self._intermediate_size, self._local_columns
        if len(local_columns) == full_size:
            return {"weight": target}
        gate_target, up_target = target[:, : len(local_columns)], target[:, len(local_columns) :]
        up_rows = slice(full_size + local_columns.start, full_size + local_columns.stop)
        loader = ShardLoader(
            torch.Size((num_experts, 2 * full_size, target.shape[2])),
            (((slice(None), as_slice(local_columns)), gate_target), ((slice(None), up_rows), up_target)),
        )
        return {"weight": loader}

    def fused_down_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loader of a checkpoint tensor with down_proj of the first `num_experts` experts.

        Its shape is [num_experts, hidden_size, intermediate_size].
        """
        target = self.down_proj[:num_experts]
        shape = (*target.shape[:2], self._intermediate_size)
        return {"weight": shard_loader(target, shape, slice(None), slice(None), as_slice(self._local_columns))}

    def _rows_loader(self, target: torch.Tensor) -> WeightLoader:
        return shard_loader(target, (self._intermediate_size, target.shape[1]), as_slice(self._local_columns))


# From the rows of each matrix that a layer merges, and its columns, to its weight.
LinearFormat = Callable[[Sequence[int], int], LinearWeight]


class QuantizationMethod(NamedTuple):
    """The weight classes of a format: for linear layers, for embedding and output head, and for experts.

    `embedding` and `experts` are None if the format does not support them. The columns of a shard are a multiple of
    `column_multiple`, the size of the format's blocks.
    """

    linear: LinearFormat
    embedding: Callable[[Sequence[int], int], EmbeddingWeight] | None
    experts: Callable[[int, int, int, range], ExpertsWeight] | None
    column_multiple: int = 1

    def check_columns(self, total: int, local_columns: range) -> None:
        """Raise ShardError if a rank's part `local_columns` of `total` columns is not made of whole blocks."""
        multiple = self.column_multiple
        if len(local_columns) == total:  # a published matrix may end within a block
            return
        if local_columns.start % multiple == 0 and len(local_columns) % multiple == 0:
            return
        raise ShardError(
            f"--tensor-parallel-size {total // len(local_columns)} cuts {total} columns of a quantized weight "
            f"within blocks of {multiple}"
        )


UNQUANTIZED = QuantizationMethod(DenseWeight, DenseWeight, DenseExperts)
