"""The mixed-input GEMM with wgmma: selection, compilation, and on a GPU its results against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compile_tools import check_compiles
from test_ggml import random_weight
from test_ggml_skinny_gemm import COMMON_TYPES, TYPES
from test_ggml_skinny_gemm import FORMATS as GPU_FORMATS

from meltcore.kernels.quant import ggml_wgmma_gemm as wgmma
from meltcore.kernels.quant.ggml import BlockType, GgmlTensor, dequantize_reference, empty
from meltcore.kernels.quant.ggml_linear import ggml_linear
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.ggml_wgmma_gemm import WgmmaConfig, ggml_wgmma_gemm, grid_size, select_config

FORMATS = pytest.mark.parametrize("block_type", TYPES, ids=lambda each: each.name)
# How a pair is rounded to float16 has nothing to do with how it was decoded, so a few formats show it.
FORMATS_AND_DTYPES = pytest.mark.parametrize(
    ("block_type", "dtype"),
    [
        *((each, torch.bfloat16) for each in COMMON_TYPES),
        *(pytest.param(each, torch.bfloat16, marks=pytest.mark.slow) for each in TYPES if each not in COMMON_TYPES),
        *(pytest.param(each, torch.float16, marks=pytest.mark.slow) for each in COMMON_TYPES[1:]),
    ],
    ids=lambda each: str(each)[6:] if isinstance(each, torch.dtype) else each.name,
)


def check_format(block_type: BlockType, tokens: int, groups: int, dtype: torch.dtype) -> None:
    macros = dict(WgmmaConfig.of(tokens, groups, block_type).macros(block_type, dtype))
    check_compiles(wgmma.KERNEL, macros, "90a", to_ptx=block_type != GgmlType.Q4_K or tokens > 64)


@pytest.mark.slow
@FORMATS
def test_compiles(block_type: BlockType) -> None:
    """With small tiles: one of 256 tokens compiles ten times as long, and decodes weights as the others do."""
    check_format(block_type, 16, 2, torch.bfloat16)
    check_format(block_type, 32, 3, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", wgmma.TOKEN_TILES)
def test_every_tile_compiles(tokens: int) -> None:
    check_format(GgmlType.Q4_K, tokens, 2, torch.bfloat16)


@FORMATS
def test_every_number_of_tokens_has_a_tile_and_stages(block_type: BlockType) -> None:
    for tokens in (1, 16, 17, 64, 65, 128, 129, 256, 512, 1000):
        for rows, columns in ((43008, 5376), (5376, 21504), (4096, 4096), (112, 512)):
            config = select_config(tokens, rows, columns, block_type, 132)
            assert config.tokens in wgmma.TOKEN_TILES
            halved = tokens == 256 and rows == 4096
            assert -(-tokens // config.tokens) == -(-tokens // 256) * (2 if halved else 1)
            assert config.weight_stages >= 2
            assert config.token_stages >= 3


@pytest.mark.parametrize(
    ("rows", "columns", "block_type", "groups"),
    [
        (24576, 4096, GgmlType.Q4_0, 3),  # 128 tiles of 192 rows, one for nearly every SM
        (28672, 4096, GgmlType.Q4_0, 2),  # 150
        (43008, 5376, GgmlType.Q4_0, 3),
        (16384, 4096, GgmlType.Q6_K, 3),
        (4096, 4096, GgmlType.Q6_K, 2),
    ],
)
def test_a_third_warp_group_multiplies_large_weights(
    rows: int, columns: int, block_type: BlockType, groups: int
) -> None:
    assert select_config(64, rows, columns, block_type, 132).warp_groups == groups
    assert select_config(200, rows, columns, block_type, 132).warp_groups == 2


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (4096, 96, (96, 2)),
        (4096, 192, (192, 2)),
        (4096, 256, (128, 2)),
        (4096, 257, (192, 2)),
        (6144, 200, (128, 3)),
        (8192, 256, (256, 2)),
        (5376, 256, (256, 2)),
    ],
)
def test_small_weights_have_two_tiles_of_tokens(rows: int, tokens: int, expected: tuple[int, int]) -> None:
    """Where four blocks for each tile of rows fill the SMs: a tile of the product has two parts instead of four."""
    config = select_config(tokens, rows, 4096, GgmlType.Q4_0, 132)
    assert (config.tokens, config.warp_groups) == expected


@pytest.mark.parametrize(
    ("tiles", "chunks", "tokens", "expected"),
    [
        *((64, 21, 64, 128), (42, 84, 128, 126), (336, 21, 64, 132), (96, 16, 64, 132), (66, 1, 16, 66)),
        *((1, 2, 64, 2), (1, 500, 16, 89), (5, 16, 256, 20), (16, 4, 16, 64), (48, 9, 256, 132), (100, 4, 256, 132)),
    ],
)
def test_blocks_have_equal_runs(tiles: int, chunks: int, tokens: int, expected: int) -> None:
    grid = grid_size(tiles, chunks, tokens, 132)
    assert grid == expected
    runs = {(block + 1) * tiles * chunks // grid - block * tiles * chunks // grid for block in range(grid)}
    assert max(runs) - min(runs) <= 1
    assert min(runs) >= 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"tokens": 16}, False),
        ({"tokens": 192}, True),
        ({"tokens": 193}, False),
        ({"tokens": 256, "rows": 6144}, True),
        ({"tokens": 257, "rows": 6144}, False),
        ({"tokens": 512, "rows": 8192}, True),
        ({"tokens": 513, "rows": 8192}, False),
        ({"tokens": 64, "rows": 4080}, True),
        ({"tokens": 65, "rows": 4080}, False),
        ({"rows": 2048}, True),
        ({"rows": 2032}, False),
        ({"tokens": 16, "block_type": GgmlType.Q4_K}, False),
        ({"tokens": 9, "rows": 16384, "block_type": GgmlType.Q4_K}, True),
        ({"tokens": 16, "rows": 16384, "block_type": GgmlType.Q6_K}, False),
        ({"tokens": 9, "rows": 16384}, False),
        ({"rows": 4104}, False),
        ({"dtype": torch.float32}, False),
        ({"block_type": GgmlType.Q2_K}, False),
        ({"block_type": GgmlType.Q4_1}, True),
        ({"capability": 80}, False),
        ({"capability": 100}, False),
    ],
    ids=str,
)
def test_is_faster(changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 17 tokens on, large weights with minima from 9 on; up to more tokens the more values a weight has."""
    given: dict[str, Any] = {
        "rows": 4096,
        "tokens": 17,
        "dtype": torch.bfloat16,
        "capability": 90,
        "block_type": GgmlType.Q4_0,
    } | changes
    monkeypatch.setattr(wgmma, "capability", lambda _: given["capability"])
    hidden: Any = SimpleNamespace(
        is_cuda=True,
        device=None,
        shape=(given["tokens"], 4096),
        dtype=given["dtype"],
        is_contiguous=lambda: True,
    )
    assert wgmma.is_faster(hidden, empty(given["block_type"], (given["rows"], 4096))) == expected


