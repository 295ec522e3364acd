"""Layers with AWQ and GPTQ weights against the same layers with their exact values."""

from __future__ import annotations

import pytest
import torch
from int4_tools import int4_matrix, packed, random_numbers

from meltcore.common.errors import ConfigError
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.quant.int4 import Int4Type
from meltcore.layers import int4_weights
from meltcore.layers.embedding import ParallelLMHead
from meltcore.layers.int4_weights import Int4Experts, Int4Format, Int4Weight, int4_method
from meltcore.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from meltcore.layers.quantization import DenseExperts
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import WeightLoader

LAYOUTS = pytest.mark.parametrize("layout", ["awq", "gptq", "gptq_v2"])
RANKS = [TensorParallelGroup(rank, 2) for rank in range(2)]


def stored(
    layout: str, group_size: int = 128, dtype: torch.dtype = torch.float16, group_index: bytes = b""
) -> Int4Format:
    int4_type = Int4Type(group_size, dtype)
    return Int4Format(layout, int4_type, has_g_idx=layout != "awq", group_index=group_index)  # type: ignore[arg-type]


def load(loaders: dict[str, WeightLoader], tensors: dict[str, torch.Tensor]) -> None:
    assert loaders.keys() == tensors.keys()
    for name in sorted(tensors):
        assert loaders[name].shape == tensors[name].shape, name
        loaders[name].copy_(tensors[name])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize(
    ("group_size", "dtype"), [(128, torch.float16), (64, torch.bfloat16), (32, torch.float16)], ids=str
)
@pytest.mark.parametrize("sym", [True, False])
def test_merged_layer_computes_with_the_published_values(
    layout: str, group_size: int, dtype: torch.dtype, sym: bool
) -> None:
    """384 columns are no whole number of chunks of 256."""
    layer = ColumnParallelLinear(384, 40, 24, 24)
    layer.quantize(int4_method(stored(layout, group_size, dtype)))
    dense = []
    for index, size in enumerate((40, 24, 24)):
        tensors, values = int4_matrix(layout, size, 384, group_size, seed=index, sym=sym, dtype=dtype)
        load(layer.tensors(index), tensors)
        dense.append(values)
    hidden, norm = torch.randn(5, 384), Norm(torch.rand(384), 1e-6)
    assert_close(layer(hidden), hidden @ torch.cat(dense).T)
    assert_close(layer(hidden, norm), rms_norm(hidden, *norm) @ torch.cat(dense).T)


@LAYOUTS
def test_rows_are_loaded_in_the_order_that_a_layer_asks_for(layout: str) -> None:
    """Also from one tensor that merges several matrices."""
    tensors, dense = int4_matrix(layout, 48, 256, 128)
    order, hidden = torch.randperm(48), torch.randn(3, 256)
    layer = ColumnParallelLinear(256, 48)
    layer.quantize(int4_method(stored(layout)))
    load(layer.tensors(0, order), tensors)
    assert_close(layer(hidden), hidden @ dense[order].T)
    for group in RANKS:
        merged = ColumnParallelLinear(256, 32, 16)
        merged.shard(group.shard(32, "rows"), group.shard(16, "rows"))
        merged.quantize(int4_method(stored(layout)))
        load(merged.tensors(0, stop=2), tensors)
        rows = torch.cat([dense[:32].chunk(2)[group.rank], dense[32:].chunk(2)[group.rank]])
        assert_close(merged(hidden), hidden @ rows.T)


def quantized_and_sharded(layer: LinearBase, layout: str, group: TensorParallelGroup) -> None:
    layer.quantize(int4_method(stored(layout)))
    if isinstance(layer, RowParallelLinear):
        layer.shard(group.shard(512, "columns"), group)
    elif isinstance(layer, ColumnParallelLinear):
        layer.shard(group.shard(48, "rows"))


