"""FP8 with scales per block: quantization, and every kernel, against float64 on the dequantized numbers."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton
from test_fp8_linear import conversions_of_fp8
from test_linear import assert_near, assert_rounded_once, moved, random_norm

from meltcore.kernels.fp8.block_fp8 import (
    BLOCK,
    BlockFp8Tensor,
    num_blocks,
    quantize_blocks,
    quantize_blocks_reference,
    quantize_tokens,
)
from meltcore.kernels.fp8.block_fp8_experts import (
    add_block_fp8_experts,
    block_fp8_expert_outputs,
    block_fp8_expert_outputs_reference,
    block_fp8_grouped_gemm,
)
from meltcore.kernels.fp8.block_fp8_experts import select_config as select_experts_config
from meltcore.kernels.fp8.block_fp8_gemm import block_fp8_gemm, select_config
from meltcore.kernels.fp8.block_fp8_linear import block_fp8_linear
from meltcore.kernels.fp8.fp8 import FP8, FP8_MAX
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.moe.grouped_gemm import Dispatch, Mode
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.norm import Norm

assert conversions_of_fp8  # a fixture that every test here uses
BF16 = torch.bfloat16


def random_weight(rows: int, columns: int, row_group: int, column_blocks: int, *leading: int) -> BlockFp8Tensor:
    """Blocks differ in size, so that a wrong scale shows; a product with random tokens is of about unit variance."""
    values = torch.randn(*leading, rows, columns).mul_(64).to(FP8)
    scales = torch.randint(-1, 2, (*leading, rows // row_group, column_blocks)).float().exp2() / 64 * columns**-0.5
    return BlockFp8Tensor(values, scales * (1 + 0.1 * torch.rand_like(scales)))


def there(weight: BlockFp8Tensor, device: torch.device) -> BlockFp8Tensor:
    return BlockFp8Tensor(weight.values.to(device), weight.scales.to(device))


def exact(hidden: torch.Tensor, weight: BlockFp8Tensor, norm: Norm | None = None) -> torch.Tensor:
    """In float64, of the dequantized numbers."""
    return quantize_tokens(hidden, weight, norm).dequantize().double() @ weight.dequantize().double().T


def exact_gated(hidden: torch.Tensor, weight: BlockFp8Tensor, norm: Norm | None = None) -> torch.Tensor:
    gate, up = exact(hidden, weight, norm).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def test_every_block_uses_the_whole_range() -> None:
    """Blocks of a row have their own scales, the last one may be narrower, and one of zeros stays one."""
    torch.manual_seed(0)
    rows = torch.randn(4, 300) * torch.tensor([1e-4, 1.0, 100.0]).repeat_interleave(BLOCK)[:300]
    rows[2, :BLOCK] = 0.0
    values, scales = quantize_blocks_reference(rows)
    assert (values.dtype, scales.shape) == (FP8, (4, 3))
    amax = torch.stack([part.float().abs().amax(1) for part in values.split(BLOCK, 1)], 1)
    assert amax.flatten().tolist() == [FP8_MAX] * 6 + [0.0] + [FP8_MAX] * 5
    back = BlockFp8Tensor(values, scales).dequantize()
    allowed = rows.abs() * 2.0**-4 + scales.repeat_interleave(BLOCK, 1)[:, :300] * 2.0**-10
    assert ((back - rows).abs() <= allowed * 1.0001).all()


@pytest.mark.parametrize("columns", [64, 300, 1152])
def test_both_implementations_quantize_to_the_same_values(columns: int, device: torch.device) -> None:
    torch.manual_seed(1)
    hidden, norm = torch.randn(5, columns).to(BF16), random_norm(columns, BF16)
    for given in (None, norm):
        expected = quantize_blocks_reference(hidden, given)
        found = in_triton(quantize_blocks)(hidden.to(device), moved(given, device))
        torch.testing.assert_close(found.scales.cpu(), expected.scales, rtol=1e-6, atol=0)
        assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
    assert in_triton(quantize_blocks)(hidden[:0].to(device)).values.shape == (0, columns)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "row_group", "config"),
    [
        (1, 128, 384, 128, GemmConfig(16, 64, BLOCK, 2, split_k=3)),
        (5, 96, 256, 32, GemmConfig(16, 64, BLOCK, 2)),
        (16, 48, 200, 16, GemmConfig(16, 32, BLOCK, 2, split_k=2)),
        (70, 64, 256, 64, GemmConfig(64, 32, BLOCK, 2)),
    ],
    ids=str,
)
def test_gemm_applies_the_scales_of_every_block(
    tokens: int,
    rows: int,
    columns: int,
    row_group: int,
    config: GemmConfig,
    device: torch.device,
) -> None:
    """With splits, cut-off blocks, either side of a tile first, one group of rows per tile and several."""
    torch.manual_seed(tokens)
    weight, hidden = random_weight(rows, columns, row_group, num_blocks(columns)), torch.randn(tokens, columns).to(BF16)
    expected, on_device = exact(hidden, weight), there(weight, device)
    given = there(quantize_blocks_reference(hidden), device)
    kept = torch.full((tokens, rows + 9), 7.0, dtype=BF16, device=device)
    out = kept[:, 4 : rows + 4]
    assert block_fp8_gemm(given, on_device, out, config=config) is out
    assert_rounded_once(out, expected, BF16)
    assert (kept[:, :4] == 7.0).all()
    assert (kept[:, rows + 4 :] == 7.0).all()
    before = torch.randn(tokens, rows).to(BF16)
    residual = before.to(device, copy=True)
    block_fp8_gemm(given, on_device, residual, has_residual=True, config=config)
    assert_rounded_once(residual, before.double() + expected, BF16)


@pytest.mark.parametrize(
    ("rows", "columns", "row_group"), [(256, 300, 128), (128, 100, 64), (192, 256, 64), (128, 256, 16)], ids=str
)
def test_gate_and_up_rows_have_scales_of_their_own(
    rows: int, columns: int, row_group: int, device: torch.device
) -> None:
    """Of one block of columns and several; a tile lies in a block of rows, or has rows of several blocks."""
    torch.manual_seed(rows)
    weight, hidden = random_weight(rows, columns, row_group, num_blocks(columns)), torch.randn(5, columns).to(BF16)
    given, out = there(quantize_blocks_reference(hidden), device), torch.empty(5, rows // 2, dtype=BF16, device=device)
    block_fp8_gemm(given, there(weight, device), out, gated=True, config=GemmConfig(16, 64, BLOCK, 2))
    assert_near(out, exact_gated(hidden, weight), BF16, 8)


@pytest.mark.parametrize(
    ("tokens", "merged", "added"),
    [
        (4, (16, 64, 128, 8, 4, 1), (16, 64, 128, 8, 4, 4)),
        (16, (16, 64, 128, 8, 4, 1), (16, 64, 128, 8, 4, 4)),
        (32, (32, 64, 128, 6, 4, 3), (16, 64, 128, 6, 4, 4)),
        (64, (64, 128, 128, 5, 4, 3), (32, 128, 128, 3, 4, 6)),
        (128, (128, 64, 128, 5, 8, 1), (128, 64, 128, 5, 8, 4)),
    ],
)
def test_tiles_of_few_tokens_are_those_measured(tokens: int, merged: tuple[int, ...], added: tuple[int, ...]) -> None:
    """On an H200; on a GPU with less shared memory a program has fewer stages."""
    assert select_config(32, 4096, 4096, 132, 227 * 1024).block_m == 32  # tiles of 16 tokens took 7 % longer
    for (rows, columns), expected in (((5120, 2048), merged), ((2048, 4096), added)):
        assert select_config(tokens, rows, columns, 132, 227 * 1024) == expected
        block_m, block_n, block_k, stages, *_ = select_config(tokens, rows, columns, 142, 99 * 1024)
        assert 3 <= stages <= expected[3]
        assert stages * (block_m + block_n) * block_k < 99 * 1024


@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.parametrize("column_blocks", [2, 1], ids=["block", "channel"])
def test_linear_fuses_norm_and_activation_for_every_number_of_tokens(
    tokens: int, column_blocks: int, device: torch.device
) -> None:
    torch.manual_seed(tokens)
    rows, columns = 2 * 64, 256
    weight = random_weight(rows, columns, 64 if column_blocks > 1 else 1, column_blocks)
    hidden, norm, before = torch.randn(tokens, columns).to(BF16), random_norm(columns, BF16), torch.randn(tokens, rows)
    for function in (in_triton(block_fp8_linear), block_fp8_linear):
        given = hidden.to(device), there(weight, device)
        assert_near(function(*given, moved(norm, device), gated=True), exact_gated(hidden, weight, norm), BF16, 8)
        residual = before.to(device, BF16, copy=True)
        assert function(*given, residual=residual) is residual
        assert_near(residual, before.to(BF16).double() + exact(hidden, weight), BF16, 8)
        out = torch.empty(tokens, rows, dtype=BF16, device=device)
        assert function(*given, out=out) is out
        assert_near(out, exact(hidden, weight), BF16, 8)
    assert in_triton(block_fp8_linear)(hidden[:0].to(device), there(weight, device)).shape == (0, rows)


def exact_experts(inputs: torch.Tensor, ids: torch.Tensor, weight: BlockFp8Tensor, per_token: int) -> torch.Tensor:
    """The product of each pair with its expert's dequantized weight, in float64."""
    tokens = quantize_tokens(inputs, weight).dequantize().double().repeat_interleave(per_token, 0)
    return torch.einsum("ph,prh->pr", tokens, weight.dequantize().double()[ids.flatten().long()])


