"""The skinny GEMM in CUDA C++: compiled for each architecture; on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from compile_tools import check_compiles
from test_ggml import INT4_TYPES, random_weight

from meltcore.kernels.architectures import ARCHITECTURES, shared_kib
from meltcore.kernels.norm import Norm
from meltcore.kernels.quant.ggml import BlockType, GgmlTensor, dequantize_reference
from meltcore.kernels.quant.ggml_skinny_gemm import (
    DECODED_TYPES,
    KERNEL,
    MAX_TOKENS,
    MIN_CAPABILITY,
    SkinnyConfig,
    ggml_skinny_gemm,
    select_config,
    stages,
    supports,
)
from meltcore.kernels.quant.ggml_types import GgmlType

TYPES = [*DECODED_TYPES, *INT4_TYPES]
# Each case compiles kernels for some seconds, so all but four formats, float16, and what no engine selects are slow.
COMMON_TYPES = GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q6_K, INT4_TYPES[0]
GPU_TYPES = [each if each in COMMON_TYPES else pytest.param(each, marks=pytest.mark.slow) for each in TYPES]
FORMATS = pytest.mark.parametrize("block_type", GPU_TYPES, ids=lambda each: each.name)
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=lambda dtype: str(dtype)[6:],
)
SHAPES = [(43008, 5376), (5376, 21504), (6144, 4096), (100, 512)]
# Rows and columns, some of which are no multiple of a tile or a chunk.
GPU_SHAPES = [(96, 512), (160, 1280), (48, 5376), (80, 640)]
CONFIGS = [
    SkinnyConfig(1, 8, 3, 2, shared_tokens=False),
    SkinnyConfig(1, 4, 2, 2, shared_tokens=False, splits=2),
    SkinnyConfig(2, 1, 2, 2, shared_tokens=True, splits=3),
]


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each >= MIN_CAPABILITY])
def test_configurations_fit_into_shared_memory(architecture: int) -> None:
    limit, sms = 1024 * shared_kib(architecture), ARCHITECTURES[architecture].sms
    for block_type in TYPES:
        for rows, columns in SHAPES:
            for tokens in (1, 8, 9, 16, MAX_TOKENS):
                config = select_config(tokens, rows, columns, block_type, sms, limit)
                assert config.blocks_per_sm * config.shared_bytes(block_type) <= limit
                assert 8 * config.token_tiles >= tokens


@pytest.mark.parametrize(
    ("block_type", "rows", "columns", "expected"),
    [
        (GgmlType.Q4_0, 5376, 4096, (8, 3)),  # 336 tiles of rows: 2.5 for an SM
        (GgmlType.Q4_0, 5376, 21504, (12, 1)),  # whose token leaves no shared memory for a third block
        (GgmlType.Q8_0, 5376, 21504, (8, 2)),  # not measured
        (INT4_TYPES[0], 6144, 4096, (8, 3)),
        (INT4_TYPES[0], 4096, 12288, (8, 2)),  # 256 tiles
        (GgmlType.Q8_0, 2048, 4096, (16, 1)),
    ],
    ids=str,
)
def test_one_token_has_few_waves_of_blocks(
    block_type: BlockType, rows: int, columns: int, expected: tuple[int, int]
) -> None:
    config = select_config(1, rows, columns, block_type, 132, 1024 * shared_kib(90))
    assert (config.warps, config.blocks_per_sm) == expected
    assert config.staged_values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "block_type"),
    [(90, each) for each in TYPES] + [(each, some) for each in (80, 120) for some in (GgmlType.Q6_K, INT4_TYPES[2])],
)
def test_compiles(block_type: BlockType, architecture: int) -> None:
    """Every format in every type of tokens, by NVRTC, which needs no GPU."""
    limit = 1024 * shared_kib(architecture)
    for tokens, dtype, columns in ((1, torch.bfloat16, 4096), (12, torch.float16, 640)):
        config = select_config(tokens, 4096, columns, block_type, 132, limit)
        macros = dict(config.macros(block_type, columns, dtype, architecture >= 90))
        check_compiles(KERNEL, macros, architecture, to_ptx=block_type != GgmlType.Q6_K)


def test_supports_few_tokens_of_16_bit_types_on_cuda() -> None:
    weight = random_weight(1, 16, 512, GgmlType.Q8_0)
    assert not supports(torch.zeros(1, 512, dtype=torch.bfloat16), weight)


def expected(hidden: torch.Tensor, weight: GgmlTensor, gated: bool, residual: torch.Tensor | None) -> torch.Tensor:
    product = hidden.double() @ dequantize_reference(weight).double().T
    if gated:
        gate, up = product.chunk(2, -1)
        product = torch.nn.functional.silu(gate) * up
    return product if residual is None else product + residual.double()


@pytest.mark.gpu
@FORMATS
@DTYPES
@pytest.mark.parametrize("config", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS)])
def test_multiplies_as_in_float64(block_type: BlockType, dtype: torch.dtype, config: SkinnyConfig | None) -> None:
    """Weights are exact and sums float32, so that only the output is rounded."""
    for rows, k in GPU_SHAPES:
        columns = k // block_type.block_size * block_type.block_size
        weight = random_weight(rows, rows, columns, block_type)
        weight = GgmlTensor(block_type, columns, *(array.cuda() for array in weight.arrays))
        for tokens in (1, 5, 8, 9, 16, 32):
            if config is not None and tokens > 8 * config.token_tiles:
                continue
            hidden = torch.randn(tokens, columns, device="cuda").to(dtype)
            for gated in (False, True):
                outputs = rows // 2 if gated else rows
                added = torch.randn(tokens, outputs, device="cuda").to(dtype)
                for residual in (None, added):
                    exact = expected(hidden, weight, gated, residual)
                    out = ggml_skinny_gemm(
                        hidden, weight, gated=gated, residual=None if residual is None else added.clone(), config=config
                    )
                    again = ggml_skinny_gemm(
                        hidden, weight, gated=gated, residual=None if residual is None else added.clone(), config=config
                    )
                    assert torch.equal(out, again)
                    step = torch.finfo(dtype).eps / 2
                    sum_error = 2e-5 * float(exact.abs().amax())
                    torch.testing.assert_close(out.double(), exact, rtol=1.01 * step, atol=sum_error)
                    if residual is None:
                        sums = torch.full((tokens, outputs), float("nan"), device="cuda")
                        ggml_skinny_gemm(hidden, weight, gated=gated, out=sums, config=config)
                        torch.testing.assert_close(sums.double(), exact, rtol=0, atol=sum_error)
                        assert torch.equal(sums.to(dtype), out)


@pytest.mark.gpu
@FORMATS
def test_normalizes_a_token(block_type: BlockType) -> None:
    """The token is rounded once more than sums are: after it was multiplied by the norm's weight."""
    device = torch.device("cuda")
    for rows, k in GPU_SHAPES:
        columns = k // block_type.block_size * block_type.block_size
        weight = random_weight(rows, rows, columns, block_type)
        weight = GgmlTensor(block_type, columns, *(array.cuda() for array in weight.arrays))
        hidden, residual = (torch.randn(1, size, device=device).mul_(3).bfloat16() for size in (columns, rows))
        norm = Norm((1 + 0.2 * torch.randn(columns, device=device)).bfloat16(), 1e-6)
        assert stages(hidden, weight, norm)
        assert not stages(hidden, weight, Norm(norm.weight.float(), 1e-6))
        rounded, wide = (hidden.float() * norm.weight.float()).bfloat16().double(), hidden.double()
        normalized = rounded * torch.rsqrt(wide.pow(2).mean() + norm.eps)
        for gated, added in ((False, None), (True, None), (False, residual)):
            exact = expected(normalized, weight, gated, added)
            given = None if added is None else added.clone()
            result = ggml_skinny_gemm(hidden, weight, norm, gated=gated, residual=given)
            step = torch.finfo(torch.bfloat16).eps / 2
            torch.testing.assert_close(result.double(), exact, rtol=1.01 * step, atol=2e-5 * float(exact.abs().amax()))