@LAYOUTS
def test_shards_end_where_groups_and_words_end(layout: str) -> None:
    tensors, dense = int4_matrix(layout, 48, 512, 128)
    hidden = torch.randn(3, 512)
    sums, rows, logits = [], [], []
    for group, columns in zip(RANKS, hidden.chunk(2, 1), strict=True):
        row_parallel, column_parallel = RowParallelLinear(512, 48), ColumnParallelLinear(512, 48)
        for layer in (row_parallel, column_parallel):
            quantized_and_sharded(layer, layout, group)
            load(layer.tensors(0), tensors)
        head = ParallelLMHead(48, 512)
        head.shard(group)
        head.quantize(int4_method(stored(layout)))
        load(head.tensors(), tensors)
        sums.append(row_parallel.weight.matmul(columns.contiguous()))
        rows.append(column_parallel(hidden))
        logits.append(head.logits(hidden))
    for found in (sums[0] + sums[1], torch.cat(rows, 1), torch.cat(logits, 1)):
        assert_close(found, hidden @ dense.T)


def test_a_shard_within_a_group_or_a_word_is_refused() -> None:
    group = TensorParallelGroup(0, 4)
    row_parallel = RowParallelLinear(768, 16)
    row_parallel.shard(group.shard(768, "columns"), group)
    with pytest.raises(ConfigError, match=r"size 4 cuts 768 columns .* blocks of 128$"):
        row_parallel.quantize(int4_method(stored("awq")))
    column_parallel = ColumnParallelLinear(256, 48)
    column_parallel.quantize(int4_method(stored("awq")))
    column_parallel.shard(group.shard(48, "rows"))
    with pytest.raises(ConfigError, match=r"size 4 cuts 48 outputs .* words of 8$"):
        column_parallel.tensors(0)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_inputs_in_activation_order_are_gathered(layout: str) -> None:
    tensors, dense = int4_matrix(layout, 32, 512, 128, order_seed=3)
    group_index = tensors["g_idx"].numpy().tobytes()
    layer = ColumnParallelLinear(512, 32)
    layer.quantize(int4_method(stored(layout, group_index=group_index)))
    load(layer.tensors(0), tensors)
    hidden, norm = torch.randn(5, 512), Norm(torch.rand(512), 1e-6)
    assert_close(layer(hidden), hidden @ dense.T)
    assert_close(layer(hidden, norm), rms_norm(hidden, *norm) @ dense.T)
    gate, up = (hidden @ dense.T).chunk(2, 1)
    assert_close(layer.silu_and_mul(hidden), torch.nn.functional.silu(gate) * up)
    sharded = RowParallelLinear(512, 32)
    sharded.shard(RANKS[0].shard(512, "columns"), RANKS[0])
    with pytest.raises(ConfigError, match=r"size 2 cuts 512 columns .* activation order"):
        sharded.quantize(int4_method(stored(layout, group_index=group_index)))
    with pytest.raises(ConfigError, match="experts with inputs in activation order"):
        Int4Experts(stored(layout, group_index=group_index), 2, 512, 512, range(512))


