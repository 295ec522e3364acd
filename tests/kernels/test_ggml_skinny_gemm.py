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
    chunk_columns,
    ggml_skinny_gemm,
    has_few_tokens_decoder,
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
SHAPES = [(43008, 5376), (43008, 12288), (5376, 21504), (6144, 4096), (100, 512)]
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
            for tokens in (1, 4, 8, 9, 16, MAX_TOKENS):
                config = select_config(tokens, rows, columns, block_type, sms, limit)
                assert config.blocks_per_sm * config.shared_bytes(block_type) <= limit
                # CUDA reserves 1 KiB for each block, and warps that share rows exchange sums.
                block_bytes = config.shared_bytes(block_type) + 1024 + 32 * config.threads * (config.column_warps > 1)
                assert not config.staged_values or config.blocks_per_sm * block_bytes <= limit + 1024
                assert 8 * config.token_tiles >= tokens


@pytest.mark.parametrize(
    ("block_type", "rows", "columns", "expected"),
    [
        (GgmlType.Q4_0, 43008, 5376, (8, 2)),
        (GgmlType.Q4_0, 5376, 4096, (8, 3)),  # 336 tiles of rows: 2.5 for an SM
        (GgmlType.Q4_0, 5376, 21504, (16, 1)),  # whose token leaves no shared memory for a third block
        (GgmlType.Q8_0, 5376, 21504, (16, 1)),
        (GgmlType.Q6_K, 5376, 4096, (16, 1)),
        (INT4_TYPES[0], 6144, 4096, (8, 3)),
        (INT4_TYPES[0], 4096, 4096, (8, 2)),  # 256 tiles
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


@pytest.mark.parametrize(
    ("block_type", "rows", "columns", "expected"),
    [
        (GgmlType.Q4_0, 43008, 5376, (8, 4, 2)),
        (GgmlType.Q4_0, 5376, 21504, (6, 6, 3)),
        (GgmlType.Q4_0, 5376, 2048, (8, 8, 2)),  # not measured
        (GgmlType.Q5_K, 5376, 21504, (8, 8, 2)),  # not measured
        (GgmlType.Q8_0, 43008, 5376, (8, 8, 2)),
        (GgmlType.Q8_0, 5376, 21504, (8, 4, 2)),
        (GgmlType.Q8_0, 151936, 2048, (8, 4, 2)),  # of two steps
    ],
    ids=str,
)
def test_few_tokens_have_one_wave_of_blocks(
    block_type: BlockType, rows: int, columns: int, expected: tuple[int, int, int]
) -> None:
    for tokens in (2, 8):
        config = select_config(tokens, rows, columns, block_type, 132, 1024 * shared_kib(90))
        assert (config.warps, config.column_warps, config.blocks_per_sm) == expected
        assert not config.staged_values


def test_tokens_are_staged_where_a_block_has_several_tiles() -> None:
    limit = 1024 * shared_kib(90)
    for tokens, rows, columns, block_type, staged in (
        (1, 4096, 12288, GgmlType.Q4_0, False),  # 256 tiles of long rows in 264 blocks
        (1, 4096, 8192, GgmlType.Q4_0, True),
        (1, 4096, 12288, GgmlType.Q5_K, True),  # whose tokens are only copied
        (4, 43008, 5376, GgmlType.Q4_K, True),
        (5, 43008, 5376, GgmlType.Q4_K, False),
        (4, 8192, 5376, GgmlType.Q4_K, False),
        (4, 43008, 5376, GgmlType.Q4_0, False),
        (2, 43008, 5376, GgmlType.Q6_K, True),
    ):
        config = select_config(tokens, rows, columns, block_type, 132, limit)
        assert (config.staged_values > 0) == staged, (tokens, rows, columns, block_type)
        assert config.slots == (4 if staged and tokens > 1 else 1)


def test_three_blocks_with_spills_avoid_a_second_wave() -> None:
    """Of 16 tokens: 336 blocks of 128 rows on 132 SMs are two waves of two per SM, and 192 are one."""
    for block_type, rows, expected in (
        (GgmlType.Q6_K, 43008, 3),
        (GgmlType.Q6_K, 24576, 2),
        (GgmlType.Q4_0, 24576, 3),  # spills nothing
        (GgmlType.Q5_K, 43008, 2),  # not measured
    ):
        assert select_config(16, rows, 5376, block_type, 132, 1024 * shared_kib(90)).blocks_per_sm == expected


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
    if has_few_tokens_decoder(block_type) and chunk_columns(block_type) == 256:
        macros = dict(few_config(3, 640, block_type).macros(block_type, 640, torch.bfloat16, architecture >= 90))
        check_compiles(KERNEL, macros, architecture, to_ptx=block_type != GgmlType.Q6_K)


def few_config(tokens: int, columns: int, block_type: BlockType) -> SkinnyConfig:
    """Configuration that stages up to four tokens, as select_config chooses for larger weights."""
    return SkinnyConfig(1, 8, 2, 1, shared_tokens=False, warps=16).staging_few(tokens, columns, block_type)


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
@DTYPES
def test_staged_tokens_may_have_any_range(block_type: BlockType, dtype: torch.dtype) -> None:
    """Tokens are staged in float16, whose range is smaller than bfloat16's; each has a scale of its own."""
    if not has_few_tokens_decoder(block_type):
        pytest.skip("tokens are staged as they are")
    in_words = chunk_columns(block_type) == 256
    largest, smallest = (3e4, 1e-4) if dtype == torch.float16 else (1e30, 1e-30)
    for rows, k in GPU_SHAPES:
        columns = k // block_type.block_size * block_type.block_size
        weight = random_weight(rows, rows, columns, block_type)
        weight = GgmlTensor(block_type, columns, *(array.cuda() for array in weight.arrays))
        for tokens in (1, 2, 3, 4) if in_words else (1,):
            scales = torch.tensor([1, smallest, largest / 8, 0], device="cuda")[-tokens:, None]
            hidden = torch.randn(tokens, columns, device="cuda").mul(scales)
            hidden[:, columns // 3] *= 100 if dtype == torch.bfloat16 else 2
            hidden = hidden.to(dtype)
            for token in (hidden, *hidden.split(1)) if in_words else hidden.split(1):
                sums = torch.full((len(token), rows), float("nan"), device="cuda")
                ggml_skinny_gemm(token, weight, out=sums, config=few_config(len(token), columns, block_type))
                exact = expected(token, weight, False, None)
                limits = 2e-5 * exact.abs().amax(1, keepdim=True)
                assert ((sums.double() - exact).abs() <= limits).all()


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