@pytest.mark.slow
@pytest.mark.parametrize("column_blocks", [2, 1], ids=["block", "channel"])
@pytest.mark.parametrize(("tokens", "mode"), [(2, "gemv"), (9, "indirect"), (30, "grouped")])
def test_grouped_gemm_multiplies_each_pair_by_its_expert(
    tokens: int, mode: Mode, column_blocks: int, device: torch.device
) -> None:
    torch.manual_seed(tokens)
    experts, size, width, is_blocked = 3, 256, 192, column_blocks > 1
    hidden = torch.randn(tokens, size).to(BF16)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).int()
    gate_up = random_weight(2 * width, size, 64 if is_blocked else 1, column_blocks, experts)
    down = random_weight(size, width, 128 if is_blocked else 1, column_blocks, experts)
    dispatch, config = Dispatch.of(ids.to(device), down.values, 16, mode), GemmConfig(16, 64, BLOCK, 2)
    gemm = in_triton(block_fp8_grouped_gemm)
    activated = torch.empty(2 * tokens, width, dtype=BF16, device=device)
    outputs = torch.empty(2 * tokens, size, dtype=BF16, device=device)
    inputs = there(quantize_tokens(hidden, gate_up), device)
    gemm(inputs, there(gate_up, device), activated, dispatch, config, from_tokens=True)
    gate, up = exact_experts(hidden, ids, gate_up, 2).chunk(2, -1)
    assert_near(activated, torch.nn.functional.silu(gate) * up, BF16, 8)
    quantized = there(quantize_tokens(activated.cpu(), down), device)
    gemm(quantized, there(down, device), outputs, dispatch, config, from_tokens=False)
    assert_rounded_once(outputs, exact_experts(activated.cpu(), ids, down, 1), BF16)


