"""Launch parameters on architectures that are not here: those of an H200 where they were measured, defaults elsewhere.

test_kernel_compile.py compiles these launches and asserts the shared memory that the compiled kernels ask for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from compile_tools import AbsentGPU

from meltcore.kernels.architectures import ARCHITECTURES
from meltcore.kernels.attention.decode import DecodeLaunch, decode_launch
from meltcore.kernels.attention.prefill import PACKED_PAIRS, PrefillLaunch
from meltcore.kernels.attention.prefill import select_launch as select_prefill_launch
from meltcore.kernels.attention.stream_k import StreamK, stream_k_for
from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.fp8 import fp8_split_k
from meltcore.kernels.gated_delta.common import GatedDeltaShape
from meltcore.kernels.gated_delta.state_scan import ScanLaunch, scan_launch
from meltcore.kernels.gemm import split_k
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.launch import pdl_options
from meltcore.kernels.moe import grouped_gemm, grouped_gemm_tma, router

META = torch.device("meta")
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B
KIB = 1024
# SMs of GPU types, among them some with few: H100 PCIe, A10, L4, RTX 4060, a MIG slice.
GPU_TYPES = [
    (90, 114),
    (86, 72),
    (89, 58),
    (89, 24),
    (90, 16),
    *((cap, each.sms) for cap, each in ARCHITECTURES.items()),
]
# Weights of a Qwen3-0.6B layer and of wider models.
WEIGHTS = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (192, 192), (12288, 4096), (4096, 12288)]

Choose = Callable[[int], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Makes an architecture the compiler's target, which launches of meta tensors are for."""
    return lambda capability: monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGPU(capability))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def decode(sequences: int, element_bytes: int = 2) -> DecodeLaunch:
    limits = sm_count(META), shared_memory_bytes(META)
    return decode_launch(sequences, KV_HEADS, HEAD_DIM, element_bytes, 640, *limits)


def prefill(tiles: int) -> PrefillLaunch:
    return select_prefill_launch(meta(64, 4096), meta(9, 64, KV_HEADS, HEAD_DIM), HEADS, tiles)


def gemm(tokens: int, rows: int, k: int) -> GemmConfig:
    return split_k.select_config(tokens, rows, k, sm_count(META), shared_memory_bytes(META))


@pytest.mark.parametrize(
    ("capability", "sms", "shared_kib"),
    [(80, 108, 163), (86, 84, 99), (89, 142, 99), (90, 132, 227), (100, 148, 227), (120, 170, 99), (121, 132, 99)],
)
def test_limits_of_an_absent_gpu(choose: Choose, capability: int, sms: int, shared_kib: int) -> None:
    """An architecture without an entry, such as sm_121, keeps to the least shared memory."""
    choose(capability)
    assert (sm_count(META), shared_memory_bytes(META)) == (sms, shared_kib * KIB)


