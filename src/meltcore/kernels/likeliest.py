"""Top-k, top-p (nucleus) and min-p without sorting the vocabulary.

Put a row's tokens in order: falling logit, and among equals rising id. Each filter keeps a beginning of that order, so
all that has to be found is its last token. Equal logits are common in 16-bit types, which is why ids take part.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.sampling import check_rows

KEEP_ALL = -1
# A tile of [PARTS, BLOCK] logits, summed over PARTS inside each thread.
_PARTS, _BLOCK, _WARPS = 2, 4096, 16
# Low bits of a float32 that are zero for every value of a type.
_FREE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}


def last_kept(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The last token that top-k, top-p and min-p keep, in that order, each on what the one before kept.

    logits: [rows, vocab] of any floating type, before the temperature; temperatures: [rows] float32, above 0; top_k:
    [rows] int64, 0 for off; top_p, min_p: [rows] float32, 1 and 0 for off. Top-p keeps the token that crosses it, and
    the likeliest token always stays. Returns [rows] int64, KEEP_ALL where all three are off.
    """
    body = _last_kept_triton if use_triton(logits) else _last_kept_torch
    return body(logits, temperatures, top_k, top_p, min_p)


def _last_kept_torch(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    vocab = logits.shape[1]
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    drop = ranks >= torch.where(top_k > 0, top_k, vocab)[:, None]
    probabilities = (ordered / temperatures[:, None]).masked_fill(drop, float("-inf")).softmax(-1)
    # The mass before a token decides: the token that crosses top_p is kept.
    before = probabilities.cumsum(-1) - probabilities
    drop |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
    # Against the likeliest of what is left, whose share of the whole does not matter to the ratio.
    drop |= probabilities < min_p[:, None] * probabilities[:, :1]
    drop[:, 0] = False
    last = order.gather(1, (~drop).sum(-1, keepdim=True) - 1)[:, 0]
    return torch.where((top_k > 0) | (top_p < 1) | (min_p > 0), last, KEEP_ALL)


@triton.jit
def _float_of(key):
    """The float32 of an int32 key. Keys are in the order of their numbers: a negative one's bits, all but the sign, are
    turned over."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _next_above(number):
    bits = number.to(tl.int32, bitcast=True)
    return _float_of((bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 1)


@triton.jit
def _tile(row_ptr, start, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens and logits [PARTS, BLOCK] from `start` on; -inf past the end."""
    token = start + tl.arange(0, PARTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return token, tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights_from(
    row_ptr,
    vocab,
    least_0,
    least_1,
    least_2,
    maximum,
    per_logit,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the tokens with at least each of three logits weigh together: 1 each, or 2^((logit - maximum) * per_logit),
    their probability up to a factor."""
    sum_0 = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_1 = tl.zeros((BLOCK,), dtype=tl.float32)
    sum_2 = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, vocab, PARTS * BLOCK):
        token, values = _tile(row_ptr, start, vocab, PARTS, BLOCK)
        if COUNT:
            weights = (token < vocab).to(tl.float32)
        else:
            weights = tl.exp2((values - maximum) * per_logit)
        sum_0 += tl.sum(tl.where(values >= least_0, weights, 0.0), axis=0)
        sum_1 += tl.sum(tl.where(values >= least_1, weights, 0.0), axis=0)
        sum_2 += tl.sum(tl.where(values >= least_2, weights, 0.0), axis=0)
    return tl.sum(sum_0, axis=0), tl.sum(sum_1, axis=0), tl.sum(sum_2, axis=0)


@triton.jit
def _boundary(
    row_ptr,
    vocab,
    target,
    maximum,
    per_logit,
    COUNT: tl.constexpr,
    FREE_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit such that it and all above weigh at least `target`, the lowest if none does; and the weight
    of what is above.

    Two bits of its key are found in each pass over the row, highest first.
    """
    key = tl.full((), -(2**31), dtype=tl.int32)
    above = tl.full((), 0.0, dtype=tl.float32)
    for step in tl.range(0, (32 - FREE_BITS) // 2):
        unit = tl.full((), 1, dtype=tl.int32) << (30 - 2 * step)
        key_0 = key + unit
        key_1 = key_0 + unit
        key_2 = key_1 + unit
        weight_0, weight_1, weight_2 = _weights_from(
            row_ptr,
            vocab,
            _float_of(key_0),
            _float_of(key_1),
            _float_of(key_2),
            maximum,
            per_logit,
            COUNT,
            PARTS,
            BLOCK,
        )
        above = tl.where(
            weight_2 >= target,
            above,
            tl.where(weight_1 >= target, weight_2, tl.where(weight_0 >= target, weight_1, weight_0)),
        )
        key = tl.where(
            weight_2 >= target,
            key_2,
            tl.where(weight_1 >= target, key_1, tl.where(weight_0 >= target, key_0, key)),
        )
    # The bits that are free in a type are zero in its numbers, and so one in the keys of the negative ones.
    key = tl.where(key < 0, key | ((1 << FREE_BITS) - 1), key)
    return _float_of(tl.maximum(key, -0x7F800001)), above  # no lower than -inf


@triton.jit
def _lowest_or_largest(row_ptr, vocab, least, LOWEST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The row's lowest logit that is at least `least`, or its largest."""
    best = tl.full((BLOCK,), float("inf") if LOWEST else float("-inf"), dtype=tl.float32)
    for start in tl.range(0, vocab, PARTS * BLOCK):
        _, values = _tile(row_ptr, start, vocab, PARTS, BLOCK)
        if LOWEST:
            best = tl.minimum(best, tl.min(tl.where(values >= least, values, float("inf")), axis=0))
        else:
            best = tl.maximum(best, tl.max(values, axis=0))
    return tl.min(best, axis=0) if LOWEST else tl.max(best, axis=0)


@triton.jit
def _nth_equal(row_ptr, vocab, logit, count, BLOCK: tl.constexpr):
    """The id of the count-th token with this logit, or of the last if there are fewer."""
    found = tl.full((), 0, dtype=tl.int32)
    last = tl.full((), 0, dtype=tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + token, mask=token < vocab, other=float("nan")).to(tl.float32)
        equal = (values == logit).to(tl.int32)
        here = tl.sum(equal, axis=0)
        if (found < count) & (here > 0):
            wanted = (equal > 0) & (tl.cumsum(equal, axis=0) <= count - found)
            last = tl.max(tl.where(wanted, token, 0), axis=0)
        found += here
    return last


# Settings start anywhere: without this, each new alignment would be compiled for anew.
@triton.jit(do_not_specialize=["temperatures_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"])
def _last_kept_kernel(
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
    """One program: one row. What a row does not ask for costs it no pass."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    result = tl.full((), KEEP_ALL, dtype=tl.int32)
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        per_logit = 1.4426950408889634 / tl.load(temperatures_ptr + row)
        maximum = _lowest_or_largest(row_ptr, vocab, 0.0, False, PARTS, BLOCK)
        # Kept is what lies above a logit, and this many of the tokens that have it.
        logit = tl.full((), float("-inf"), dtype=tl.float32)
        equals = tl.full((), 1 << 30, dtype=tl.int32)
        if top_k > 0:
            wanted = tl.minimum(top_k, vocab).to(tl.float32)
            logit, above = _boundary(row_ptr, vocab, wanted, maximum, per_logit, True, FREE_BITS, PARTS, BLOCK)
            equals = (wanted - above).to(tl.int32)
        if top_p < 1:
            higher, whole, _ = _weights_from(
                row_ptr, vocab, _next_above(logit), logit, maximum, maximum, per_logit, False, PARTS, BLOCK
            )
            if top_k > 0:
                whole = higher + equals.to(tl.float32) * tl.exp2((logit - maximum) * per_logit)
            wanted = top_p * whole
            nucleus, above = _boundary(row_ptr, vocab, wanted, maximum, per_logit, False, FREE_BITS, PARTS, BLOCK)
            share = (wanted - above) / tl.exp2((nucleus - maximum) * per_logit)
            needed = tl.minimum(tl.maximum(tl.ceil(share), 1.0), 1 << 30).to(tl.int32)
            # A nucleus that by rounding would reach beyond what top-k kept ends with it.
            equals = tl.where(nucleus > logit, needed, tl.where(nucleus == logit, tl.minimum(needed, equals), equals))
            logit = tl.maximum(nucleus, logit)
        if min_p > 0:
            least = tl.minimum(maximum + tl.log2(min_p) / per_logit, maximum)
            if least > logit:
                logit = _lowest_or_largest(row_ptr, vocab, least, True, PARTS, BLOCK)
                equals = tl.full((), 1 << 30, dtype=tl.int32)
        result = _nth_equal(row_ptr, vocab, logit, equals, BLOCK)
    tl.store(output_ptr + row, result.to(tl.int64))


def _last_kept_triton(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    parts: int = _PARTS,
    warps: int = _WARPS,
) -> torch.Tensor:
    rows, vocab = logits.shape
    output = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return output
    check_rows(logits)
    _last_kept_kernel[(rows,)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        output,
        vocab,
        logits.stride(0),
        KEEP_ALL=KEEP_ALL,
        FREE_BITS=_FREE_BITS[logits.dtype],
        PARTS=parts,
        BLOCK=_BLOCK,
        num_warps=warps,
    )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    logits = torch.empty(64, 151936, dtype=dtype, device="meta")
    settings = torch.empty(64, device="meta")
    top_k = torch.empty(64, dtype=torch.int64, device="meta")
    return [lambda: _last_kept_triton(logits, settings, top_k, settings, settings)]