def test_gate_and_up_of_few_pairs_have_another_stage() -> None:
    weight = BlockFp8Tensor(torch.empty(128, 128, 128, dtype=FP8, device="meta"), torch.empty(128, 1, 1, device="meta"))
    for pairs, stages in ((16, (4, 3)), (64, (4, 3)), (65, (3, 3)), (128, (3, 3))):
        found = [select_experts_config(pairs, weight, from_tokens=from_tokens) for from_tokens in (True, False)]
        assert tuple(config.num_stages for config in found) == stages
        assert found[0].block_m == found[1].block_m == 16


@pytest.mark.parametrize("tokens", [3, 20])
def test_expert_outputs_in_triton_match_the_reference(tokens: int, device: torch.device) -> None:
    torch.manual_seed(3)
    hidden, ids = torch.randn(tokens, 256).to(BF16), torch.stack([torch.randperm(2) for _ in range(tokens)]).int()
    routing = Routing(ids.to(device), torch.rand(tokens, 2, device=device))
    gate_up, down = random_weight(256, 256, 128, 2, 2), random_weight(256, 128, 128, 1, 2)
    given = hidden.to(device), routing, there(gate_up, device), there(down, device)
    expected = block_fp8_expert_outputs_reference(*given).double().cpu()
    assert_near(in_triton(block_fp8_expert_outputs)(*given), expected, BF16, 40)
    nothing = Routing(routing.topk_ids[:0], routing.topk_weights[:0])
    assert in_triton(block_fp8_expert_outputs)(given[0][:0], nothing, *given[2:]).shape == (0, 256)


