"""Filters tokens by top-k, top-p (nucleus) and min-p without sorting the vocabulary.

Order a row's tokens by descending logit, and tokens of equal logits by ascending id. Each filter keeps a prefix of that
order, so only its last token has to be found, the threshold token. Equal logits are common in 16-bit types, so ids take
part.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton
from meltcore.kernels.sampling.argmax import require_contiguous_rows

KEEP_ALL = -1
# A tile of [PARTS, BLOCK] logits, summed over PARTS inside each thread.
_PARTS, _BLOCK, _WARPS = 2, 4096, 16
# Low bits of a float32 that are zero for every value of a type.
_FREE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}


def threshold_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the least probable token of each row that top-k, top-p and min-p keep.

    The filters apply in this order, each to the tokens that the previous filter kept. Top-p keeps the token whose
    probability crosses the limit. The token with the largest logit is always kept.

    Args:
        logits: [rows, vocab] of any floating type, before division by the temperature.
        temperatures: [rows] float32, above 0.
        top_k: [rows] int64; 0 turns the filter off.
        top_p: [rows] float32; 1 turns the filter off.
        min_p: [rows] float32; 0 turns the filter off.

    Returns [rows] int64. A row without any filter returns KEEP_ALL.
    """
    if not use_triton(logits):
        return _threshold_tokens_reference(logits, temperatures, top_k, top_p, min_p)
    rows, vocab = logits.shape
    output = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return output
    require_contiguous_rows(logits)
    _top_k_top_p_kernel[(rows,)](
        *(logits, temperatures, top_k, top_p, min_p, output, vocab, logits.stride(0)),
        KEEP_ALL=KEEP_ALL,
        FREE_BITS=_FREE_BITS[logits.dtype],
        PARTS=_PARTS,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return output


def _threshold_tokens_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    vocab = logits.shape[1]
    sorted_logits, sorted_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    is_excluded = ranks >= torch.where(top_k > 0, top_k, vocab)[:, None]
    probabilities = (sorted_logits / temperatures[:, None]).masked_fill(is_excluded, float("-inf")).softmax(-1)
    # The mass before a token decides: the token that crosses top_p is kept.
    mass_before = probabilities.cumsum(-1) - probabilities
    is_excluded |= (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    # Relative to the largest probability left; their common factor cancels in the ratio.
    is_excluded |= probabilities < min_p[:, None] * probabilities[:, :1]
    is_excluded[:, 0] = False
    last_kept = sorted_ids.gather(1, (~is_excluded).sum(-1, keepdim=True) - 1)[:, 0]
    return torch.where((top_k > 0) | (top_p < 1) | (min_p > 0), last_kept, KEEP_ALL)


@triton.jit
def _key_to_float(key):
    """Convert an int32 key to its float32.

    Keys are ordered as their floats: the bits of a negative one, except the sign, are inverted.
    """
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _nextafter(number):
    bits = number.to(tl.int32, bitcast=True)
    return _key_to_float((bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 1)


@triton.jit
def _load_tile(row_ptr, start, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Load tokens and logits [PARTS, BLOCK] from `start` on, with -inf past the end."""
    token = start + tl.arange(0, PARTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return token, tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights_from(
    row_ptr,
    vocab,
    bound_0,
    bound_1,
    bound_2,
    maximum,
    log2_scale,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return, for each of three bounds, the total weight of the tokens whose logit is at least the bound.

    A token's weight is 1 with COUNT, else 2^((logit - maximum) * log2_scale), its probability up to a factor.
    """
    sum_0 = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_1 = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_2 = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, vocab, PARTS * BLOCK):
        token, values = _load_tile(row_ptr, start, vocab, PARTS, BLOCK)
        if COUNT:
            weights = (token < vocab).to(tl.float32)
        else:
            weights = tl.exp2((values - maximum) * log2_scale)
        sum_0 += tl.sum(tl.where(values >= bound_0, weights, 0.0), axis=0)
        sum_1 += tl.sum(tl.where(values >= bound_1, weights, 0.0), axis=0)
        sum_2 += tl.sum(tl.where(values >= bound_2, weights, 0.0), axis=0)
    return tl.sum(sum_0, axis=0), tl.sum(sum_1, axis=0), tl.sum(sum_2, axis=0)


@triton.jit
def _boundary(
    row_ptr,
    vocab,
    target,
    maximum,
    log2_scale,
    COUNT: tl.constexpr,
    FREE_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest logit such that tokens with at least this logit weigh `target`, and the weight above it.

    If all tokens together weigh less than `target`, it is the lowest logit.

    Each pass over the row finds two bits of its key, highest first.
    """
    key = tl.full((), -(2**31), dtype=tl.int32)
    weight_above = tl.full((), 0.0, dtype=tl.float32)
    for step in tl.range(0, (32 - FREE_BITS) // 2):
        key_step = tl.full((), 1, dtype=tl.int32) << (30 - 2 * step)
        key_0 = key + key_step
        key_1 = key_0 + key_step
        key_2 = key_1 + key_step
        weight_0, weight_1, weight_2 = _weights_from(
            row_ptr,
            vocab,
            _key_to_float(key_0),
            _key_to_float(key_1),
            _key_to_float(key_2),
            maximum,
            log2_scale,
            COUNT,
            PARTS,
            BLOCK,
        )
        weight_above = tl.where(
            weight_2 >= target,
            weight_above,
            tl.where(weight_1 >= target, weight_2, tl.where(weight_0 >= target, weight_1, weight_0)),
        )
        key = tl.where(
            weight_2 >= target,
            key_2,
            tl.where(weight_1 >= target, key_1, tl.where(weight_0 >= target, key_0, key)),
        )
    # The free bits of a type are 0 in its numbers, and so 1 in the keys of negative ones.
    key = tl.where(key < 0, key | ((1 << FREE_BITS) - 1), key)
    return _key_to_float(tl.maximum(key, -0x7F800001)), weight_above  # no lower than -inf


@triton.jit
def _lowest_or_largest(row_ptr, vocab, min_logit, LOWEST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row's lowest logit that is at least `min_logit` if LOWEST, else its largest logit."""
    best = tl.full((BLOCK,), float("inf") if LOWEST else float("-inf"), dtype=tl.float32)
    for start in tl.range(0, vocab, PARTS * BLOCK):
        _, values = _load_tile(row_ptr, start, vocab, PARTS, BLOCK)
        if LOWEST:
            best = tl.minimum(best, tl.min(tl.where(values >= min_logit, values, float("inf")), axis=0))
        else:
            best = tl.maximum(best, tl.max(values, axis=0))
    return tl.min(best, axis=0) if LOWEST else tl.max(best, axis=0)


@triton.jit
def _nth_equal(row_ptr, vocab, logit, count, BLOCK: tl.constexpr):
    """Return the id of the count-th token with this logit, or of the last such token if there are fewer."""
    num_seen = tl.full((), 0, dtype=tl.int32)
    last_token = tl.full((), 0, dtype=tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + token, mask=token < vocab, other=float("nan")).to(tl.float32)
        is_equal = (values == logit).to(tl.int32)
        num_in_block = tl.sum(is_equal, axis=0)
        if (num_seen < count) & (num_in_block > 0):
            is_counted = (is_equal > 0) & (tl.cumsum(is_equal, axis=0) <= count - num_seen)
            last_token = tl.max(tl.where(is_counted, token, 0), axis=0)
        num_seen += num_in_block
    return last_token


# Settings are slices at any alignment: specialized on it, each would be compiled anew.
@triton.jit(do_not_specialize=["temperatures_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"])
def _top_k_top_p_kernel(
    logits_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    output_ptr,
    vocab,
    row_stride,
    KEEP_ALL: tl.constexpr,
    FREE_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one row. A filter that is off costs no pass over the logits."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    result = tl.full((), KEEP_ALL, dtype=tl.int32)
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        log2_scale = 1.4426950408889634 / tl.load(temperatures_ptr + row)
        maximum = _lowest_or_largest(row_ptr, vocab, 0.0, False, PARTS, BLOCK)
        # Kept are the tokens above a logit, and this many of those equal to it.
        logit = tl.full((), float("-inf"), dtype=tl.float32)
        num_equal = tl.full((), 1 << 30, dtype=tl.int32)
        if top_k > 0:
            target = tl.minimum(top_k, vocab).to(tl.float32)
            logit, weight_above = _boundary(row_ptr, vocab, target, maximum, log2_scale, True, FREE_BITS, PARTS, BLOCK)
            num_equal = (target - weight_above).to(tl.int32)
        if top_p < 1:
            weight_higher, kept_weight, _ = _weights_from(
                row_ptr, vocab, _nextafter(logit), logit, maximum, maximum, log2_scale, False, PARTS, BLOCK
            )
            if top_k > 0:
                kept_weight = weight_higher + num_equal.to(tl.float32) * tl.exp2((logit - maximum) * log2_scale)
            target = top_p * kept_weight
            nucleus, weight_above = _boundary(
                row_ptr, vocab, target, maximum, log2_scale, False, FREE_BITS, PARTS, BLOCK
            )
            nucleus_count = (target - weight_above) / tl.exp2((nucleus - maximum) * log2_scale)
            num_needed = tl.minimum(tl.maximum(tl.ceil(nucleus_count), 1.0), 1 << 30).to(tl.int32)
            # By rounding a nucleus could reach beyond the tokens that top-k kept: it ends with them.
            num_equal = tl.where(
                nucleus > logit, num_needed, tl.where(nucleus == logit, tl.minimum(num_needed, num_equal), num_equal)
            )
            logit = tl.maximum(nucleus, logit)
        if min_p > 0:
            min_logit = tl.minimum(maximum + tl.log2(min_p) / log2_scale, maximum)
            if min_logit > logit:
                logit = _lowest_or_largest(row_ptr, vocab, min_logit, True, PARTS, BLOCK)
                num_equal = tl.full((), 1 << 30, dtype=tl.int32)
        result = _nth_equal(row_ptr, vocab, logit, num_equal, BLOCK)
    tl.store(output_ptr + row, result.to(tl.int64))
