"""Layers with block-quantized weights against the same layers with the dequantized ones."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from meltcore.common.errors import ConfigError
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant.ggml import quantize_blocks
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from meltcore.layers.feed_forward import SparseMoeBlock
from meltcore.layers.ggml_weights import GgmlExperts, GgmlWeight, ggml_method
from meltcore.layers.linear import ColumnParallelLinear, RowParallelLinear
from meltcore.layers.merged_weight import MergedWeight
from meltcore.layers.norm import RMSNorm
from meltcore.layers.quantization import DenseExperts, QuantizationMethod
from meltcore.layers.tensor_parallel import TensorParallelGroup

Q4_0, Q8_0, Q4_K, Q6_K = GgmlType.Q4_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.Q6_K
RANKS = [TensorParallelGroup(rank, 2) for rank in range(2)]


def file_tensor(ggml_type: GgmlType | None, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor as a file stores it, and its values by the gguf package. Scales are small and positive."""
    if ggml_type is None:
        wide = torch.randn(shape) * 0.05
        return wide, wide
    draw = np.random.default_rng(sum(shape))
    blocks = draw.integers(0, 256, (*shape[:-1], ggml_type.row_bytes(shape[-1])), dtype=np.uint8)
    by_block = blocks.reshape(-1, ggml_type.block_bytes)
    for high_byte in {Q4_K: (1, 3), Q6_K: (209,)}.get(ggml_type, (1,)):
        by_block[:, high_byte] = {Q8_0: 0x10, Q4_0: 0x20, Q4_K: 0x0A, Q6_K: 0x08}[ggml_type]
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(ggml_type))
    return torch.from_numpy(blocks), torch.from_numpy(values)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("types", "part_count"),
    [((Q4_K, Q4_K, Q6_K), 2), ((Q8_0, Q8_0, Q8_0), 1), ((Q4_0, None, Q4_0), 3), ((None, None, None), 1)],
    ids=str,
)
def test_merged_matrices_keep_their_formats(types: tuple[GgmlType | None, ...], part_count: int) -> None:
    torch.manual_seed(0)
    layer, sizes = ColumnParallelLinear(512, 24, 8, 8), (24, 8, 8)
    layer.quantize(ggml_method(*types))
    stored, wide = zip(*(file_tensor(each, size, 512) for each, size in zip(types, sizes, strict=True)), strict=True)
    order = torch.randperm(24)
    for index, tensor in enumerate(stored):
        loader = layer.tensors(index, order if index == 0 else None)["weight"]
        assert loader.shape == tensor.shape
        loader.copy_(tensor)
    assert isinstance(layer.weight, MergedWeight) == (part_count > 1)
    if isinstance(layer.weight, MergedWeight):
        assert len(layer.weight.parts) == part_count
    expected = torch.cat([wide[0][order], *wide[1:]])
    hidden, norm = torch.randn(5, 512), Norm(torch.rand(512), 1e-6)
    normalized = RMSNorm(512, 1e-6)
    normalized.weight.data.copy_(norm.weight)
    assert_close(layer(hidden, norm), normalized(hidden) @ expected.T)
    gate, up = (hidden @ expected.T).chunk(2, -1)
    assert_close(layer.silu_and_mul(hidden), torch.nn.functional.silu(gate) * up)
    residual = torch.randn(5, 40)
    assert_close(layer.weight.matmul(hidden, residual=residual.clone()), residual + hidden @ expected.T)
    stored_bytes = sum(tensor.nbytes for tensor in stored)
    assert stored_bytes <= sum(parameter.nbytes for parameter in layer.parameters()) <= 1.001 * stored_bytes


def sharded(
    group: TensorParallelGroup, method: QuantizationMethod, *, quantized_first: bool
) -> tuple[RowParallelLinear, ColumnParallelLinear]:
    """Two layers of one matrix [16, 1024], sharded by its columns and by its rows."""
    row_parallel, column_parallel = RowParallelLinear(1024, 16), ColumnParallelLinear(1024, 16)
    for is_quantizing in (quantized_first, not quantized_first):
        if is_quantizing:
            row_parallel.quantize(method)
            column_parallel.quantize(method)
        else:
            row_parallel.shard(group.shard(1024, "columns"), group)
            column_parallel.shard(group.shard(16, "rows"))
    return row_parallel, column_parallel


