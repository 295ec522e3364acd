"""Computes the log-probabilities of the best tokens of each beam, in one pass over the logits.

The largest logits of a row lie in the groups with the largest maxima. So one pass finds the maximum of each group and
the sum for the softmax, and a second kernel reads only the k groups with the largest maxima.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.sampling.argmax import require_contiguous_rows

# Logits of a group, and groups of a program: enough programs for a single row.
_GROUP, _GROUPS, _WARPS = 128, 32, 4
_SELECT_WARPS = 2


def log_softmax_top_k(
    logits: torch.Tensor, k: int, token: int, is_forbidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest log-probabilities of each row in descending order, and their tokens.

    Of equal logits the kernel takes the lowest token.

    Args:
        logits: [rows, vocab] of any floating type. Rows may be strided.
        k: at most vocab - 1.
        token: the token that may be forbidden.
        is_forbidden: [rows] bool. In these rows `token` is not selected, but its probability counts in the softmax.

    Returns [rows, k] float32 and [rows, k] int64.
    """
    if not use_triton(logits):
        return log_softmax_top_k_reference(logits, k, token, is_forbidden)
    (rows, vocab), device = logits.shape, logits.device
    log_probs = torch.empty(rows, k, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, k, dtype=torch.int64, device=device)
    if rows == 0:
        return log_probs, tokens
    require_contiguous_rows(logits)
    chunks = triton.cdiv(vocab, _GROUP * _GROUPS)
    maxima = torch.empty(rows, chunks * _GROUPS, dtype=torch.float32, device=device)
    sums = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    _group_maxima_kernel[(rows, chunks)](
        *(logits, is_forbidden, maxima, sums, vocab, logits.stride(0), token),
        GROUP=_GROUP,
        GROUPS=_GROUPS,
        num_warps=_WARPS,
        **pdl_options(device),
    )
    _choose_tokens_kernel[(rows,)](
        *(logits, is_forbidden, maxima, sums, log_probs, tokens, vocab, logits.stride(0), token, chunks),
        K=k,
        K_TILE=triton.next_power_of_2(k),
        GROUP=_GROUP,
        GROUPS=_GROUPS,
        CHUNK_TILE=triton.next_power_of_2(chunks),
        num_warps=_SELECT_WARPS,
        **pdl_options(device),
    )
    return log_probs, tokens


def log_softmax_top_k_reference(
    logits: torch.Tensor, k: int, token: int, is_forbidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `log_softmax_top_k` in PyTorch, as its specification except for the order of equal logits."""
    logits_f32 = logits.float()
    total = logits_f32.logsumexp(dim=-1, keepdim=True)
    is_token = torch.arange(logits.shape[1], device=logits.device) == token
    best, tokens = logits_f32.masked_fill(is_forbidden[:, None] & is_token, -torch.inf).topk(k, dim=-1)
    return best - total, tokens


@triton.jit(do_not_specialize=["token"])
def _group_maxima_kernel(
    logits_ptr,
    is_forbidden_ptr,
    maxima_ptr,
    sums_ptr,
    vocab,
    row_stride,
    token,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the maxima of GROUPS groups of one row, and log(sum(exp)) of the same logits. One program has one chunk.

    The maxima leave the forbidden token out, the sum includes it. If all logits of a chunk are minus infinity, as
    beyond the vocabulary, a finite number stands for the sum.
    """
    pdl_sync(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.arange(0, GROUPS)
    columns = (chunk * GROUPS + group[:, None]) * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(values, axis=1), axis=0), -3.0e38)
    total = tl.sum(tl.sum(tl.exp(values - largest), axis=1), axis=0)
    tl.store(sums_ptr + row * tl.num_programs(1) + chunk, largest + tl.log(tl.maximum(total, 1e-37)))
    is_hidden = (columns == token) & (tl.load(is_forbidden_ptr + row) != 0)
    maxima = tl.max(tl.where(is_hidden, -float("inf"), values), axis=1)
    tl.store(maxima_ptr + (row * tl.num_programs(1) + chunk) * GROUPS + group, maxima)


@triton.jit
def _take_largest(values, ids, limit):
    """Return the largest value, the lowest of its ids, and the values without it. Taken ones are minus infinity."""
    best = tl.max(values, axis=0)
    chosen = tl.min(tl.where(values == best, ids, limit), axis=0)
    return best, chosen, tl.where(ids == chosen, -float("inf"), values)


@triton.jit(do_not_specialize=["token", "chunks"])
def _choose_tokens_kernel(
    logits_ptr,
    is_forbidden_ptr,
    maxima_ptr,
    sums_ptr,
    log_probs_ptr,
    tokens_ptr,
    vocab,
    row_stride,
    token,
    chunks,
    K: tl.constexpr,
    K_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles one row: the K groups with the largest maxima, then the K largest logits of those.

    Of groups with equal maxima the first ones are taken: those that are left have no equal logit of a lower token.
    """
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNK_TILE)
    sums = tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=-3.0e38)
    largest = tl.max(sums, axis=0)
    log_total = largest + tl.log(tl.sum(tl.where(chunk < chunks, tl.exp(sums - largest), 0.0), axis=0))

    groups = tl.arange(0, CHUNK_TILE * GROUPS)
    num_groups = chunks * GROUPS
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
    rank = tl.arange(0, K_TILE)
    chosen = tl.zeros((K_TILE,), tl.int32)
    for i in tl.static_range(K):
        best, group, maxima = _take_largest(maxima, groups, num_groups)
        # Where no group is left, one beyond the vocabulary.
        chosen = tl.where(rank == i, tl.where(best == -float("inf"), num_groups, group), chosen)

    columns = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_read = (rank[:, None] < K) & (columns < vocab)
    is_read = is_read & ((columns != token) | (tl.load(is_forbidden_ptr + row) == 0))
    values = tl.load(logits_ptr + row * row_stride + columns, mask=is_read, other=-float("inf")).to(tl.float32)
    columns = tl.where(rank[:, None] < K, columns, vocab)
    values, columns = tl.reshape(values, (K_TILE * GROUP,)), tl.reshape(columns, (K_TILE * GROUP,))
    log_probs = tl.zeros((K_TILE,), tl.float32)
    tokens = tl.zeros((K_TILE,), tl.int32)
    for i in tl.static_range(K):
        best, column, values = _take_largest(values, columns, vocab)
        log_probs = tl.where(rank == i, best - log_total, log_probs)
        tokens = tl.where(rank == i, tl.minimum(column, vocab - 1), tokens)  # NaN has no largest: still a token
    tl.store(log_probs_ptr + row * K + rank, log_probs, mask=rank < K)
    tl.store(tokens_ptr + row * K + rank, tokens.to(tl.int64), mask=rank < K)
