"""Attention of chunks of prompts on Hopper GPUs, in CUDA C++ (prefill_loads.cu, prefill_wgmma.cu).

Triton's kernel leaves the tensor cores idle while a program computes its softmax. Here two warp groups take turns: one
multiplies while the other computes its softmax. Two more warp groups load the next queries, keys and values.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch

from meltcore.kernels.attention.metadata import AttentionParams
from meltcore.kernels.capability import capability, sm_count
from meltcore.kernels.nvrtc import INSTRUCTIONS, WGMMA, CudaKernel
from meltcore.kernels.tensor_map import tensor_map

KERNEL = CudaKernel(
    [INSTRUCTIONS, WGMMA, *(Path(__file__).with_name(f"{name}.cu") for name in ("prefill_loads", "prefill_wgmma"))],
    "prefill_attention_wgmma",
    suffix="a",
)
SHARED_BYTES = 227 * 1024
_CAPABILITY = 90
_THREADS = 4 * 128
_HEAD_DIM = 128
_COPY_KEYS = 64  # rows of a copy, within a page
_COPY_DIMS = 64
_LINE_BYTES = 16  # divides the addresses that are read


def supports(qkv: torch.Tensor, params: AttentionParams, heads: int) -> bool:
    """Return whether the kernel supports a layer: on Hopper, bfloat16, heads of 128 in pairs that share keys."""
    page_size, kv_heads, head_dim = params.key_cache.shape[1:]
    tensors = [qkv, params.key_cache, params.value_cache, *(params.norms[:1] if params.norms else ())]
    return (
        qkv.is_cuda
        and capability(qkv.device) == _CAPABILITY
        and head_dim == _HEAD_DIM
        and heads // kv_heads % 2 == 0
        and page_size % _COPY_KEYS == 0
        and params.sliding_window is None
        and params.scale > 0
        and all(tensor.dtype == torch.bfloat16 and tensor.data_ptr() % _LINE_BYTES == 0 for tensor in tensors)
        and qkv.stride(0) * qkv.element_size() % _LINE_BYTES == 0
    )


def is_faster(num_tiles: int, heads: int, device: torch.device) -> bool:
    """Return whether the kernel is faster than Triton's kernel, two programs of which fit on an SM.

    It is faster if nearly every SM has a work item (docs/decisions/prefill-attention.md).
    """
    return num_tiles * heads // 2 >= 0.95 * sm_count(device)


@cache
def kernel_macros(heads: int, kv_heads: int, page_size: int, *, normed: bool) -> tuple[tuple[str, int], ...]:
    """Return the constants that the kernel is compiled with."""
    return (
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("PAGE_SIZE", page_size),
        ("NORM", int(normed)),
        ("KEY_STAGES", 2),
        ("VALUE_STAGES", 2),
        ("SHARED_BYTES", SHARED_BYTES),
    )


def prefill_wgmma(
    qkv: torch.Tensor, params: AttentionParams, page_table: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute `prefill_attention` of tensors for which `supports` returns True."""
    norms, rotary_table, key_cache, value_cache, scale, _ = params
    heads, (_, page_size, kv_heads, _) = out.shape[1], key_cache.shape
    maps = (
        tensor_map(cache.flatten(2).flatten(0, 1), _COPY_DIMS, _COPY_KEYS, swizzled=True)
        for cache in (key_cache, value_cache)
    )
    KERNEL.launch(
        (min(sm_count(qkv.device), len(tiles) * heads // 2),),
        _THREADS,
        kernel_macros(heads, kv_heads, page_size, normed=norms is not None),
        [
            *(*maps, qkv, norms.query if norms else qkv, rotary_table, page_table, tiles, out),
            *(len(tiles), qkv.stride(0), page_table.stride(0), norms.eps if norms else 0.0),
            scale * math.log2(math.e),
        ],
        qkv.device,
        shared_bytes=SHARED_BYTES,
        pdl=False,
    )