@LAYOUTS
def test_experts_compute_with_the_published_values(layout: str) -> None:
    torch.manual_seed(1)
    count, size, width = 4, 256, 512
    shapes = {"gate": (width, size), "up": (width, size), "down": (size, width)}
    matrices = {
        (expert, name): int4_matrix(layout, *shape, 128, seed=4 * expert + len(name))
        for expert in range(count)
        for name, shape in shapes.items()
    }
    dense = DenseExperts(count, size, width, range(width))
    for expert in range(count):
        gate, up, down = (matrices[expert, name][1] for name in shapes)
        dense.gate_up_proj[expert].copy_(torch.cat([gate, up]))
        dense.down_proj[expert].copy_(down)
    hidden = torch.randn(7, size)
    routing = Routing(torch.stack([torch.randperm(count)[:2] for _ in range(7)]).int(), torch.rand(7, 2))
    shards = []
    for kept in (range(width), range(256), range(256, width)):
        method = int4_method(stored(layout))
        assert method.experts is not None
        experts = method.experts(count, size, width, kept)
        for expert in range(count):
            load(experts.gate_tensors(expert), matrices[expert, "gate"][0])
            load(experts.up_tensors(expert), matrices[expert, "up"][0])
            load(experts.down_tensors(expert), matrices[expert, "down"][0])
        assert experts.fused_gate_up_tensors(count) == experts.fused_down_tensors(count) == {}
        shards.append(experts.outputs(hidden, routing))
    expected = dense.outputs(hidden, routing)
    torch.testing.assert_close(shards[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shards[1] + shards[2], expected, rtol=1e-4, atol=1e-5)


def test_values_that_no_layer_can_take_are_refused() -> None:
    tensors, _ = int4_matrix("gptq", 16, 128, 128)
    layer = ColumnParallelLinear(128, 16)
    layer.quantize(int4_method(stored("gptq")._replace(has_bias=True)))
    loaders = layer.tensors(0)
    loaders["bias"].copy_(torch.zeros(16))
    with pytest.raises(ValueError, match="is not zero, and the model has no bias there"):
        loaders["bias"].copy_(torch.ones(16))
    tensors["scales"][0, 3] = torch.inf
    with pytest.raises(ValueError, match="has a scale that is not finite"):
        loaders["scales"].copy_(tensors["scales"])


def test_a_weight_takes_its_bits() -> None:
    weight = Int4Weight(stored("awq"), (512, 512), 1024)
    assert sum(each.nbytes for each in weight.parameters()) == 1024 * 1024 * 4.25 / 8


def test_fixtures_are_what_autoawq_packs() -> None:
    gemm = pytest.importorskip("awq.modules.linear.gemm", reason="autoawq is not installed")
    numbers = random_numbers("awq", 64, 256, 128)  # in whole 32s of outputs
    linear = torch.nn.Linear(256, 64, bias=False)
    linear.weight.data = numbers.dense()
    scales, zeros = numbers.scales.T.contiguous(), torch.from_numpy(numbers.zeros.T.copy())
    found = gemm.WQLinear_GEMM.from_linear(linear, 4, 128, scales=scales.float(), zeros=zeros.float())
    for end, tensor in packed("awq", numbers).items():
        assert torch.equal(getattr(found, end).cpu(), tensor), end


@pytest.mark.parametrize("order_seed", [None, 3])
def test_fixtures_are_what_auto_gptq_packs(order_seed: int | None) -> None:
    qlinear = pytest.importorskip("auto_gptq.nn_modules.qlinear.qlinear_cuda", reason="auto-gptq is not installed")
    numbers = random_numbers("gptq", 64, 256, 128, order_seed=order_seed)
    numbers.zeros[:] = numbers.zeros.clip(1, 15)  # its packing overflows for 16
    linear = torch.nn.Linear(256, 64, bias=False)
    linear.weight.data = numbers.dense()
    found = qlinear.QuantLinear(4, 128, 256, 64, bias=False)
    found.pack(
        linear, numbers.scales.float(), torch.from_numpy(numbers.zeros).float(), torch.from_numpy(numbers.group_of)
    )
    for end, tensor in packed("gptq", numbers).items():
        assert torch.equal(getattr(found, end).to(tensor.dtype), tensor), end


@pytest.mark.parametrize("trap", ["nibble order", "zero minus one", "g_idx", "group off by one"])
def test_every_trap_is_seen(trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that falls into a trap computes something else than the published values."""
    layout = {"nibble order": "awq", "group off by one": "awq"}.get(trap, "gptq")
    tensors, dense = int4_matrix(layout, 32, 512, 128, order_seed=3 if trap == "g_idx" else None)
    given = stored(layout)
    if trap == "nibble order":
        monkeypatch.setattr(int4_weights, "_AWQ_ORDER", tuple(range(8)))
    elif trap == "zero minus one":
        given = stored("gptq_v2")
    elif trap == "group off by one":
        tensors["scales"] = tensors["scales"].roll(1, 0)
    layer = ColumnParallelLinear(512, 32)
    layer.quantize(int4_method(given))
    load(layer.tensors(0), tensors)
    hidden = torch.randn(5, 512)
    error = layer(hidden) - hidden @ dense.T
    assert error.norm() > 0.05 * (hidden @ dense.T).norm()
