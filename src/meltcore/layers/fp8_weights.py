"""FP8 weights: quantized per channel as they are loaded, or as published checkpoints store them.

A published weight has its scales in a separate tensor: one scale per block of 128 x 128, per channel, or per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Literal, NamedTuple, Unpack

import torch
from torch import nn

from meltcore.kernels.fp8.block_fp8 import BLOCK, BlockFp8Tensor, num_blocks
from meltcore.kernels.fp8.block_fp8_experts import add_block_fp8_experts, block_fp8_expert_outputs
from meltcore.kernels.fp8.block_fp8_linear import block_fp8_linear
from meltcore.kernels.fp8.fp8 import FP8, Fp8Tensor, quantize
from meltcore.kernels.fp8.fp8_linear import fp8_linear
from meltcore.kernels.gemm.linear import LinearOptions
from meltcore.kernels.moe.routing import RouterLogits, Routing
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant.ggml_expert_gemv import can_select
from meltcore.layers.quantization import DenseWeight, QuantizationMethod
from meltcore.layers.weight_loader import (
    ConvertingLoader,
    MatrixPart,
    ShardLoader,
    WeightLoader,
    stored_dtypes,
)


class StoredScales(NamedTuple):
    """Says how values of a published FP8 weight share a scale, and how the name of the scales' tensor ends."""

    strategy: Literal["block", "channel", "tensor"]
    name: str


def _tensors(target: BlockFp8Tensor, part: MatrixPart, stored: StoredScales | None) -> dict[str, WeightLoader]:
    """Return the loaders of a checkpoint's matrix that fill `target` with this rank's part.

    `stored` is None for an unquantized checkpoint, whose rows are quantized while they are loaded.
    """
    values, scales = target
    part = part._replace(rows=range(len(values)))
    if stored is None:
        return {"weight": part.loader(partial(_quantizing_loader, target))}
    tensors = {"weight": part.loader(partial(_values_loader, values))}
    if stored.strategy == "block":
        tensors[stored.name] = _block_scales_loader(target, part)
    elif stored.strategy == "channel":
        columns = part._replace(shape=(part.shape[0], 1), inputs=range(1))
        tensors[stored.name] = columns.loader(lambda start, stop: scales[start:stop])
    else:
        tensors[stored.name] = ConvertingLoader(torch.Size((1,)), lambda source: scales.copy_(source.expand_as(scales)))
    return tensors


def _quantizing_loader(target: BlockFp8Tensor, start: int, stop: int) -> WeightLoader:
    values, scales = target.values[start:stop], target.scales[start:stop]

    def store(source: torch.Tensor) -> None:
        fp8_rows = quantize(source.to(values.device).contiguous())
        values.copy_(fp8_rows.values)
        scales.copy_(fp8_rows.scales[:, None])

    return ConvertingLoader(
        values.shape, store, rows=lambda rows: _quantizing_loader(BlockFp8Tensor(values, scales), rows.start, rows.stop)
    )


def _values_loader(values: torch.Tensor, start: int, stop: int) -> WeightLoader:
    part = values[start:stop]
    return ConvertingLoader(part.shape, part.copy_, (FP8,), lambda rows: _values_loader(part, rows.start, rows.stop))


