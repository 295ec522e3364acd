"""Block-quantized weights: packing and rounding against the gguf package, and the kernels against float64."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from kernel_tools import in_triton
from test_linear import assert_rounded_once, moved, random_norm

from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.moe.grouped_gemm import Dispatch, Mode
from meltcore.kernels.moe.routing import Routing
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.quant import ggml as ggml_file
from meltcore.kernels.quant import ggml_linear as linear_file
from meltcore.kernels.quant.ggml import BlockType, GgmlTensor, dequantize_reference, empty, pack, quantize_blocks
from meltcore.kernels.quant.ggml_decode import dequantize, ggml_embedding
from meltcore.kernels.quant.ggml_experts import (
    dequantized_expert_outputs,
    ggml_expert_outputs,
    ggml_expert_outputs_reference,
    ggml_grouped_gemm,
)
from meltcore.kernels.quant.ggml_gemm import ggml_gemm, is_faster
from meltcore.kernels.quant.ggml_linear import ggml_linear
from meltcore.kernels.quant.ggml_restore import dequantize_blocks, restore_blocks
from meltcore.kernels.quant.ggml_types import HELD_TYPES, GgmlType
from meltcore.kernels.quant.int4 import Int4Type, pack_int4_scales, pack_int4_values, pack_int4_zeros

STORED_FORMATS = pytest.mark.parametrize("ggml_type", list(GgmlType), ids=lambda each: each.name)
GGML_FORMATS = pytest.mark.parametrize("ggml_type", HELD_TYPES, ids=lambda each: each.name)
INT4_TYPES = [Int4Type(128), Int4Type(64), Int4Type(32, torch.bfloat16)]
FORMATS = pytest.mark.parametrize("ggml_type", [*HELD_TYPES, *INT4_TYPES], ids=lambda each: each.name)

# The high bytes of float16 scales in a block, where it is not the second one. MXFP4 has an exponent instead.
SCALE_BYTES = {
    GgmlType.Q4_1: (1, 3),
    GgmlType.Q5_1: (1, 3),
    GgmlType.Q2_K: (81, 83),
    GgmlType.Q3_K: (109,),
    GgmlType.Q4_K: (1, 3),
    GgmlType.Q5_K: (1, 3),
    GgmlType.Q6_K: (209,),
}


def random_blocks(seed: int, rows: int, columns: int, ggml_type: GgmlType) -> torch.Tensor:
    """Random bits with finite scales: float16 numbers below 2, at the bytes where a block has them."""
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (rows, columns // ggml_type.block_size, ggml_type.block_bytes), dtype=np.uint8)
    for high_byte in SCALE_BYTES.get(ggml_type, (1,)):
        blocks[..., high_byte] &= 0xBF
    return torch.from_numpy(blocks).flatten(1)


def random_int4(seed: int, rows: int, columns: int, int4_type: Int4Type) -> tuple[torch.Tensor, ...]:
    """4-bit values, a scale and a zero point of each group."""
    draw = torch.Generator().manual_seed(seed)
    groups = columns // int4_type.group_size
    values = torch.randint(16, (rows, columns), dtype=torch.uint8, generator=draw)
    zeros = torch.randint(17, (rows, groups), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(rows, groups, generator=draw) + 0.5) / 6.7 * columns**-0.5
    return values, scales.to(int4_type.scale_dtype), zeros


def packed_int4(int4_type: Int4Type, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> GgmlTensor:
    packed = pack_int4_values(values), pack_int4_scales(scales, int4_type), pack_int4_zeros(zeros, int4_type)
    return GgmlTensor(int4_type, values.shape[1], *packed)


def random_weight(seed: int, rows: int, columns: int, ggml_type: BlockType) -> GgmlTensor:
    """Values of mean square 1 / columns, more or less: scales of one size, and else random bits."""
    if isinstance(ggml_type, Int4Type):
        return packed_int4(ggml_type, *random_int4(seed, rows, columns, ggml_type))
    blocks = random_blocks(seed, rows, columns, ggml_type).unflatten(1, (-1, ggml_type.block_bytes))
    sizes = {
        GgmlType.Q8_0: 74,
        GgmlType.Q4_0: 4.6,
        GgmlType.Q4_1: 8.0,
        GgmlType.Q5_1: 16.0,
        GgmlType.Q2_K: 13.0,
        GgmlType.Q4_K: 250.0,
        GgmlType.Q5_K: 500.0,
        GgmlType.Q6_K: 74 * 18.5,
    }
    draw = torch.Generator().manual_seed(seed)
    scales = (torch.rand(rows, blocks.shape[1], 2, generator=draw) + 0.5) / sizes[ggml_type] * columns**-0.5
    scales = scales.half().view(torch.uint8)
    for index, high_byte in enumerate(SCALE_BYTES.get(ggml_type, (1,))):
        blocks[..., high_byte - 1 : high_byte + 1] = scales[..., 2 * index : 2 * index + 2]
    return pack(blocks.flatten(1), ggml_type)


def with_arrays(weight: GgmlTensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> GgmlTensor:
    return GgmlTensor(weight.type, weight.columns, *map(convert, weight.arrays))


def there(weight: GgmlTensor, device: torch.device) -> GgmlTensor:
    return with_arrays(weight, lambda array: array.to(device))


def stacked(weight: GgmlTensor, experts: int) -> GgmlTensor:
    return with_arrays(weight, lambda array: array.unflatten(0, (experts, -1)))


def exact(hidden: torch.Tensor, weight: GgmlTensor, norm: Norm | None = None) -> torch.Tensor:
    """In float64, of the weight as it is rounded for the tensor cores and of the normalized tokens likewise."""
    hidden = rms_norm(hidden, *norm) if norm else hidden
    return hidden.double() @ dequantize_reference(weight).to(hidden.dtype).double().T


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """For values that are computed from rounded ones, of which few are much larger than the others."""
    error, step = result.cpu().double() - expected, torch.finfo(dtype).eps
    assert result.dtype == dtype
    assert error.norm() <= step * expected.norm()
    assert (error.abs() <= 4 * step * (expected.abs() + expected.pow(2).mean().sqrt())).all()


@STORED_FORMATS
def test_dequantizes_every_bit_pattern_like_ggml(ggml_type: GgmlType) -> None:
    """Among random scales are infinite ones, zeros, subnormal ones and NaN."""
    columns = 13 * 256 if ggml_type.block_size == 256 else 13 * 32
    blocks, expected = blocks_and_values(ggml_type, 40, columns)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)] == (ggml_type.block_size, ggml_type.block_bytes)
    assert np.array_equal(dequantize_blocks(blocks, ggml_type).numpy(), expected, equal_nan=True)
    if ggml_type not in HELD_TYPES:
        return
    packed = pack(blocks, ggml_type)
    assert np.array_equal(dequantize_reference(packed).numpy(), expected, equal_nan=True)
    allocated = empty(ggml_type, expected.shape)
    assert [each.shape for each in allocated.arrays] == [each.shape for each in packed.arrays]
    assert all(each.shape[1] % 4 == 0 and each.is_contiguous() and each.dtype == torch.uint8 for each in packed.arrays)


def blocks_and_values(ggml_type: GgmlType, rows: int, columns: int) -> tuple[torch.Tensor, np.ndarray]:
    """Random bytes as blocks, and their values by the gguf package."""
    draw = np.random.default_rng(ggml_type)
    blocks = draw.integers(0, 256, (rows, ggml_type.row_bytes(columns)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        return torch.from_numpy(blocks), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(ggml_type))


@pytest.mark.parametrize("ggml_type", [GgmlType.Q5_0, GgmlType.IQ4_NL, GgmlType.Q3_K], ids=lambda each: each.name)
def test_restored_blocks_have_the_same_values(ggml_type: GgmlType) -> None:
    """Of every bit pattern, with infinite scales, subnormal ones and NaN."""
    blocks, expected = blocks_and_values(ggml_type, 30, 7 * 256)
    restored = restore_blocks(blocks, ggml_type)
    assert restored.shape[1] == ggml_type.held.type.row_bytes(7 * 256)
    found = dequantize_blocks(restored, ggml_type.held.type).numpy()
    assert np.array_equal(found, expected, equal_nan=True)
    assert ggml_type.held.loss == ""


def test_restored_iq4_xs_loses_at_most_the_stated_part_of_a_value() -> None:
    """Scales are float16 below 2, and subnormal ones, of which products are exact."""
    blocks = random_blocks(1, 40, 5 * 256, GgmlType.IQ4_XS)
    blocks[:20, 1] &= 0x83  # of the first block of a row: its scale is subnormal
    expected = dequantize_blocks(blocks, GgmlType.IQ4_XS)
    found = dequantize_blocks(restore_blocks(blocks, GgmlType.IQ4_XS), GgmlType.Q8_0)
    error = (found - expected).abs()
    assert (error <= 2.0**-11 * expected.abs()).all()
    assert error.max() > 0
    tiny = expected.abs() < 2.0**-15
    assert tiny.any() and (error[tiny] == 0).all()  # noqa: PT018


def test_restored_mxfp4_is_exact_for_scales_of_weights_and_refuses_larger_ones() -> None:
    blocks, _ = blocks_and_values(GgmlType.MXFP4, 43, 32)
    for exponent, row in zip(range(-24, 19), blocks, strict=True):
        row[0] = exponent + 128
    expected = dequantize_blocks(blocks, GgmlType.MXFP4)
    assert torch.equal(dequantize_blocks(restore_blocks(blocks, GgmlType.MXFP4), GgmlType.Q8_0), expected)
    for exponent in (-128, -60, -30, -25):
        blocks[:, 0] = exponent + 128
        expected = dequantize_blocks(blocks, GgmlType.MXFP4)
        found = dequantize_blocks(restore_blocks(blocks, GgmlType.MXFP4), GgmlType.Q8_0)
        assert torch.equal(found, (expected * 2.0**24).round() * 2.0**-24)
    for exponent in (19, 127):
        blocks[7, 0] = exponent + 128
        with pytest.raises(ValueError, match=rf"has a block with the scale 2\^{exponent}; .*up to 2\^18"):
            restore_blocks(blocks, GgmlType.MXFP4)
    blocks[7, 1:] = 0x80  # zeros of both signs, of any scale
    assert torch.equal(restore_blocks(blocks, GgmlType.MXFP4)[7, 2:], torch.zeros(32, dtype=torch.uint8))


@pytest.mark.parametrize("int4_type", INT4_TYPES, ids=lambda each: each.name)
def test_int4_values_are_the_distance_to_the_zero_point_times_the_scale(int4_type: Int4Type) -> None:
    rows, columns = 40, {128: 5 * 128, 64: 7 * 64, 32: 11 * 32}[int4_type.group_size]
    values, scales, zeros = random_int4(1, rows, columns, int4_type)
    assert zeros.max() == 16  # one more than a value: GPTQ stores zero points minus one
    numbers = values.unflatten(1, (-1, int4_type.group_size)).double() - zeros[..., None]
    packed = packed_int4(int4_type, values, scales, zeros)
    assert torch.equal(dequantize_reference(packed).double(), (numbers * scales[..., None].double()).flatten(1))
    allocated = empty(int4_type, (rows, columns))
    assert [each.shape for each in allocated.arrays] == [each.shape for each in packed.arrays]
    with pytest.raises(ValueError, match=f"1000 columns are no multiple of the groups of {int4_type.group_size}"):
        empty(int4_type, (2, 1000))


@pytest.mark.parametrize(("group_size", "bits"), [(128, 4.25), (64, 4.375), (32, 4.75)])
def test_int4_takes_its_bits_per_value(group_size: int, bits: float) -> None:
    arrays = empty(Int4Type(group_size), (3, 5376)).arrays
    assert sum(each.nbytes for each in arrays) * 8 == bits * 3 * 5376


@GGML_FORMATS
@pytest.mark.parametrize("columns", [2048, 5376, 21504])
def test_packing_takes_the_bytes_of_the_file(ggml_type: GgmlType, columns: int) -> None:
    packed = sum(each.nbytes for each in empty(ggml_type, (1, columns)).arrays)
    assert 0 <= packed - ggml_type.row_bytes(columns) <= 2


@pytest.mark.parametrize("ggml_type", [GgmlType.Q8_0, GgmlType.Q4_0], ids=lambda each: each.name)
def test_quantizes_like_ggml(ggml_type: GgmlType) -> None:
    draw = np.random.default_rng(1)
    wide = draw.standard_normal((60, 256)) * 10.0 ** draw.integers(-6, 4, (60, 1))
    wide[0], wide[1] = 0.0, 1.5
    wide[2, ::2], wide[2, 1::2] = -4.0, 4.0  # of equal magnitudes the first counts
    wide[3] = np.arange(-128, 128) / 2  # ties
    wide = wide.astype(np.float32)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(wide, gguf.GGMLQuantizationType(ggml_type))
    assert np.array_equal(quantize_blocks(torch.from_numpy(wide), ggml_type).numpy(), expected)


def test_refuses_partial_blocks_and_formats_without_rounding() -> None:
    with pytest.raises(ValueError, match="320 columns are no multiple of Q6_K's blocks of 256"):
        empty(GgmlType.Q6_K, (2, 320))
    with pytest.raises(ValueError, match="Q4_K is not quantized to"):
        quantize_blocks(torch.zeros(1, 256), GgmlType.Q4_K)
    with pytest.raises(KeyError):
        empty(GgmlType.Q5_0, (2, 320))


@pytest.mark.slow
@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_kernel_dequantizes_to_the_same_values(ggml_type: BlockType, dtype: torch.dtype, device: torch.device) -> None:
    columns = {256: 3 * 256, 128: 5 * 128, 64: 7 * 64}.get(
        ggml_type.block_size, 11 * 32
    )  # more than one chunk, not all of them whole
    if isinstance(ggml_type, Int4Type):
        weight = random_weight(2, 21, columns, ggml_type)
    else:
        weight = pack(random_blocks(2, 21, columns, ggml_type), ggml_type)
    expected = dequantize_reference(weight).to(dtype)
    out = torch.full((23, columns), 7.0, dtype=dtype, device=device)
    found = in_triton(dequantize)(there(weight, device), out[:21])
    assert torch.equal(found.cpu(), expected)
    assert (out[21:] == 7.0).all()
    token_ids = torch.tensor([3, 20, 19, 0, 40, 3])
    for first_token in (None, 10):
        rows = token_ids - (first_token or 0)
        rows[4] = 5 if first_token is None else 30  # no row of the shard
        given = rows + (first_token or 0)
        inside = ((rows >= 0) & (rows < 21))[:, None]
        wanted = torch.where(inside, expected[rows.clamp(0, 20)], 0.0)
        for function in (ggml_embedding, in_triton(ggml_embedding)):
            embeddings = function(there(weight, device), given.to(device), dtype, first_token)
            assert torch.equal(embeddings.cpu(), wanted)


@pytest.mark.slow
@FORMATS
@pytest.mark.parametrize(
    ("tokens", "n", "chunks", "dtype"),
    [(1, 37, 2, torch.bfloat16), (3, 70, 5, torch.float16), (17, 33, 1, torch.bfloat16)],
)
def test_gemm_multiplies_dequantized_values(
    tokens: int, n: int, chunks: int, ggml_type: BlockType, dtype: torch.dtype, device: torch.device
) -> None:
    """With and without splits, into strided rows, and added to a residual."""
    torch.manual_seed(tokens)
    weight, hidden = random_weight(n, n, 256 * chunks, ggml_type), torch.randn(tokens, 256 * chunks).to(dtype)
    expected, on_device = exact(hidden, weight), there(weight, device)
    for split_k in {1, min(chunks, 2)}:
        config = GemmConfig(16, 64, 128 if ggml_type == GgmlType.Q8_0 else 256, 2, split_k=split_k)
        kept = torch.full((tokens, n + 9), 7.0, dtype=dtype, device=device)
        out = kept[:, 4 : n + 4]
        assert ggml_gemm(hidden.to(device), on_device, out=out, config=config) is out
        assert_rounded_once(out, expected, dtype)
        assert (kept[:, :4] == 7.0).all()
        assert (kept[:, n + 4 :] == 7.0).all()
    before = torch.randn(tokens, n).to(dtype)
    residual = before.to(device, copy=True)
    assert ggml_gemm(hidden.to(device), on_device, residual=residual) is residual
    assert_rounded_once(residual, before.double() + expected, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ggml_type", "tokens"),
    [
        *((each, 40) for each in (*HELD_TYPES, *INT4_TYPES)),
        (GgmlType.Q8_0, 150),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_linear_fuses_norm_and_activation_for_every_number_of_tokens(
    tokens: int, ggml_type: BlockType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 tokens take the longer side of a tile (not in Q6_K), 150 the library's GEMM in slices; and the torch body.

    Slices are alike in all formats, whose kernels that dequantize have a test of their own.
    """
    monkeypatch.setattr(linear_file, "_CPU_SLICE_VALUES", 64 * 512)
    monkeypatch.setattr(linear_file, "_TILE_ROWS", 16)
    torch.manual_seed(tokens)
    dtype, rows = torch.bfloat16, 2 * 67
    weight, hidden, norm = (
        random_weight(9, rows, 512, ggml_type),
        torch.randn(tokens, 512).bfloat16(),
        random_norm(512, dtype),
    )
    gate, up = exact(hidden, weight, norm).chunk(2, -1)
    expected, before = torch.nn.functional.silu(gate) * up, torch.randn(tokens, rows).to(dtype)
    for function in (in_triton(ggml_linear), ggml_linear):
        given = hidden.to(device), there(weight, device)
        result = function(*given, moved(norm, device), gated=True)
        assert result.shape == (tokens, rows // 2)
        assert_near(result, expected, dtype)
        residual = before.to(device, copy=True)
        assert function(*given, residual=residual) is residual
        assert_near(residual, before.double() + exact(hidden, weight), dtype)
        assert_near(function(*given), exact(hidden, weight), dtype)
        sums = torch.full((tokens, rows), float("nan"), device=device)
        assert function(*given, out=sums) is sums
        torch.testing.assert_close(sums.cpu().double(), exact(hidden, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ggml_type", "most"),
    [(GgmlType.Q4_0, 64), (GgmlType.Q8_0, 64), (GgmlType.Q4_K, 64), (GgmlType.Q6_K, 32), (GgmlType.Q5_K, 32)],
)
def test_weights_are_dequantized_from_the_second_tile_of_tokens_on(ggml_type: GgmlType, most: int) -> None:
    weight = random_weight(2, 16, 256, ggml_type)
    takes = [tokens for tokens in range(150) if is_faster(torch.zeros(tokens, 256, dtype=torch.bfloat16), weight)]
    assert takes == list(range(1, most + 1))
    assert not is_faster(torch.zeros(1, 256), weight)


def test_columns_that_fill_no_chunk_are_padded(device: torch.device) -> None:
    """A shard may be any number of blocks wide."""
    for ggml_type in (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_1, GgmlType.Q8_0, *INT4_TYPES):
        columns = 3 * 128 if ggml_type.block_size == 128 else 7 * 64 if ggml_type.block_size == 64 else 11 * 32
        weight, hidden = random_weight(5, 64, columns, ggml_type), torch.randn(3, columns).half()
        assert_rounded_once(ggml_gemm(hidden.to(device), there(weight, device)), exact(hidden, weight), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ggml_type", "tokens", "mode"),
    [
        (GgmlType.Q8_0, 2, "gemv"),
        (GgmlType.Q4_0, 9, "indirect"),
        (GgmlType.Q4_K, 30, "grouped"),
        (GgmlType.Q6_K, 3, "gemv"),
        (GgmlType.Q4_1, 9, "indirect"),
        (GgmlType.Q5_K, 30, "grouped"),
        (Int4Type(128), 9, "indirect"),
        (Int4Type(128), 30, "grouped"),
    ],
)
def test_grouped_gemm_multiplies_each_pair_by_its_expert(
    ggml_type: BlockType, tokens: int, mode: Mode, device: torch.device
) -> None:
    torch.manual_seed(tokens)
    experts, size, width, dtype = 3, 256, 256, torch.bfloat16
    hidden, ids = torch.randn(tokens, size).to(dtype), torch.stack([torch.randperm(3)[:2] for _ in range(tokens)]).int()
    gate_up = stacked(random_weight(1, experts * 2 * width, size, ggml_type), experts)
    down = stacked(random_weight(2, experts * size, width, ggml_type), experts)
    dispatch = Dispatch.of(ids.to(device), down.values, 16, mode)
    config = GemmConfig(16, 64, 128 if ggml_type == GgmlType.Q8_0 else 256, 2)
    kept = torch.full((2 * tokens, width + 3), 7.0, dtype=dtype, device=device)
    activated, outputs = kept[:, :width], torch.empty(2 * tokens, size, dtype=dtype, device=device)
    gemm = in_triton(ggml_grouped_gemm)
    gemm(hidden.to(device), there(gate_up, device), activated, dispatch, config, from_tokens=True, gated=True)
    gemm(activated.contiguous(), there(down, device), outputs, dispatch, config, from_tokens=False)
    wide_gate_up, wide_down = (dequantize_reference(each).to(dtype).double() for each in (gate_up, down))
    of_pairs = ids.flatten().long()
    sums = torch.einsum("ph,prh->pr", hidden.double().repeat_interleave(2, 0), wide_gate_up[of_pairs])
    gate, up = sums.chunk(2, -1)
    assert_near(activated, torch.nn.functional.silu(gate) * up, dtype)
    assert (kept[:, width:] == 7.0).all()
    expected = torch.einsum("pw,phw->ph", activated.cpu().double(), wide_down[of_pairs])
    assert_rounded_once(outputs, expected, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_expert_outputs_in_triton_match_the_reference(fused: bool, device: torch.device) -> None:
    torch.manual_seed(3)
    hidden, ids = torch.randn(3, 256).bfloat16(), torch.stack([torch.randperm(2) for _ in range(3)]).int()
    routing = Routing(ids.to(device), torch.rand(3, 2, device=device))
    types = [GgmlType.Q4_K] if fused else [GgmlType.Q8_0, GgmlType.Q4_0]
    rows = 512 if fused else 256
    gate_up = [there(stacked(random_weight(each, 2 * rows, 256, each), 2), device) for each in types]
    down = there(stacked(random_weight(7, 2 * 256, 256, GgmlType.Q6_K), 2), device)
    expected = ggml_expert_outputs(hidden.to(device), routing, gate_up, down).double().cpu()
    compute = in_triton(ggml_expert_outputs)
    assert_near(compute(hidden.to(device), routing, gate_up, down), expected, torch.bfloat16)
    nothing = Routing(routing.topk_ids[:0], routing.topk_weights[:0])
    assert compute(hidden[:0].to(device), nothing, gate_up, down).shape == (0, 256)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # padding rows are undefined
def test_experts_are_dequantized_in_slices_for_many_pairs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of two and three experts, the last of fewer; one expert has no pairs, one two tiles."""
    monkeypatch.setattr("meltcore.kernels.quant.ggml_experts.SLICE_VALUES", 2 * 256 * 128)
    torch.manual_seed(4)
    hidden, ids = torch.randn(120, 128).bfloat16(), torch.stack([torch.randperm(4)[:2] for _ in range(120)]).int()
    ids[ids == 2] = 4
    gate_up, down = (
        there(stacked(random_weight(rows, 5 * rows, 128, GgmlType.Q8_0), 5), device) for rows in (256, 128)
    )
    routing = Routing(ids.to(device), torch.rand(120, 2, device=device))
    expected = ggml_expert_outputs_reference(hidden.to(device), routing, [gate_up], down).cpu().double()
    result = in_triton(dequantized_expert_outputs)(hidden.to(device), routing.topk_ids, gate_up, down)
    assert_near(result, expected, torch.bfloat16)


@GGML_FORMATS
def test_drawn_weights_give_outputs_of_the_expected_variance(ggml_type: GgmlType) -> None:
    """Also for inputs of another mean than zero, as after an activation."""
    draw = torch.Generator().manual_seed(4)
    blocks = ggml_file.random_blocks(ggml_type, (2000, 512), 0.02, draw)
    weight = dequantize_reference(pack(blocks, ggml_type))
    assert abs(weight.mean()) < 2e-4
    inputs = torch.randn(512, 50, generator=draw)
    for each in (inputs, inputs.abs()):
        assert (weight @ each).std() == pytest.approx(0.02 * 512**0.5, rel=0.15)
    with pytest.raises(ValueError, match="no multiple of"):
        ggml_file.random_blocks(ggml_type, (2, 500), 0.02, draw)
