"""Weights that a CPU holds in float16, whatever the checkpoint stores, and multiplies in float32."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from meltcore.kernels.embedding import sharded_embedding
from meltcore.kernels.fp8.block_fp8 import BlockFp8Tensor
from meltcore.kernels.gemm.half_weight import PackedHalf, half_linear
from meltcore.kernels.gemm.linear import LinearOptions, apply_options
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.quant.ggml_decode import dequantize
from meltcore.layers.fp8_weights import BlockFp8Weight, Fp8Weight
from meltcore.layers.ggml_weights import GgmlWeight
from meltcore.layers.int4_weights import Int4Weight
from meltcore.layers.merged_weight import MergedWeight
from meltcore.layers.quantization import DenseWeight
from meltcore.layers.weight_loader import ConvertingLoader, MatrixPart, WeightLoader


class HalfTable(nn.Module):
    """Embeddings in float16. values: [vocab_size, hidden_size]."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.half(), requires_grad=False)

    def embeddings(self, token_ids: torch.Tensor, first_token: int | None) -> torch.Tensor:
        """Look up tokens in float32. See `EmbeddingWeight.embeddings`."""
        if first_token is not None:
            return sharded_embedding(self.values, token_ids, first_token).float()
        return self.values[token_ids].float()


class HalfWeight(nn.Module):
    """A loaded weight [sum(output_sizes), input_size] of a linear layer, an embedding or a head, in float16.

    `stored_types` are the formats of the checkpoint, as users see them. `table` looks up rows if the weight is an
    embedding. None means that it is not.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, packed: PackedHalf, stored_types: frozenset[str], table: nn.Module | None = None) -> None:
        super().__init__()
        self.packed, self.stored_types, self.table = packed, stored_types, table

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return a loader that raises ValueError when it is used, since a packed weight cannot be loaded again."""

        def refuse(_: torch.Tensor) -> None:
            raise ValueError(f"rows {part.rows} of a weight that is packed in float16 cannot be loaded again")

        return {"weight": ConvertingLoader(torch.Size(part.shape), refuse)}

    def embeddings(self, token_ids: torch.Tensor, first_token: int | None) -> torch.Tensor:
        """Look up tokens, with zeros for tokens of other ranks. See `EmbeddingWeight.embeddings`."""
        assert isinstance(self.table, HalfTable | GgmlWeight), "the weight of an embedding has a table"
        return self.table.embeddings(token_ids, first_token)

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        return apply_options(half_linear(rms_norm(hidden, *norm) if norm else hidden, self.packed), **options)


def stored_values(weight: nn.Module) -> torch.Tensor:
    """Return the values of a loaded weight, [rows, columns] float32. Columns have the order of the layer's inputs."""
    if isinstance(weight, MergedWeight):
        return torch.cat([stored_values(part) for part in weight.parts])
    if isinstance(weight, DenseWeight):
        return weight.values.detach().float()
    if isinstance(weight, Fp8Weight | BlockFp8Weight):
        scales = weight.scales if isinstance(weight, BlockFp8Weight) else weight.scales[:, None]
        return BlockFp8Tensor(weight.values, scales).dequantize()
    assert isinstance(weight, GgmlWeight)
    tensor = weight.blocks.tensor
    values = dequantize(tensor, torch.empty(len(tensor.values), tensor.columns))
    order = weight.input_order if isinstance(weight, Int4Weight) else None
    return values if order is None else torch.empty_like(values).index_copy_(1, order, values)


def half_weight(
    weight: nn.Module, stored_types: frozenset[str], *, in_two_parts: bool, is_embedding: bool
) -> HalfWeight:
    """Return a loaded weight in float16. Raises ValueError for a value that float16 cannot hold."""
    values, table = stored_values(weight), None
    if is_embedding:
        table = weight if isinstance(weight, GgmlWeight) else HalfTable(values)
    return HalfWeight(PackedHalf(values, in_two_parts=in_two_parts), stored_types, table)
