"""The router of a mixture of experts: the norm before it, its GEMM, and expert selection (moe/routing.py).

A router is small: with 256 experts and a hidden size of 2,048 it has a megabyte. For few tokens, norm and GEMM would
take the time of their launches, so they are one kernel. Each program takes some rows of the router and one split of the
columns. The expert selection adds up the partial sums.
"""

from __future__ import annotations

import torch

from meltcore.kernels.capability import shared_memory_bytes
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.gemm.split_k import MAX_TOKENS, GemmConfig
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, prefetch, use_triton
from meltcore.kernels.moe.routing import Routing, select_experts
from meltcore.kernels.norm import Norm, rms_norm, round_before_weight

# Tokens for which this file's kernel computes norm and GEMM, and the GEMM of tokens that are normalized already. One
# token, and more, are faster with the general GEMM kernels (H200, docs/decisions/mixture-of-experts.md).
TOKENS_WITH_NORM, TOKENS_WITHOUT_NORM = range(2, 33), range(2, 129)
# Divides hidden_size, so that no load needs a mask on columns.
K_MULTIPLE = 64
# Of rows of logits in memory: GEMM kernels store 16 bytes at a time if every row is aligned so.
_ROW_MULTIPLE = 8


def route_tokens(
    residual: torch.Tensor,
    norm: Norm | None,
    router: torch.Tensor,
    top_k: int,
    *,
    norm_topk_prob: bool,
    shared_expert: bool = False,
    uniform_seed: int | None = None,
) -> tuple[torch.Tensor, Routing]:
    """Return norm(residual) and each token's experts, which are selected by the logits norm(residual) router^T.

    The router is read before the previous kernel has ended, so that kernel must not write it.

    Args:
        residual: [tokens, hidden_size], contiguous.
        norm: None means that `residual` is normalized already. It is then returned unchanged.
        router: [experts + shared_expert, hidden_size].
        top_k: the number of experts per token.
        norm_topk_prob: see `select_experts`.
        shared_expert: see `select_experts`.
        uniform_seed: if given, experts are drawn at random. The GEMM is computed nevertheless.
    """
    if use_triton(residual) and supports(residual, norm, router):
        hidden, logits = _launch_router(residual, norm, router)
    else:
        hidden = rms_norm(residual, *norm) if norm else residual
        logits = router_logits(hidden, router)
    return hidden, select_experts(
        logits,
        top_k,
        norm_topk_prob=norm_topk_prob,
        shared_expert=shared_expert,
        uniform_seed=uniform_seed,
        dtype=residual.dtype,
    )


def supports(residual: torch.Tensor, norm: Norm | None, router: torch.Tensor) -> bool:
    """Return whether one kernel is faster: for few tokens of a 16-bit type in rows that allow 16-byte reads."""
    return (
        residual.shape[0] in (TOKENS_WITH_NORM if norm else TOKENS_WITHOUT_NORM)
        and residual.dtype == router.dtype
        and residual.dtype in (torch.bfloat16, torch.float16)
        and router.shape[1] % K_MULTIPLE == 0
        and residual.is_contiguous()
        and router.is_contiguous()
    )


