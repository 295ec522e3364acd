"""Keeps weights block-quantized on the device, in the formats of ggml (kernels/quant/ggml.py).

Loaders take a tensor as a GGUF file stores it: rows of blocks, uint8 [rows, bytes of a row]. The tensors of a layer may
have different formats, so a layer's quantization method holds the format of each matrix. The format None means
unquantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Unpack

import torch
from torch import nn

from meltcore.kernels.gemm.linear import LinearOptions
from meltcore.kernels.moe.routing import RouterLogits, Routing
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant.ggml import BlockType, GgmlTensor, empty, pack
from meltcore.kernels.quant.ggml_decode import ggml_embedding
from meltcore.kernels.quant.ggml_expert_gemv import can_select
from meltcore.kernels.quant.ggml_experts import add_ggml_experts, experts_scratch_values, ggml_expert_outputs
from meltcore.kernels.quant.ggml_linear import ggml_linear
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.merged_weight import MergedWeight
from meltcore.layers.quantization import DenseWeight, EmbeddingWeight, LinearWeight, QuantizationMethod
from meltcore.layers.weight_loader import (
    ConvertingLoader,
    MatrixPart,
    ShardLoader,
    WeightLoader,
    as_slice,
    shard_loader,
)


class PackedRows(nn.Module):
    """The arrays of a packed tensor of `shape` [..., columns], as parameters."""

    def __init__(self, ggml_type: BlockType, shape: Sequence[int]) -> None:
        super().__init__()
        self.ggml_type, self.columns = ggml_type, shape[-1]
        for name, array in zip(("values", "scales", "subscales"), empty(ggml_type, shape).arrays, strict=True):
            self.register_parameter(name, nn.Parameter(array, requires_grad=False))

    @property
    def tensor(self) -> GgmlTensor:
        """The packed tensor."""
        return GgmlTensor(self.ggml_type, self.columns, *self.parameters(recurse=False))

    def loader(self, *index: slice | int) -> WeightLoader:
        """Return the loader of the rows that `index` selects in the leading dimensions."""
        assert isinstance(self.ggml_type, GgmlType)
        return _packing_loader(self.ggml_type, self.columns, [array[index] for array in self.tensor.arrays])

    def source_columns(self, columns: range) -> range:
        """Return the bytes of a file's row that hold `columns`, which must be whole blocks."""
        return range(self.ggml_type.row_bytes(columns.start), self.ggml_type.row_bytes(columns.stop))


def _packing_loader(ggml_type: GgmlType, columns: int, arrays: Sequence[torch.Tensor]) -> WeightLoader:
    """Return the loader of blocks as a file stores them into the arrays of a packed tensor."""

    def store(source: torch.Tensor) -> None:
        if source.dtype != torch.uint8:
            raise ValueError(f"a {ggml_type.name} weight is loaded from blocks in uint8, not from {source.dtype}")
        # The file's bytes are copied to the device and arranged there.
        packed = pack(source.to(arrays[0].device), ggml_type)
        if not packed.scales.view(torch.float16).isfinite().all():
            raise ValueError(f"has {ggml_type.name} blocks whose scales are not finite numbers")
        for array, packed_array in zip(arrays, packed.arrays, strict=True):
            array.copy_(packed_array)

    return ConvertingLoader(
        torch.Size((*arrays[0].shape[:-1], ggml_type.row_bytes(columns))),
        store,
        rows=lambda rows: _packing_loader(ggml_type, columns, [array[as_slice(rows)] for array in arrays]),
    )


