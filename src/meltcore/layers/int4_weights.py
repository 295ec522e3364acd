"""Weights in groups of 4-bit values (kernels/quant/int4.py), loaded from the tensors of AWQ and GPTQ checkpoints.

A checkpoint holds a matrix [outputs, inputs] transposed, in words of eight 4-bit values (int32, the lowest bits first):

    AWQ    qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]; a word has its outputs
           with even numbers first
    GPTQ   qweight [inputs / 8, outputs], qzeros and scales as above, with outputs in order; g_idx [inputs] names the
           group of each input. Version 1 stores zero points minus one.

In activation order (desc_act) the inputs of a group are not neighbors. Loading sorts the weight's columns by group, and
the layer's inputs are put into the same order before the matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal, NamedTuple, Unpack

import torch

from meltcore.common.errors import ConfigError, ShardError
from meltcore.kernels.gemm.linear import LinearOptions
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.quant.int4 import Int4Type, pack_int4_scales, pack_int4_values, pack_int4_zeros
from meltcore.layers.ggml_weights import GgmlExperts, GgmlWeight, PackedRows
from meltcore.layers.quantization import QuantizationMethod
from meltcore.layers.weight_loader import ConvertingLoader, MatrixPart, ShardLoader, WeightLoader, as_slice

WORD_VALUES = 8  # in an int32
# Dummy weights: zero points of 8, and the standard deviation of uniform values around them.
DUMMY_ZEROS, DUMMY_DEVIATION = 0x88888888 - 2**32, 4.64
Layout = Literal["awq", "gptq", "gptq_v2"]
# Value i of a word of AWQ is output _AWQ_ORDER[i] of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Int4Format(NamedTuple):
    """How a checkpoint stores a matrix.

    Args:
        has_g_idx: whether the checkpoint has a tensor g_idx.
        has_bias: whether the checkpoint has a bias of zeros although the model has no bias.
        group_index: int32 g_idx if the inputs are in activation order, else empty.
    """

    layout: Layout
    type: Int4Type
    has_g_idx: bool = False
    has_bias: bool = False
    group_index: bytes = b""

    def input_order(self) -> torch.Tensor | None:
        """Return the inputs in the order of their groups, [inputs] int64 on the CPU.

        Returns None if no order is needed.
        """
        if not self.group_index:
            return None
        groups = torch.frombuffer(bytearray(self.group_index), dtype=torch.int32)
        return torch.sort(groups, stable=True).indices


def unpack_words(words: torch.Tensor, *, is_awq: bool) -> torch.Tensor:
    """Return the 4-bit values of words [..., words] int32: [..., words, 8] uint8, in the matrix's order."""
    in_bytes = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    values = torch.stack([in_bytes & 15, in_bytes >> 4], -1).flatten(-2)
    if not is_awq:
        return values
    order = sorted(range(WORD_VALUES), key=_AWQ_ORDER.__getitem__)
    return values[..., torch.tensor(order, device=values.device)]