@pytest.mark.parametrize("ggml_type", [Q4_0, Q6_K], ids=lambda each: each.name)
@pytest.mark.parametrize("quantized_first", [True, False])
def test_shards_end_where_blocks_end(ggml_type: GgmlType, quantized_first: bool) -> None:
    stored, wide = file_tensor(ggml_type, 16, 1024)
    hidden = torch.randn(3, 1024)
    sums, rows = [], []
    for group, columns in zip(RANKS, hidden.chunk(2, 1), strict=True):
        row_parallel, column_parallel = sharded(group, ggml_method(ggml_type), quantized_first=quantized_first)
        row_parallel.tensors(0)["weight"].copy_(stored)
        column_parallel.tensors(0)["weight"].copy_(stored)
        sums.append(row_parallel.weight.matmul(columns.contiguous()))
        rows.append(column_parallel(hidden))
    assert_close(sums[0] + sums[1], hidden @ wide.T)
    assert_close(torch.cat(rows, 1), hidden @ wide.T)


def test_a_shard_within_a_block_is_refused() -> None:
    group = TensorParallelGroup(0, 8)
    layer = RowParallelLinear(1536, 16)
    layer.shard(group.shard(1536, "columns"), group)
    message = r"--tensor-parallel-size 8 cuts 1536 columns .* blocks of 256$"
    with pytest.raises(ConfigError, match=message):
        layer.quantize(ggml_method(Q6_K))
    layer.quantize(ggml_method(Q4_0))
    block = SparseMoeBlock(256, 768, 4, 2, lambda size: RMSNorm(size, 1e-6), norm_topk_prob=True)
    block.quantize(ggml_method(Q4_K, Q4_K, Q6_K))
    with pytest.raises(ConfigError, match="cuts 768 columns"):
        block.shard(RANKS[0])