class GgmlWeight(nn.Module):
    """A block-quantized weight [sum(output_sizes), input_size], of a linear layer, an embedding or a head."""

    def __init__(self, ggml_type: BlockType, output_sizes: Sequence[int], input_size: int) -> None:
        super().__init__()
        self.blocks = PackedRows(ggml_type, (sum(output_sizes), input_size))
        self._dtype = torch.get_default_dtype()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows that `embeddings` returns: the model's dtype, not the format of the stored weight."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.blocks.tensor.values.device

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loader of a checkpoint's matrix in blocks. The matrix's shard must consist of whole blocks."""
        blocks = self.blocks
        return {"weight": part.loader(lambda start, stop: blocks.loader(slice(start, stop)), blocks.source_columns)}

    def embeddings(self, token_ids: torch.Tensor, first_token: int | None) -> torch.Tensor:
        """Dequantize the rows of tokens, with zeros for tokens of other ranks. See `EmbeddingWeight.embeddings`."""
        return ggml_embedding(self.blocks.tensor, token_ids, self._dtype, first_token)

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        return ggml_linear(hidden, self.blocks.tensor, norm, **options)


class GgmlExperts(nn.Module):
    """Block-quantized weights of experts. This rank keeps the range `local_columns` of their intermediate size.

    `types` are the formats of gate_proj, up_proj and down_proj. Gate and up of one format are one tensor, with gate
    rows above up rows.
    """

    def __init__(
        self,
        types: Sequence[BlockType],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        local_columns: range,
    ) -> None:
        super().__init__()
        gate, up, down = types
        self._intermediate_size, self._local_columns, local_size = intermediate_size, local_columns, len(local_columns)
        shapes = [(gate, 2 * local_size)] if gate == up else [(gate, local_size), (up, local_size)]
        self.gate_up_proj = nn.ModuleList(PackedRows(each, (num_experts, rows, hidden_size)) for each, rows in shapes)
        self.down_proj = PackedRows(down, (num_experts, hidden_size, local_size))

    @property
    def scratch_values(self) -> int:
        """The number of values that are dequantized at a time for many tokens."""
        return experts_scratch_values(self._gate_up, self.down_proj.tensor)

    @property
    def _gate_up(self) -> list[GgmlTensor]:
        """Return the packed gate and up weights: one fused tensor, or one tensor for each of them."""
        return [part.tensor for part in self.gate_up_proj if isinstance(part, PackedRows)]

    def outputs(self, hidden: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute the unweighted outputs of each token's experts. See `ExpertsWeight.outputs`."""
        return ggml_expert_outputs(hidden, routing, self._gate_up, self.down_proj.tensor)

    def selects(self, hidden: torch.Tensor, norm: Norm | None, pairs: int) -> bool:
        """Return whether the kernels of few tokens select a token's experts. See `ExpertsWeight.selects`."""
        return can_select(hidden, norm, pairs, self._gate_up, self.down_proj.tensor)

    def add_outputs(
        self, residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing | RouterLogits
    ) -> torch.Tensor:
        """Return `residual` with each token's weighted sum of expert outputs added in place, or else the sum alone."""
        return add_ggml_experts(residual, hidden, routing, self._gate_up, self.down_proj.tensor)

    def gate_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of one expert's tensor gate_proj, [intermediate_size, bytes of a row]."""
        return {"weight": self._rows_loader(expert, is_up=False)}

    def up_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of one expert's tensor up_proj, [intermediate_size, bytes of a row]."""
        return {"weight": self._rows_loader(expert, is_up=True)}

    def down_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of one expert's tensor down_proj, [hidden_size, bytes of a row]."""
        return {"weight": self._columns_loader(expert)}

    def fused_gate_up_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loader of a tensor [num_experts, 2 * intermediate_size, bytes of a row], gate above up.

        Returns no loader if the formats of gate and up differ, since then no tensor has both.
        """
        if len(self.gate_up_proj) > 1:
            return {}
        gate, up = (self._rows_loader(slice(num_experts), is_up=is_up) for is_up in (False, True))
        full_size = self._intermediate_size
        shape = torch.Size((num_experts, 2 * full_size, gate.shape[-1]))
        gate_rows, up_rows = slice(full_size), slice(full_size, 2 * full_size)
        return {"weight": ShardLoader(shape, (((slice(None), gate_rows), gate), ((slice(None), up_rows), up)))}

    def fused_down_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loader of a tensor [num_experts, hidden_size, bytes of a row]."""
        return {"weight": self._columns_loader(slice(num_experts))}

    def _rows_loader(self, experts: int | slice, *, is_up: bool) -> WeightLoader:
        part, size = self.gate_up_proj[-1 if is_up else 0], len(self._local_columns)
        assert isinstance(part, PackedRows)
        first = size if is_up and len(self.gate_up_proj) == 1 else 0
        target = part.loader(experts, slice(first, first + size))
        *leading, _, row_bytes = target.shape
        index = (*(slice(None) for _ in leading), as_slice(self._local_columns))
        return shard_loader(target, (*leading, self._intermediate_size, row_bytes), *index)

    def _columns_loader(self, experts: int | slice) -> WeightLoader:
        target, columns = self.down_proj.loader(experts), self.down_proj.source_columns
        *leading, _ = target.shape
        index = (*(slice(None) for _ in leading), as_slice(columns(self._local_columns)))
        return shard_loader(target, (*leading, len(columns(range(self._intermediate_size)))), *index)


def ggml_method(*types: GgmlType | None) -> QuantizationMethod:
    """Return the quantization method of a layer whose matrices have these formats, or None for an unquantized layer.

    A linear layer has a type per matrix that it merges. An embedding or a head has one type. Experts have the types of
    gate, up and down.
    """
    block_sizes = [ggml_type.block_size for ggml_type in types if ggml_type is not None]
    quantized = tuple(ggml_type for ggml_type in types if ggml_type is not None)
    return QuantizationMethod(
        partial(_linear_weight, types),
        partial(_embedding_weight, types),
        partial(GgmlExperts, quantized) if len(quantized) == len(types) == 3 else None,
        max(block_sizes, default=1),
    )


def _linear_weight(types: Sequence[GgmlType | None], output_sizes: Sequence[int], input_size: int) -> LinearWeight:
    if len(types) != len(output_sizes):
        raise ValueError(f"{len(types)} formats are given for a layer of {len(output_sizes)} matrices")
    if len(set(types)) > 1:
        return MergedWeight([_embedding_format(each) for each in types], output_sizes, input_size)
    return _embedding_weight(types[:1], output_sizes, input_size)


def _embedding_weight(
    types: Sequence[GgmlType | None], output_sizes: Sequence[int], input_size: int
) -> EmbeddingWeight:
    (ggml_type,) = types
    return _embedding_format(ggml_type)(output_sizes, input_size)


@cache
def _embedding_format(ggml_type: GgmlType | None) -> Callable[[Sequence[int], int], EmbeddingWeight]:
    """Return the weight class of a type: the same object for the same type."""
    return DenseWeight if ggml_type is None else partial(GgmlWeight, ggml_type)