def router_logits(hidden: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """Compute hidden router^T: [tokens, experts + shared]. Rows of the result may be strided.

    With more than MAX_TOKENS tokens, cuBLAS computes a multiple of 8 outputs, and a second GEMM the remaining ones. For
    257 outputs in one GEMM, cuBLAS selects a kernel that stores one value at a time and is ten times as slow.
    """
    (tokens, _), rows = hidden.shape, router.shape[0]
    if tokens <= MAX_TOKENS:
        return linear(hidden, router)
    aligned_rows = rows // _ROW_MULTIPLE * _ROW_MULTIPLE
    logits = hidden.new_empty(tokens, -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)[:, :rows]
    torch.mm(hidden, router[:aligned_rows].t(), out=logits[:, :aligned_rows])
    if aligned_rows < rows:
        torch.mm(hidden, router[aligned_rows:].t(), out=logits[:, aligned_rows:])
    return logits


@triton.jit
def _rms_factors(rows_ptr, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the factors [BLOCK_M, 1] that scale each of BLOCK_M rows to unit mean square."""
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        hidden_f32 = tl.load(rows_ptr + start + tl.arange(0, BLOCK_K)[None, :]).to(tl.float32)
        squares += hidden_f32 * hidden_f32
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _router_kernel(
    residual_ptr,
    norm_ptr,
    router_ptr,
    hidden_ptr,
    logits_ptr,
    tokens,
    eps,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N of the router's EXPERTS rows by BLOCK_M tokens over one split of the columns.

    Rows and tokens past the end repeat the last one and are not stored.
    """
    WIDTH: tl.constexpr = K // SPLIT_K
    split, tile = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_ptr = router_ptr + tl.minimum(row, EXPERTS - 1)[:, None] * K + split * WIDTH
    if PDL:
        for start in tl.static_range(0, WIDTH, BLOCK_K):
            prefetch(rows_ptr + (start + tl.arange(0, BLOCK_K // 64) * 64)[None, :])
            if HAS_NORM:
                prefetch(norm_ptr + split * WIDTH + start + tl.arange(0, BLOCK_K // 64) * 64)
        pdl_sync(PDL)
    tokens_ptr = residual_ptr + tl.minimum(token, tokens - 1)[:, None] * K
    if HAS_NORM:
        factors = _rms_factors(tokens_ptr, eps, K, BLOCK_M, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=NUM_STAGES):
        column = split * WIDTH + start + tl.arange(0, BLOCK_K)[None, :]
        weight = tl.load(rows_ptr + start + tl.arange(0, BLOCK_K)[None, :])
        hidden = tl.load(tokens_ptr + column)
        if HAS_NORM:
            normalized = round_before_weight(hidden.to(tl.float32) * factors, norm_ptr, hidden.dtype)
            hidden = (normalized * tl.load(norm_ptr + column).to(tl.float32)).to(hidden.dtype)
            # Every program computes all of it; each writes a part.
            is_writer = start // BLOCK_K % ROW_TILES == tl.program_id(1)
            tl.store(hidden_ptr + token[:, None] * K + column, hidden, mask=(token < tokens)[:, None] & is_writer)
        acc = tl.dot(hidden, tl.trans(weight), acc)
    logits_ptrs = logits_ptr + (split * tokens + token)[:, None] * EXPERTS + row[None, :]
    tl.store(logits_ptrs, acc, mask=(token < tokens)[:, None] & (row < EXPERTS)[None, :])


def select_config(tokens: int, k: int, shared_bytes: int, *, has_norm: bool) -> GemmConfig:
    """Return the fastest configuration, as measured for Qwen3.5-35B-A3B's router.

    A program has `shared_bytes` of shared memory. With `has_norm` the kernel normalizes, which takes longer the more
    tokens a tile has.
    """
    block_k = min(256, k & -k)
    split_k = max(splits for splits in (1, 2, 4) if k // block_k % splits == 0)
    config = GemmConfig(16, 32, block_k, 3, 4, split_k)
    large_bytes = config.num_stages * (64 + config.block_n) * block_k * 2
    return config._replace(block_m=64) if tokens > 16 and not has_norm and large_bytes <= shared_bytes else config


def _launch_router(
    residual: torch.Tensor, norm: Norm | None, router: torch.Tensor, config: GemmConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm(residual) and the partial sums of its logits, [splits, tokens, rows of the router] float32."""
    (tokens, k), rows, device = residual.shape, router.shape[0], residual.device
    config = config or select_config(tokens, k, shared_memory_bytes(device), has_norm=norm is not None)
    row_tiles = triton.cdiv(rows, config.block_n)
    hidden = torch.empty_like(residual) if norm else residual
    logits = torch.empty(config.split_k, tokens, rows, dtype=torch.float32, device=device)
    norm_weight, eps = norm or (router, 0.0)
    _router_kernel[(config.split_k, row_tiles, triton.cdiv(tokens, config.block_m))](
        residual,
        norm_weight,
        router,
        hidden,
        logits,
        tokens,
        eps,
        K=k,
        EXPERTS=rows,
        ROW_TILES=row_tiles,
        SPLIT_K=config.split_k,
        HAS_NORM=norm is not None,
        **config.constants,
        **pdl_options(device),
    )
    return hidden, logits