@pytest.mark.parametrize("ggml_type", [Q8_0, Q6_K], ids=lambda each: each.name)
def test_embedding_and_head_dequantize_rows(ggml_type: GgmlType) -> None:
    stored, wide = file_tensor(ggml_type, 40, 256)
    token_ids = torch.tensor([3, 39, 3, 20])
    embedding = VocabParallelEmbedding(40, 256, scale=2.0)
    embedding.quantize(ggml_method(ggml_type))
    embedding.tensors()["weight"].copy_(stored)
    assert isinstance(embedding.weight, GgmlWeight)
    assert embedding.weight.dtype == torch.float32
    assert torch.equal(embedding(token_ids).values, 2.0 * wide[token_ids])
    hidden, out = torch.randn(2, 256), torch.empty(2, 40)
    assert embedding.logits(hidden, out) is out
    assert_close(out, hidden @ wide.T)
    logits, rows = [], []
    for group in RANKS:
        head = ParallelLMHead(40, 256)
        head.shard(group)
        head.quantize(ggml_method(ggml_type))
        head.tensors()["weight"].copy_(stored)
        logits.append(head.logits(hidden))
        rows.append(head.weight.embeddings(token_ids, 20 * group.rank))
        assert head.local_vocab_size == 20
    assert_close(torch.cat(logits, 1), hidden @ wide.T)
    assert torch.equal(rows[0] + rows[1], wide[token_ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("ggml_type", [None, Q8_0], ids=["unquantized", "Q8_0"])
def test_logits_are_float32_whatever_the_type_of_the_model(ggml_type: GgmlType | None, dtype: torch.dtype) -> None:
    """Logits of 254 and 254 - 1 / 128 are equal in 16 bits."""
    torch.set_default_dtype(dtype)
    try:
        head = ParallelLMHead(40, 256)
        head.quantize(ggml_method(ggml_type))
    finally:
        torch.set_default_dtype(torch.float32)
    weight = torch.full((40, 256), 127 / 128)
    weight[8, 3] = 126 / 128
    head.tensors()["weight"].copy_(weight if ggml_type is None else quantize_blocks(weight, ggml_type))
    logits = head.logits(torch.ones(2, 256, dtype=dtype))
    assert logits.dtype == torch.float32
    assert (logits[:, 7] == 254.0).all()
    assert (logits[:, 8] == 254.0 - 1 / 128).all()


@pytest.mark.parametrize("types", [(Q4_K, Q4_K, Q6_K), (Q8_0, Q4_0, Q8_0)], ids=str)
def test_experts_match_dequantized_ones(types: tuple[GgmlType, GgmlType, GgmlType]) -> None:
    torch.manual_seed(1)
    count, size, width = 5, 256, 512
    shapes = (count, width, size), (count, width, size), (count, size, width)
    tensors = [file_tensor(each, *shape) for each, shape in zip(types, shapes, strict=True)]
    (gate, wide_gate), (up, wide_up), (down, wide_down) = tensors
    hidden = torch.randn(7, size)
    routing = Routing(torch.stack([torch.randperm(count)[:2] for _ in range(7)]).int(), torch.rand(7, 2))
    dense = DenseExperts(count, size, width, range(width))
    dense.gate_up_proj.copy_(torch.cat([wide_gate, wide_up], 1))
    dense.down_proj.copy_(wide_down)
    expected = dense.outputs(hidden, routing)
    shards = []
    for kept in (range(width), range(256), range(256, width)):
        method = ggml_method(*types)
        assert method.experts is not None
        experts = method.experts(count, size, width, kept)
        assert isinstance(experts, GgmlExperts)
        for expert in range(count):
            experts.gate_tensors(expert)["weight"].copy_(gate[expert])
            experts.up_tensors(expert)["weight"].copy_(up[expert])
            experts.down_tensors(expert)["weight"].copy_(down[expert])
        outputs = experts.outputs(hidden, routing)
        shards.append(outputs)
        if types[0] == types[1]:
            fused = method.experts(count, size, width, kept)
            fused.fused_gate_up_tensors(count)["weight"].copy_(torch.cat([gate, up], 1))
            fused.fused_down_tensors(count)["weight"].copy_(down)
            assert torch.equal(fused.outputs(hidden, routing), outputs)
        else:
            assert experts.fused_gate_up_tensors(count) == {}
    assert_close(shards[0], expected)
    assert_close(shards[1] + shards[2], expected)
    residual = torch.randn(7, size)
    added = dense.add_outputs(residual.clone(), hidden, routing)
    assert_close(experts_of(types, tensors).add_outputs(residual.clone(), hidden, routing), added)


def experts_of(types: tuple[GgmlType, ...], tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> GgmlExperts:
    count, size, width = len(tensors[0][0]), tensors[2][0].shape[1], tensors[0][0].shape[1]
    experts = GgmlExperts(types, count, size, width, range(width))
    for expert in range(count):
        experts.gate_tensors(expert)["weight"].copy_(tensors[0][0][expert])
        experts.up_tensors(expert)["weight"].copy_(tensors[1][0][expert])
        experts.down_tensors(expert)["weight"].copy_(tensors[2][0][expert])
    return experts


def test_refuses_what_no_layer_can_hold() -> None:
    with pytest.raises(ValueError, match="2 formats are given for a layer of 3 matrices"):
        ColumnParallelLinear(256, 8, 8, 8).quantize(ggml_method(Q4_0, Q4_0))
    layer = ColumnParallelLinear(256, 8, 8)
    layer.quantize(ggml_method(Q4_K, Q6_K))
    with pytest.raises(ValueError, match="rows 0 to 16 have several formats"):
        layer.tensors(0, stop=2)
    assert ggml_method(Q4_0).experts is None
    with pytest.raises(ValueError, match=r"a Q4_K weight is loaded from blocks in uint8, not from torch\.float32"):
        layer.tensors(0)["weight"].copy_(torch.zeros(8, 256))