def test_decode_attention_of_an_rtx_5090(choose: Choose) -> None:
    """One program of 72 KiB fits on an SM: half as many KV splits as on an H100 at 10 sequences."""
    choose(120)
    assert decode(1) == DecodeLaunch(16, 1, 64, warps=4, stages=3, prefetch=True)
    assert decode(10) == DecodeLaunch(2, 1, 64, warps=4, stages=3, prefetch=True)
    assert decode(400) == DecodeLaunch(2, 32, 64, warps=4, stages=3, prefetch=False)
    assert decode(400, element_bytes=1).stages == 4
    assert stream_k_for(10, HEADS, KV_HEADS, HEAD_DIM, META) is None
    assert stream_k_for(64, HEADS, KV_HEADS, HEAD_DIM, META) == StreamK(170 * 2 // 8, key_heads=2)


@pytest.mark.parametrize(("capability", "stages"), [(80, 4), (89, 3), (90, 4), (100, 4), (120, 3)])
def test_wide_heads_in_fp8_have_the_stages_that_fit(choose: Choose, capability: int, stages: int) -> None:
    """Four stages of 64 keys and values of 256 dims take 106 KiB."""
    choose(capability)
    launch = decode_launch(1000, 4, 256, 1, 640, sm_count(META), shared_memory_bytes(META))
    assert (launch.prefetch, launch.stages) == (False, stages)


def test_decode_attention_of_an_h100(choose: Choose) -> None:
    choose(90)
    assert decode(1) == DecodeLaunch(32, 1, 64, warps=4, stages=4, prefetch=True)
    assert decode(10) == DecodeLaunch(4, 1, 64, warps=4, stages=3, prefetch=True)
    assert decode(400) == DecodeLaunch(2, 32, 64, warps=4, stages=3, prefetch=False)
    assert stream_k_for(64, HEADS, KV_HEADS, HEAD_DIM, META) == StreamK(2 * 132 * 2 // 8, key_heads=2)


@pytest.mark.parametrize(("kv_heads", "head_dim", "splits"), [(4, 128, 32), (1, 128, 32), (2, 256, 64)])
def test_few_key_heads_of_one_sequence_combine_their_splits_together(
    choose: Choose, kv_heads: int, head_dim: int, splits: int
) -> None:
    choose(90)
    limits = sm_count(META), shared_memory_bytes(META)
    launch = decode_launch(1, kv_heads, head_dim, 2, 640, *limits)
    assert launch == DecodeLaunch(splits, 1, 64 if head_dim == 128 else 32, 8, 2, prefetch=True, combined=32)
    assert decode_launch(1, kv_heads, head_dim, 2, 9, *limits).splits == 8
    assert decode_launch(1, kv_heads, head_dim, 1, 640, *limits).combined == 8
    assert decode_launch(5, kv_heads, head_dim, 2, 640, *limits).warps == 4


@pytest.mark.parametrize(("capability", "packs"), [(80, False), (89, False), (90, True), (100, False), (120, False)])
def test_packed_prefill_heads_are_for_hopper(choose: Choose, capability: int, packs: bool) -> None:
    choose(capability)
    assert prefill(1) == PrefillLaunch(1, 64, warps=4, stages=3)
    assert prefill(512) == (PACKED_PAIRS if packs else PrefillLaunch(1, 64, warps=4, stages=3))


def test_split_k_fills_an_rtx_5090_within_99_kib(choose: Choose) -> None:
    choose(120)
    assert gemm(2, 1024, 3072) == GemmConfig(16, 64, 128, num_stages=3, split_k=6)
    assert gemm(64, 1024, 2048) == GemmConfig(64, 32, 128, num_stages=3, split_k=2)
    assert gemm(128, 6144, 1024) == GemmConfig(64, 128, 128, num_stages=2, split_k=1)


def test_split_k_of_an_h100(choose: Choose) -> None:
    choose(90)
    assert gemm(2, 1024, 3072) == GemmConfig(16, 64, 128, num_stages=6, split_k=6)
    assert gemm(64, 1024, 2048) == GemmConfig(64, 32, 128, num_stages=5, split_k=2)
    assert gemm(128, 6144, 1024) == GemmConfig(64, 128, 128, num_stages=3, split_k=1)


@pytest.mark.parametrize(("capability", "sms"), GPU_TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 33, 64, 65, 128])
def test_gemm_tiles_fit_every_gpu_type(capability: int, sms: int, tokens: int) -> None:
    """Pipelined tiles fit in shared memory, no split adds a second wave, and counters suffice for the tiles."""
    shared_bytes = ARCHITECTURES[capability].shared_kib * KIB
    for rows, k in WEIGHTS:
        config = split_k.select_config(tokens, rows, k, sms, shared_bytes)
        tile_bytes = 2 * (config.block_m + config.block_n) * config.block_k
        tiles = -(-tokens // config.block_m) * -(-rows // config.block_n)
        assert config.num_stages >= 2
        assert config.num_stages * tile_bytes <= shared_bytes
        assert config.split_k == 1 or tiles * config.split_k <= sms
        assert config.split_k == 1 or tiles <= split_k._MAX_SPLIT_TILES
        assert k % (config.block_k * config.split_k) == 0
        if capability >= 89:
            fp8 = fp8_split_k.select_config(tokens, rows, k, shared_bytes)
            assert fp8.num_stages >= 2
            assert fp8.num_stages * (fp8.block_m + fp8.block_n) * fp8.block_k <= shared_bytes


@pytest.mark.parametrize(("capability", "sms"), GPU_TYPES)
@pytest.mark.parametrize("sequences", [1, 2, 3, 7, 16, 33, 100, 400, 1024])
def test_decode_programs_fit_every_gpu_type(capability: int, sms: int, sequences: int) -> None:
    """A launch that starts early has no more programs than run concurrently, and its blocks fit in shared memory."""
    shared_bytes = ARCHITECTURES[capability].shared_kib * KIB
    for element_bytes in (1, 2):
        launch = decode_launch(sequences, KV_HEADS, HEAD_DIM, element_bytes, 640, sms, shared_bytes)
        # One block of keys and values is being multiplied; the others are in flight.
        program_bytes = (launch.stages - 1) * 2 * launch.block_keys * HEAD_DIM * element_bytes
        assert program_bytes <= shared_bytes
        assert launch.splits & (launch.splits - 1) == 0
        if launch.prefetch and launch.splits > 1:
            assert sequences * KV_HEADS * launch.splits <= sms * (shared_bytes // program_bytes)


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_expert_configs_measured_on_an_h200_are_for_hopper(choose: Choose, capability: int) -> None:
    choose(capability)
    gate_up, down = meta(128, 1536, 2048), meta(128, 2048, 768)
    shared_bytes = shared_memory_bytes(META)
    tuned = grouped_gemm._tuned_configs(tuple(gate_up.shape))
    for pairs in (8, 1024, 4096, 8192):
        up, down_config = grouped_gemm.select_configs(pairs, gate_up, down)
        default = grouped_gemm.default_config(pairs, 128, 2, shared_bytes)
        assert up.block_m == down_config.block_m, "pairs are aligned once"
        assert (up in [config for _, config in tuned]) if capability == 90 else (up == default)
        assert default.num_stages >= 2
        assert default.num_stages * 2 * (default.block_m + default.block_n) * default.block_k <= shared_bytes
    many = meta(8192, 2048), meta(8192, 8, dtype=torch.int32), gate_up, down
    assert grouped_gemm_tma.supports(*many) == (capability == 90)


@pytest.mark.parametrize(
    ("capability", "block_m", "stages", "fp8_block_m"),
    [(86, 16, 1, 128), (89, 16, 1, 128), (90, 64, 3, 256), (100, 64, 3, 256), (120, 16, 1, 128)],
)
def test_tiles_shrink_with_shared_memory(
    choose: Choose, capability: int, block_m: int, stages: int, fp8_block_m: int
) -> None:
    """The router's tile, the chunks in flight of Gated DeltaNet, and the tile of a long FP8 step."""
    choose(capability)
    shared_bytes = shared_memory_bytes(META)
    assert router.select_config(64, 2048, shared_bytes, has_norm=False).block_m == block_m
    assert scan_launch(GatedDeltaShape(16, 32, 128, 128, 4), 256, 2, META) == ScanLaunch(128, stages)
    small = GatedDeltaShape(2, 4, 32, 64, 4)  # six of its chunks would fit in 227 KiB
    assert scan_launch(small, 256, 2, META) == ScanLaunch(64, 2 if shared_bytes < 128 * KIB else 3)
    assert fp8_split_k.select_config(2048, 6144, 1024, shared_bytes).block_m == fp8_block_m


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_kernels_start_early_from_hopper_on(choose: Choose, capability: int) -> None:
    choose(capability)
    assert pdl_options(META)["PDL"] is (capability >= 90)
