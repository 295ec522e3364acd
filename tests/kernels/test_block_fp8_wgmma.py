"""FP8 with scales of 128 x 128 blocks by warp groups: selection, compilation, and on a GPU its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_block_fp8 import exact, exact_gated, random_weight, there

from meltcore.kernels.fp8 import block_fp8_wgmma as wgmma
from meltcore.kernels.fp8.block_fp8 import BlockFp8Tensor, num_blocks, quantize_blocks
from meltcore.kernels.fp8.block_fp8_experts import block_fp8_expert_outputs, block_fp8_expert_outputs_reference
from meltcore.kernels.fp8.block_fp8_linear import block_fp8_linear
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.moe.grouped_gemm_wgmma import KERNEL, kernel_macros
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.norm import Norm
from meltcore.kernels.nvrtc import compile_source

BF16, GPU = torch.bfloat16, torch.device("cuda")


def need_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "macros",
    [
        kernel_macros(2048, 6, 8, gated=True, is_fp8=True),
        kernel_macros(768, 8, 1, gated=False, is_fp8=True),
        kernel_macros(4096, 96, 1, gated=True, is_fp8=True, is_dense=True),
        kernel_macros(4096, 8, 1, gated=False, is_fp8=True, is_dense=True, has_residual=True),
    ],
    ids=["gate_up", "down", "gated", "residual"],
)
def test_compiles(macros: tuple[tuple[str, int], ...]) -> None:
    assert compile_source(KERNEL.source(), KERNEL.name, dict(macros), "90a")


class Tokens(SimpleNamespace):
    """What the selection reads of tokens on a GPU."""

    def __len__(self) -> int:
        return int(self.shape[0])


def meta_weight(rows: int, columns: int, row_group: int = 128, column_blocks: int | None = None) -> BlockFp8Tensor:
    blocks = num_blocks(columns) if column_blocks is None else column_blocks
    scales = torch.empty(rows // row_group, blocks, device="meta")
    return BlockFp8Tensor(torch.empty(rows, columns, dtype=FP8, device="meta"), scales)


@pytest.mark.parametrize(
    ("changes", "capability", "expected"),
    [
        ({}, 90, True),
        ({"rows": 384}, 90, False),
        ({"columns": 2112}, 90, False),
        ({"row_group": 64}, 90, False),
        ({"column_blocks": 1}, 90, False),
        ({"dtype": torch.float16}, 90, False),
        ({"is_cuda": False}, 90, False),
        ({"tokens": 2**21 + 1}, 90, False),
        ({}, 80, False),
        ({}, 100, False),
    ],
    ids=str,
)
def test_supports(changes: dict[str, Any], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "capability", lambda _: capability)
    given: dict[str, Any] = {"rows": 512, "columns": 2048, "tokens": 8, "dtype": BF16, "is_cuda": True} | changes
    hidden: Any = Tokens(
        is_cuda=given["is_cuda"], device=None, dtype=given["dtype"], shape=(given["tokens"], given["columns"])
    )
    blocks = {key: given[key] for key in ("row_group", "column_blocks") if key in given}
    weight = meta_weight(given["rows"], given["columns"], **blocks)
    assert [wgmma.supports(hidden, weight, gated=gated) for gated in (False, True)] == [expected] * 2


@pytest.mark.parametrize(
    ("tokens", "rows", "stride", "expected"),
    [
        *((64, 24576, 64, False), (65, 24576, 64, True), (384, 5120, 64, False), (385, 5120, 64, True)),
        *((896, 2048, 64, False), (897, 2048, 64, True), (1024, 2048, 68, False)),
    ],
)
def test_is_faster_with_tiles_for_half_of_the_sms(
    tokens: int, rows: int, stride: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma, "capability", lambda _: 90)
    hidden: Any = Tokens(is_cuda=True, device=None, dtype=BF16, shape=(tokens, 2048))
    output = torch.empty(2, stride, dtype=BF16, device="meta")
    assert wgmma.is_faster(hidden, meta_weight(rows, 2048), output, gated=False) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(512, 128), (1280, 2048)])
@pytest.mark.parametrize("tokens", [1, 64, 65, 129, 1100])
def test_multiplies_as_in_float64(tokens: int, rows: int, columns: int) -> None:
    """With norm, SwiGLU, a residual, and rows of the output apart; more tiles of tokens than share their weights."""
    need_hopper()
    torch.manual_seed(tokens)
    weight = there(random_weight(rows, columns, 128, num_blocks(columns)), GPU)
    hidden, residual = torch.randn(tokens, columns, device=GPU).to(BF16), torch.randn(tokens, rows, device=GPU).to(BF16)
    norm = Norm(torch.randn(columns, device=GPU).to(BF16), 1e-6)
    quantized, kept = quantize_blocks(hidden, norm), torch.full((tokens, rows + 16), float("nan"), device=GPU).to(BF16)
    total, gated = exact(hidden, weight, norm), exact_gated(hidden, weight, norm)
    out, half = kept[:, 8 : rows + 8], torch.full((tokens, rows // 2), float("nan"), device=GPU).to(BF16)
    for output, is_gated, added, expected in (
        (out, False, False, total),
        (half, True, False, gated),
        (residual.clone(), False, True, total + residual.double()),
    ):
        assert wgmma.block_fp8_wgmma(quantized, weight, output, gated=is_gated, has_residual=added) is output
        # Sums of the tensor cores have 14 bits of a step's products.
        torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=2e-3 * float(expected.abs().amax()))
    assert kept[:, :8].isnan().all()
    assert kept[:, rows + 8 :].isnan().all()


def assert_computes_the_reference(topk_ids: torch.Tensor, experts: int, size: int, width: int) -> None:
    need_hopper()
    topk_ids = topk_ids.int().contiguous().to(GPU)
    hidden = torch.randn(len(topk_ids), size, device=GPU).to(BF16)
    gate_up = there(random_weight(2 * width, size, 128, num_blocks(size), experts), GPU)
    down = there(random_weight(size, width, 128, num_blocks(width), experts), GPU)
    # What the kernel does not write, and what it reads past an expert's last pair, is NaN.
    for numel in (topk_ids.numel() * size, (topk_ids.numel() + 128 * experts) * width):
        torch.full((numel,), float("nan"), dtype=BF16, device=GPU)
    outputs = [wgmma.expert_outputs(hidden, topk_ids, gate_up, down).float() for _ in range(2)]
    routing = Routing(topk_ids, topk_ids.float())
    expected = block_fp8_expert_outputs_reference(hidden, routing, gate_up, down).float()
    assert torch.equal(*outputs)
    # A value between two numbers of FP8 may be rounded to either, by errors before it.
    errors = (outputs[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.06
    assert errors.mean() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [1, 16, 17, 64, 65, 127, 128, 129, 193, 1000])
def test_computes_the_reference_of_one_expert(pairs: int) -> None:
    """With experts without pairs before and after it."""
    torch.manual_seed(pairs)
    assert_computes_the_reference(torch.full((pairs, 1), 3), 6, 512, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_computes_the_reference_of_random_routings(seed: int) -> None:
    torch.manual_seed(seed)
    skewed = torch.rand(700, 40) * torch.rand(40)
    topk_ids = skewed.topk(seed % 3 + 2).indices
    assert_computes_the_reference(topk_ids, 40, 256 * (1 + seed % 2), 128 * (1 + seed // 2))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 512, 4100])
def test_computes_the_reference_of_published_experts(tokens: int) -> None:
    torch.manual_seed(tokens)
    assert_computes_the_reference(torch.rand(tokens, 128).topk(8).indices, 128, 2048, 768)


@pytest.mark.gpu
def test_layers_choose_it_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    need_hopper()
    launched: list[int] = []
    monkeypatch.setattr(KERNEL, "launch", lambda *_, **__: launched.append(1))
    hidden, weight = torch.randn(1024, 512, device=GPU).to(BF16), there(random_weight(2048, 512, 128, 4), GPU)
    block_fp8_linear(hidden[:512], weight)
    assert launched == []
    block_fp8_linear(hidden, weight)
    assert len(launched) == 1
    gate_up, down = (there(random_weight(rows, 512, 128, 4, 8), GPU) for rows in (1024, 512))
    for tokens, count in ((191, 1), (192, 3)):
        topk_ids = torch.rand(tokens, 8, device=GPU).topk(2).indices.int()
        block_fp8_expert_outputs(hidden[:tokens], Routing(topk_ids, topk_ids.float()), gate_up, down)
        assert len(launched) == count