def _block_scales_loader(target: BlockFp8Tensor, part: MatrixPart) -> WeightLoader:
    """Return the loader of the scales of blocks of 128 x 128.

    Raises ValueError if rows that share a scale of `target` lie in several blocks of the checkpoint.
    """
    blocks = part.source_rows().view(-1, target.row_group) // BLOCK
    if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
        raise ValueError(f"{target.row_group} rows that share a scale lie in several blocks of the checkpoint")
    columns = slice(part.inputs.start // BLOCK, num_blocks(part.inputs.stop))
    rows, columns_count = part.shape

    def store(source: torch.Tensor) -> None:
        target.scales.copy_(source[blocks[:, 0].to(source.device), columns])

    return ConvertingLoader(torch.Size((num_blocks(rows), num_blocks(columns_count))), store)


class Fp8Weight(nn.Module):
    """An FP8 weight with one scale per output channel.

    Args:
        values: [sum(output_sizes), input_size] e4m3.
        scales: [sum(output_sizes)] float32.
        stored: scales of the checkpoint. None stands for an unquantized checkpoint, whose weight is quantized as it is
            loaded.
    """

    def __init__(self, output_sizes: Sequence[int], input_size: int, stored: StoredScales | None = None) -> None:
        super().__init__()
        self._stored = stored
        self.values = nn.Parameter(torch.empty(sum(output_sizes), input_size, dtype=FP8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(sum(output_sizes), dtype=torch.float32), requires_grad=False)

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loaders of a checkpoint's matrix, unquantized or with its scales."""
        rows = slice(part.rows.start, part.rows.stop)
        return _tensors(BlockFp8Tensor(self.values[rows], self.scales[rows, None]), part, self._stored)

    def matmul(
        self,
        hidden: torch.Tensor,
        norm: Norm | None = None,
        *,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Quantize `hidden` per token and return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        result = fp8_linear(hidden, Fp8Tensor(self.values, self.scales), norm, gated=gated, residual=residual)
        return result if out is None else out.copy_(result)


class BlockFp8Weight(nn.Module):
    """An FP8 weight with a scale per block. A block has 128 columns, and as many rows as divide each matrix, up to 128.

    Args:
        values: [sum(output_sizes), input_size] e4m3.
        scales: float32, one per block.
        row_multiple: number of neighboring rows that keep their order.
    """

    def __init__(
        self, output_sizes: Sequence[int], input_size: int, stored: StoredScales, row_multiple: int = BLOCK
    ) -> None:
        super().__init__()
        self._stored, rows = stored, sum(output_sizes)
        self._row_group = math.gcd(BLOCK, row_multiple, *output_sizes)
        self.values = nn.Parameter(torch.empty(rows, input_size, dtype=FP8), requires_grad=False)
        scales = torch.empty(rows // self._row_group, num_blocks(input_size), dtype=torch.float32)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def tensors(self, part: MatrixPart) -> dict[str, WeightLoader]:
        """Return the loaders of a checkpoint's matrix and of its scales."""
        start, stop = part.rows.start, part.rows.stop
        groups = slice(start // self._row_group, stop // self._row_group)
        return _tensors(BlockFp8Tensor(self.values[start:stop], self.scales[groups]), part, self._stored)

    def matmul(self, hidden: torch.Tensor, norm: Norm | None = None, **options: Unpack[LinearOptions]) -> torch.Tensor:
        """Quantize `hidden` in blocks and return norm(hidden) W^T with the options of `LinearWeight.matmul`."""
        return block_fp8_linear(hidden, BlockFp8Tensor(self.values, self.scales), norm, **options)


class Fp8Experts(nn.Module):
    """FP8 weights of experts, with scales per block or per channel. This rank keeps the range `local_columns`.

    Args:
        gate_up_values: [experts, 2 * len(local_columns), hidden_size] e4m3, gate rows above up rows.
        down_values: [experts, hidden_size, len(local_columns)] e4m3.
        stored: scales of the checkpoint. None stands for an unquantized checkpoint, whose weights are quantized per
            channel as they are loaded.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        local_columns: range,
        stored: StoredScales | None = None,
    ) -> None:
        super().__init__()
        self._intermediate_size, self._local_columns, self._stored = intermediate_size, local_columns, stored
        width = len(local_columns)
        self.gate_up_values, self.gate_up_scales = self._allocate(num_experts, 2 * width, hidden_size, width)
        self.down_values, self.down_scales = self._allocate(num_experts, hidden_size, width, hidden_size)

    def outputs(self, hidden: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute the unweighted outputs of each token's experts. See `ExpertsWeight.outputs`."""
        return block_fp8_expert_outputs(hidden, routing, *self._gate_up_and_down)

    def selects(self, hidden: torch.Tensor, norm: Norm | None, pairs: int) -> bool:
        """Return whether the kernels of few tokens select a token's experts. See `ExpertsWeight.selects`."""
        up, down = (weight.as_bytes() for weight in self._gate_up_and_down)
        return up is not None and down is not None and can_select(hidden, norm, pairs, [up], down)

    def add_outputs(
        self, residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing | RouterLogits
    ) -> torch.Tensor:
        """Return `residual` with each token's weighted sum of expert outputs added in place, or else the sum alone."""
        return add_block_fp8_experts(residual, hidden, routing, *self._gate_up_and_down)

    @property
    def _gate_up_and_down(self) -> tuple[BlockFp8Tensor, BlockFp8Tensor]:
        """Return the weights of both projections with their scales."""
        return (
            BlockFp8Tensor(self.gate_up_values, self.gate_up_scales),
            BlockFp8Tensor(self.down_values, self.down_scales),
        )

    def gate_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loaders of one expert's gate_proj, [intermediate_size, hidden_size], and of its scales."""
        return self._rows_tensors(expert, 0)

    def up_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loaders of one expert's up_proj, [intermediate_size, hidden_size], and of its scales."""
        return self._rows_tensors(expert, 1)

    def down_tensors(self, expert: int) -> dict[str, WeightLoader]:
        """Return the loaders of one expert's down_proj, [hidden_size, intermediate_size], and of its scales."""
        target = BlockFp8Tensor(self.down_values[expert], self.down_scales[expert])
        hidden_size = len(target.values)
        shape = (hidden_size, self._intermediate_size)
        part = MatrixPart(shape, (range(hidden_size),), self._local_columns, range(hidden_size))
        return _tensors(target, part, self._stored)

    def fused_gate_up_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loaders of tensors with gate_up_proj of the first `num_experts` experts, gate above up."""
        return _fused_loaders([[self.gate_tensors(expert), self.up_tensors(expert)] for expert in range(num_experts)])

    def fused_down_tensors(self, num_experts: int) -> dict[str, WeightLoader]:
        """Return the loaders of tensors with down_proj of the first `num_experts` experts."""
        return _fused_loaders([[self.down_tensors(expert)] for expert in range(num_experts)])

    def _allocate(self, num_experts: int, rows: int, columns: int, matrix_rows: int) -> list[nn.Parameter]:
        """Allocate values and scales of one projection, whose matrices have `matrix_rows` rows each."""
        values = torch.empty(num_experts, rows, columns, dtype=FP8)
        has_blocks = self._stored is not None and self._stored.strategy == "block"
        row_group, column_blocks = (math.gcd(BLOCK, matrix_rows), num_blocks(columns)) if has_blocks else (1, 1)
        scales = torch.empty(num_experts, rows // row_group, column_blocks, dtype=torch.float32)
        return [nn.Parameter(values, requires_grad=False), nn.Parameter(scales, requires_grad=False)]

    def _rows_tensors(self, expert: int, index: int) -> dict[str, WeightLoader]:
        """Return the loaders of gate_proj (index 0) or up_proj (1) of one expert."""
        values = self.gate_up_values[expert].chunk(2)[index]
        target = BlockFp8Tensor(values, self.gate_up_scales[expert].chunk(2)[index])
        rows, columns = values.shape
        shape = (self._intermediate_size, columns)
        return _tensors(target, MatrixPart(shape, (self._local_columns,), range(columns), range(rows)), self._stored)


def _fused_loaders(experts: Sequence[Sequence[dict[str, WeightLoader]]]) -> dict[str, WeightLoader]:
    """Return the loaders of tensors that stack one matrix of every expert, in the order of the experts."""
    fused: dict[str, WeightLoader] = {}
    for end, first in experts[0][0].items():
        if first.shape == (1,):  # of one scale per matrix no layout is published
            return {}
        slices: list[tuple[tuple[slice, ...], WeightLoader]] = []
        for expert, matrices in enumerate(experts):
            start = 0
            for tensors in matrices:
                stop = start + tensors[end].shape[0]
                slices.append(((slice(expert, expert + 1), slice(start, stop)), _expert_loader(tensors[end])))
                start = stop
        shape = (len(experts), sum(tensors[end].shape[0] for tensors in experts[0]), *first.shape[1:])
        fused[end] = ShardLoader(torch.Size(shape), tuple(slices))
    return fused


def _expert_loader(target: WeightLoader) -> WeightLoader:
    """Return the loader of a tensor with a leading dimension of 1."""
    return ConvertingLoader(
        torch.Size((1, *target.shape)), lambda source: target.copy_(source[0]), stored_dtypes(target)
    )


# Embedding and head keep the model's type: an error in a logit decides about a token immediately.
FP8_PER_CHANNEL = QuantizationMethod(Fp8Weight, DenseWeight, Fp8Experts)


@cache
def stored_fp8_method(stored: StoredScales, row_multiple: int = BLOCK) -> QuantizationMethod:
    """Return the quantization method of a published FP8 checkpoint: the same object for the same arguments.

    For scales of blocks, `row_multiple` neighboring rows of the layer keep their order.
    """
    experts = partial(Fp8Experts, stored=stored)
    if stored.strategy == "block":
        linear = partial(BlockFp8Weight, stored=stored, row_multiple=row_multiple)
        return QuantizationMethod(linear, None, experts, BLOCK)
    return QuantizationMethod(partial(Fp8Weight, stored=stored), None, experts)