def test_inputs_are_quantized_in_blocks_of_columns(device: torch.device) -> None:
    """A large input makes its own block coarse, and no other one."""
    torch.manual_seed(5)
    weight = there(random_weight(64, 256, 64, 2), device)
    hidden = torch.randn(3, 256).to(device, BF16)
    hidden[:, 200] = 3e4
    result = in_triton(block_fp8_linear)(hidden, weight)
    own = weight.dequantize()[:, 200] * 3e4
    rest = (hidden.float() @ weight.dequantize().T) - own
    first = hidden[:, :BLOCK].float() @ weight.dequantize()[:, :BLOCK].T
    assert (rest - first).abs().max() > 0.1  # what the coarse block loses
    torch.testing.assert_close(result.float(), (own + first).to(result.dtype).float(), rtol=0.02, atol=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns", "row_group"), [(256, 512, 128), (192, 2048, 64), (2048, 4096, 128)])
def test_a_token_has_the_values_of_the_other_kernels(
    rows: int, columns: int, row_group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token is quantized in the kernel, with and without a norm, to the values that many tokens are."""
    device = torch.device("cuda")
    weight = there(random_weight(rows, columns, row_group, num_blocks(columns)), device)
    hidden, residual = torch.randn(1, columns, device=device).to(dtype), torch.randn(1, rows, device=device).to(dtype)
    norm = Norm(torch.randn(columns, device=device).to(dtype), 1e-6)
    monkeypatch.setattr("meltcore.kernels.fp8.block_fp8_linear.block_fp8_gemm", None)  # another kernel runs
    for given in (None, norm):
        total, gated = exact(hidden, weight, given), exact_gated(hidden, weight, given)
        for result, expected in (
            (block_fp8_linear(hidden, weight, given), total),
            (block_fp8_linear(hidden, weight, given, gated=True), gated),
            (block_fp8_linear(hidden, weight, given, residual=residual.clone()), total + residual.double()),
        ):
            torch.testing.assert_close(
                result.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4 * float(expected.abs().amax())
            )


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [2, 8, 9])
def test_a_token_gets_the_weighted_sum_of_its_experts(top_k: int) -> None:
    device, experts, size, width = torch.device("cuda"), 12, 512, 384
    gate_up = there(random_weight(2 * width, size, 128, size // BLOCK, experts), device)
    down = there(random_weight(size, width, 128, width // BLOCK, experts), device)
    hidden, residual = (torch.randn(1, size, device=device).to(BF16) for _ in range(2))
    ids = torch.randperm(experts, device=device)[None, :top_k].int()
    routing = Routing(ids, torch.rand(1, top_k, device=device))
    outputs = block_fp8_expert_outputs_reference(hidden, routing, gate_up, down).double()
    expected = residual.double() + (outputs * routing.topk_weights[0, :, None]).sum(0)
    result = add_block_fp8_experts(residual.clone(), hidden, routing, gate_up, down)
    assert (result.double() - expected).norm() <= 8e-3 * expected.norm()
    alone = add_block_fp8_experts(None, hidden, routing, gate_up, down)
    assert (alone.double() - (expected - residual.double())).norm() <= 8e-3 * expected.norm()