class _Matrix(NamedTuple):
    """Loads this rank's part of a checkpoint's matrix into packed arrays [rows, bytes]: values, scales, zero points."""

    format: Int4Format
    part: MatrixPart
    arrays: Sequence[torch.Tensor]
    input_order: torch.Tensor | None

    def tensors(self) -> dict[str, WeightLoader]:
        """Return the loader of each tensor of the matrix, by the last part of the tensor's name."""
        layout, int4_type, has_g_idx, has_bias, _ = self.format
        (outputs, inputs), kept_inputs = self.part.shape, self.part.inputs
        group, words = int4_type.group_size, outputs // WORD_VALUES
        groups = range(kept_inputs.start // group, kept_inputs.stop // group)
        integers = (torch.int32,)
        loaders: dict[str, WeightLoader] = {
            "qzeros": self._loader((inputs // group, words), groups, WORD_VALUES, self._store_zeros, integers),
            "scales": self._loader((inputs // group, outputs), groups, 1, self._store_scales, (int4_type.scale_dtype,)),
        }
        if layout == "awq":
            loaders["qweight"] = self._loader((inputs, words), kept_inputs, WORD_VALUES, self._store_values, integers)
        else:
            rows = range(kept_inputs.start // WORD_VALUES, kept_inputs.stop // WORD_VALUES)
            shape = (inputs // WORD_VALUES, outputs)
            loaders["qweight"] = self._loader(shape, rows, 1, self._store_values, integers)
        if has_g_idx:  # has been read before
            loaders["g_idx"] = ConvertingLoader(torch.Size((inputs,)), lambda _: None, integers)
        if has_bias:
            loaders["bias"] = ConvertingLoader(torch.Size((outputs,)), _check_zero)
        return loaders

    def _loader(
        self,
        shape: tuple[int, int],
        rows: range,
        word_values: int,
        store: Callable[[slice, torch.Tensor], None],
        dtypes: tuple[torch.dtype, ...],
    ) -> WeightLoader:
        """Return the loader of a tensor of `shape` that keeps `rows`. A column of the tensor is `word_values` outputs.

        `store` stores a part of the tensor in some rows of the arrays.
        """
        slices, start = [], self.part.rows.start
        for kept_outputs in self.part.outputs:
            if kept_outputs.start % word_values or len(kept_outputs) % word_values:
                self._refuse_shard(kept_outputs)
            columns = range(kept_outputs.start // word_values, kept_outputs.stop // word_values)
            target = ConvertingLoader(
                torch.Size((len(rows), len(columns))), partial(store, slice(start, start + len(kept_outputs))), dtypes
            )
            slices.append(((as_slice(rows), as_slice(columns)), target))
            start += len(kept_outputs)
        if len(slices) == 1 and tuple(slices[0][1].shape) == shape:
            return slices[0][1]
        return ShardLoader(torch.Size(shape), tuple(slices))

    def _refuse_shard(self, kept_rows: range) -> None:
        outputs, size = self.part.shape[0], self.part.shape[0] // len(kept_rows)
        raise ShardError(
            f"--tensor-parallel-size {size} cuts {outputs} outputs of a quantized weight within words of {WORD_VALUES}"
        )

    def _store_values(self, rows: slice, words: torch.Tensor) -> None:
        device = self.arrays[0].device
        values = unpack_words(words.to(device), is_awq=self.format.layout == "awq")
        if self.format.layout == "awq":
            by_row = values.flatten(1).t()
        else:
            by_row = values.permute(1, 0, 2).flatten(1)
        if self.input_order is not None:
            by_row = by_row[:, self.input_order.to(device)]
        self.arrays[0][rows].copy_(pack_int4_values(self._reorder_rows(by_row)))

    def _store_scales(self, rows: slice, scales: torch.Tensor) -> None:
        if not torch.isfinite(scales).all():
            raise ValueError("has a scale that is not finite")
        by_row = self._reorder_rows(scales.to(self.arrays[1].device, self.format.type.scale_dtype).t())
        self.arrays[1][rows].copy_(pack_int4_scales(by_row, self.format.type))

    def _store_zeros(self, rows: slice, words: torch.Tensor) -> None:
        zeros = unpack_words(words.to(self.arrays[2].device), is_awq=self.format.layout == "awq").flatten(1)
        if self.format.layout == "gptq":
            zeros = zeros + 1
        by_row = self._reorder_rows(zeros.t())
        self.arrays[2][rows].copy_(pack_int4_zeros(by_row, self.format.type))

    def _reorder_rows(self, by_row: torch.Tensor) -> torch.Tensor:
        """Return rows of the checkpoint in the order in which the weight keeps them."""
        order = self.part.row_order
        return by_row if order is None else by_row[order.to(by_row.device)]


def _check_zero(bias: torch.Tensor) -> None:
    if bias.any():
        raise ValueError("is not zero, and the model has no bias there")


class Int4Weight(GgmlWeight):
    """A weight [sum(output_sizes), input_size] in groups of 4-bit values, of a linear layer or a head."""

    input_order: torch.Tensor | None

    def __init__(self, matrix_format: Int4Format, output_sizes: Sequence[int], input_size: int) -> None:
        super().__init__(matrix_format.type, output_sizes, input_size)
        self._format, order = matrix_format, matrix_format.input_order()
        if order is not None and len(order) != input_size:
            raise ShardError(
                f"--tensor-parallel-size {len(order) // input_size} cuts {len(order)} columns of a quantized weight in "
                "activation order (desc_act), of which no rank has whole groups"
            )
        self._cpu_order = order
        self.register_buffer("input_order", None if order is None else torch.empty(len(order), dtype=torch.int64))

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loaders of a checkpoint's matrix. Its shard must consist of whole groups and words."""
        loaders = _Matrix(self._format, part, self.blocks.tensor.arrays, self._cpu_order).tensors()
        target, order = self.input_order, self._cpu_order
        if target is not None and order is not None:
            shape = torch.Size((part.shape[1],))
            loaders["g_idx"] = ConvertingLoader(shape, lambda _: target.copy_(order), (torch.int32,))
        return loaders

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        if self.input_order is not None:
            hidden, norm = (rms_norm(hidden, *norm) if norm else hidden).index_select(1, self.input_order), None
        return super().matmul(hidden, norm, **options)


class Int4Experts(GgmlExperts):
    """Weights of experts in groups of 4-bit values. This rank keeps a range of their intermediate size."""

    def __init__(
        self,
        matrix_format: Int4Format,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        local_columns: range,
    ) -> None:
        if matrix_format.group_index:
            raise ConfigError("experts with inputs in activation order (desc_act) are not supported")
        super().__init__((matrix_format.type,) * 3, num_experts, hidden_size, intermediate_size, local_columns)
        self._format, self._hidden_size = matrix_format, hidden_size

    def gate_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of each tensor of one expert's gate_proj, by the last part of the tensor's name."""
        return self._rows_tensors(expert, 0)

    def up_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of each tensor of one expert's up_proj, by the last part of the tensor's name."""
        return self._rows_tensors(expert, len(self._local_columns))

    def down_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loader of each tensor of one expert's down_proj, by the last part of the tensor's name."""
        rows = range(self._hidden_size)
        return self._tensors(
            self.down_proj,
            expert,
            MatrixPart((len(rows), self._intermediate_size), (rows,), self._local_columns, rows),
        )

    def fused_gate_up_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return no loaders: no checkpoint merges experts."""
        del num_experts
        return {}

    def fused_down_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return no loaders: no checkpoint merges experts."""
        del num_experts
        return {}

    def _rows_tensors(self, expert: int, first_row: int) -> dict[str, WeightLoader]:
        (gate_up,), local_columns = self.gate_up_proj, self._local_columns
        assert isinstance(gate_up, PackedRows)
        rows = range(first_row, first_row + len(local_columns))
        shape = (self._intermediate_size, self._hidden_size)
        return self._tensors(gate_up, expert, MatrixPart(shape, (local_columns,), range(self._hidden_size), rows))

    def _tensors(self, packed: PackedRows, expert: int, part: MatrixPart) -> dict[str, WeightLoader]:
        return _Matrix(self._format, part, [array[expert] for array in packed.tensor.arrays], None).tensors()


@cache
def int4_method(matrix_format: Int4Format) -> QuantizationMethod:
    """Return the quantization method of matrices in a format: the same object for the same format."""
    return QuantizationMethod(
        partial(Int4Weight, matrix_format),
        partial(Int4Weight, matrix_format),
        partial(Int4Experts, matrix_format),
        matrix_format.type.group_size,
    )