def on_gpu(rows: int, columns: int, block_type: BlockType) -> GgmlTensor:
    weight = random_weight(rows, rows, columns, block_type)
    return GgmlTensor(block_type, columns, *(array.cuda() for array in weight.arrays))


def assert_computes_the_reference(
    weight: GgmlTensor, tokens: int, dtype: torch.dtype, config: WgmmaConfig | None
) -> None:
    """Decoded weights are rounded once, sums are float32, and the output is rounded. Repeats have the same bits."""
    rows = len(weight.values)
    dense = dequantize_reference(weight).to(dtype).double()
    hidden = torch.randn(tokens, weight.columns, device="cuda").to(dtype)
    product = hidden.double() @ dense.T
    gate, up = product.chunk(2, -1)
    for gated, exact in ((False, product), (True, torch.nn.functional.silu(gate) * up)):
        added = torch.randn(tokens, rows // 2 if gated else rows, device="cuda").to(dtype)
        poison = torch.full_like(added, float("nan"))
        for residual in (None, added):
            expected = exact if residual is None else exact + residual.double()
            out, again = (
                ggml_wgmma_gemm(
                    hidden,
                    weight,
                    gated=gated,
                    residual=None if residual is None else residual.clone(),
                    out=poison.clone() if residual is None else None,
                    config=config,
                )
                for _ in range(2)
            )
            assert torch.equal(out, again)
            torch.testing.assert_close(
                out.double(),
                expected,
                rtol=1.01 * torch.finfo(dtype).eps / 2,
                atol=2e-5 * float(expected.abs().amax()),
            )
            if residual is None:
                sums = torch.full_like(added, float("nan"), dtype=torch.float32)
                ggml_wgmma_gemm(hidden, weight, gated=gated, out=sums, config=config)
                assert torch.equal(sums.to(dtype), out)


def need_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")


@pytest.mark.gpu
@FORMATS_AND_DTYPES
@pytest.mark.parametrize("groups", [2, 3])
def test_multiplies_as_in_float64(block_type: BlockType, dtype: torch.dtype, groups: int) -> None:
    """Rows, columns and tokens that are no multiple of a tile, a chunk or a copy."""
    need_hopper()
    for rows, k in ((96, 512), (400, 1280), (48, 5376), (272, 672)):
        columns = k // block_type.block_size * block_type.block_size
        weight = on_gpu(rows, columns, block_type)
        for tile, tokens in [((16, 5), (64, 50), (192, 150), (256, 300)), ((32, 32), (96, 90), (128, 300))][groups % 2]:
            assert_computes_the_reference(weight, tokens, dtype, WgmmaConfig.of(tile, groups, block_type))


@pytest.mark.gpu
@GPU_FORMATS
@pytest.mark.parametrize("tokens", [33, 100, 200, 500])
def test_selects_tiles_that_multiply_as_in_float64(block_type: BlockType, tokens: int) -> None:
    """At sizes whose tiles are cut between many blocks."""
    need_hopper()
    for rows, columns in ((4096, 4096), (5376, 2048), (34048, 1024)):
        assert_computes_the_reference(on_gpu(rows, columns, block_type), tokens, torch.bfloat16, None)


@pytest.mark.gpu
def test_rows_of_the_output_may_be_strided() -> None:
    need_hopper()
    weight = on_gpu(96, 512, GgmlType.Q4_0)
    hidden = torch.randn(40, 512, device="cuda").bfloat16()
    wide = torch.zeros(40, 128, device="cuda", dtype=torch.bfloat16)
    ggml_wgmma_gemm(hidden, weight, out=wide[:, 16:112])
    assert torch.equal(wide[:, 16:112], ggml_wgmma_gemm(hidden, weight))
    assert not wide[:, :16].any()
    assert not wide[:, 112:].any()


@pytest.mark.gpu
def test_a_linear_layer_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But neither for fewer tokens nor for more."""
    need_hopper()
    weight, launched = on_gpu(4096, 4096, GgmlType.Q8_0), []
    monkeypatch.setattr(wgmma.KERNEL, "launch", lambda *_, **__: launched.append(1))
    for count in (8, 17, 300):
        ggml_linear(torch.randn(count, 4096, device="cuda").bfloat16(), weight)
    assert len(launched) == 1
