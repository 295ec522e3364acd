"""Sums over the ranks of a group in one launch, for sizes at which a message takes longer to begin than to pass.

Words go through inboxes in every rank's memory (kernels/inbox.py). In one shot: a rank writes its values into all
others, waits for theirs in its own, and adds them up: one way over the link. In two: every rank gets a slice of each
row from all others, adds it up, and sends the sum to all: twice the way, and with 8 ranks a quarter of the words.
Either gives every rank the same bits: in one shot all add alike, in two a number is added up by one rank alone. What
a layer does next with a sum goes along: it is added to the residual stream, and that is normalised, a program a row.
So may what a rank does before: a token's share is the sum over its experts.

The torch body that says what is computed is `sum_of_shares`, then `rms_norm`; without inboxes, collectives of
torch.distributed do it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.inbox import (
    EVERY_PART,
    GRAIN,
    GRAIN_WARPS,
    GRAINS,
    LOOKS,
    Parts,
    Peers,
    arrived,
    place_of,
    receive,
    send,
    send_to_all,
    sendable,
)
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm, before_weight, rms_norm
from meltcore.kernels.overlap import overlaps

# Of a row that is normalised, and of what its program waits for: more would not fit into a program's registers.
_MOST_ROW_GRAINS, _MOST_GRAINS_AWAITED = 8, 32
_MOST_WARPS = 16
_MOST_PROGRAMS = 256
# More programs than this look into the inbox less often. Where 256 and more looked without a pause, 1 MiB took 0.7 to
# 0.9 ms in some graphs and 8 us in others (two H200s): as long as it takes until they all go for the host's word, when
# for once nobody looks. What comes over the link seems to wait for that. With the pause: 8.2 and 8.8 us.
_MOST_RESTLESS, _PAUSE_NS = 128, 200
MOST_BYTES = GRAINS * GRAIN * 4  # of a message to add up
MOST_NUMBERS = GRAINS * GRAIN // 4  # of 64 bits, to find the largest of
_MULTIPLE_BYTES = 16  # read at once
# What two shots must spare a rank to send. On four H200s the second way takes 2 us and more: 512 KiB, of which it would
# spare 768, are faster in one shot, 1 MiB in two.
_WORTH_A_SECOND_WAY = 1152 * 1024


def suits_peers(values: torch.Tensor) -> bool:
    size = values.numel() * values.element_size()
    return size <= MOST_BYTES and size % _MULTIPLE_BYTES == 0 and values.is_contiguous()


def suits_rows(share: torch.Tensor, ranks: int) -> bool:
    """Whether a sum of shares [rows, size] can be normalised in the same launch."""
    grains = _grains(_row(share))
    within = grains <= _MOST_ROW_GRAINS and grains * ranks <= _MOST_GRAINS_AWAITED
    whole = share.shape[1] * share.element_size() % _MULTIPLE_BYTES == 0
    return within and whole and len(share) * grains <= GRAINS and suits_peers(share)


def sum_of_shares(shares: list[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """The specification: a sum in float32 in the order of ranks, rounded once; with `residual`, after adding it."""
    total = torch.stack([share.float() for share in shares]).sum(0)
    return (total if residual is None else residual.float() + total).to(shares[0].dtype)


def normalised_sum_of_shares(
    shares: list[torch.Tensor], norm: Norm, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of a sum with its norm: `rms_norm` of the sum as it was rounded."""
    total = sum_of_shares(shares, residual)
    return total, rms_norm(total, *norm)


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The one or two numbers of each word, as float32: lower half first; twice the same where a number fills it."""
    if dtype == tl.float32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _words(low, high, dtype: tl.constexpr):
    """`_halves`, the other way round."""
    if dtype == tl.float32:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        words |= high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32) << 16
    return words


@triton.jit
def _normalised(
    words, low_weight, high_weight, weight_ptr, eps, DTYPE: tl.constexpr, NUMBERS: tl.constexpr, ROW: tl.constexpr
):
    """A row of words normalised as kernels/norm.py does it; zeros stand past its end."""
    low, high = _halves(words, DTYPE)
    squares = low * low
    if NUMBERS == 2:
        squares += high * high
    scale = tl.rsqrt(tl.sum(squares) / (ROW * NUMBERS) + eps)
    low = before_weight(low * scale, weight_ptr, DTYPE) * low_weight
    high = before_weight(high * scale, weight_ptr, DTYPE) * high_weight
    return _words(low, high, DTYPE)


@triton.jit
def _weights(weight_ptr, column, NUMBERS: tl.constexpr, ROW: tl.constexpr):
    """Of the lower and the upper numbers of a row's words; nobody writes weights, so nothing is waited for."""
    weight = weight_ptr + column * NUMBERS
    low = tl.load(weight, mask=column < ROW, other=0.0).to(tl.float32)
    return low, tl.load(weight + NUMBERS - 1, mask=column < ROW, other=0.0).to(tl.float32)


@triton.jit
def _total(every, before, DTYPE: tl.constexpr, ADDED: tl.constexpr):
    """The sum over the first dimension of words; ADDED: to the words before."""
    lows, highs = _halves(every, DTYPE)
    low, high = tl.sum(lows, axis=0), tl.sum(highs, axis=0)
    if ADDED:
        low_before, high_before = _halves(before, DTYPE)
        low += low_before
        high += high_before
    return _words(low, high, DTYPE)


@triton.jit
def _share_of(
    values_ptr,
    choice_weights_ptr,
    row,
    column,
    inside,
    DTYPE: tl.constexpr,
    CHOICES: tl.constexpr,
    ROW: tl.constexpr,
):
    """Words of this rank's share of a row, rounded: as they stand, or added up over a token's choices."""
    if CHOICES == 0:
        words = tl.load(values_ptr + row * ROW + column, mask=inside, other=0)
    else:
        low, high = tl.zeros(column.shape, dtype=tl.float32), tl.zeros(column.shape, dtype=tl.float32)
        for choice in tl.static_range(CHOICES):
            pair = row * CHOICES + choice
            weight = tl.load(choice_weights_ptr + pair)
            lows, highs = _halves(tl.load(values_ptr + pair * ROW + column, mask=inside, other=0), DTYPE)
            low += weight * lows
            high += weight * highs
        words = _words(low, high, DTYPE)
    return sendable(words)


@triton.jit(do_not_specialize=["words"])
def _peer_sum_kernel(
    values_ptr,
    choice_weights_ptr,
    output_ptr,
    normalised_ptr,
    weight_ptr,
    addresses_ptr,
    steps_ptr,
    words,
    eps,
    DTYPE: tl.constexpr,
    NUMBERS: tl.constexpr,
    CHOICES: tl.constexpr,
    ADDED: tl.constexpr,
    NORMALISED: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOKS: tl.constexpr,
    SENDS: tl.constexpr,
    ADDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    PAUSE_NS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROW words of NUMBERS numbers. Values and outputs come as int32; ADDED: to what is in the output.

    CHOICES: not zero where a row is the sum of so many, weighted. SENDS, ADDS and RECEIVES: see `Parts`.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if NORMALISED:
        low_weight, high_weight = _weights(weight_ptr, column, NUMBERS, ROW)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    grain = program * (BLOCK // GRAIN) + column // GRAIN
    steps = tl.load(steps_ptr + grain) + 1
    word = program * ROW + column
    inside = (column < ROW) & (word < words // 4 * 4)  # tells the compiler that a mask never parts 16 bytes
    own = _share_of(values_ptr, choice_weights_ptr, program, column, inside, DTYPE, CHOICES, ROW)
    SLICE: tl.constexpr = BLOCK // RANKS
    if SENDS:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                theirs = inside & (column // SLICE == rank) if TWO_SHOTS else inside
                send(own, theirs, addresses_ptr, rank, column, grain, steps, RANK, RANKS, GRAIN)
    if ADDS and TWO_SHOTS:
        _add_slice(
            values_ptr, choice_weights_ptr, output_ptr, addresses_ptr, steps_ptr, words, program,
            DTYPE, CHOICES, ADDED, RANK, RANKS, ROW, SLICE, GRAIN, LOOKS, PAUSE_NS,
        )  # fmt: skip
    if RECEIVES:
        if TWO_SHOTS:
            place = place_of(addresses_ptr, RANK, column // SLICE, column, grain, steps, RANKS, GRAIN)
            total = arrived(place, inside, addresses_ptr, RANKS, LOOKS, PAUSE_NS)
        else:
            before = tl.load(output_ptr + word, mask=inside, other=0) if ADDED else own
            every = receive(own, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN, LOOKS, PAUSE_NS)
            total = _total(every, before, DTYPE, ADDED)
        tl.store(output_ptr + word, total, mask=inside)
        if NORMALISED:
            normalised = _normalised(total, low_weight, high_weight, weight_ptr, eps, DTYPE, NUMBERS, ROW)
            tl.store(normalised_ptr + word, normalised, mask=inside)
        tl.store(steps_ptr + grain, steps, mask=column % GRAIN == 0)


@triton.jit
def _add_slice(
    values_ptr,
    choice_weights_ptr,
    output_ptr,
    addresses_ptr,
    steps_ptr,
    words,
    program,
    DTYPE: tl.constexpr,
    CHOICES: tl.constexpr,
    ADDED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    SLICE: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOKS: tl.constexpr,
    PAUSE_NS: tl.constexpr,
):
    """Add up our slice of a row, and send the sum to all, to ourselves too: there all slices are waited for alike."""
    column = RANK * SLICE + tl.arange(0, SLICE)
    grain = program * (ROW // GRAIN) + column // GRAIN
    steps = tl.load(steps_ptr + grain) + 1
    word = program * ROW + column
    inside = word < words // 4 * 4
    own = _share_of(values_ptr, choice_weights_ptr, program, column, inside, DTYPE, CHOICES, ROW)
    before = tl.load(output_ptr + word, mask=inside, other=0) if ADDED else own
    every = receive(own, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN, LOOKS, PAUSE_NS)
    total = _total(every, before, DTYPE, ADDED)
    send_to_all(sendable(total), inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN)


@triton.jit(do_not_specialize=["count"])
def _largest_kernel(
    values_ptr,
    addresses_ptr,
    steps_ptr,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOKS: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
):
    """One program: a grain, GRAIN / 4 int64, each as four words of 16 bits, none EMPTY; lowest bits first."""
    QUARTER: tl.constexpr = GRAIN // 4
    program = tl.program_id(0)
    column = tl.arange(0, GRAIN)
    grain = program + tl.zeros_like(column)
    steps = tl.load(steps_ptr + grain) + 1
    number = program * QUARTER + column % QUARTER
    bit = (16 * (column // QUARTER)).to(tl.int64)
    inside = number < count
    own = tl.load(values_ptr + number, mask=inside, other=0)
    words = ((own >> bit) & 0xFFFF).to(tl.int32)
    if SENDS:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                send(words, inside, addresses_ptr, rank, column, grain, steps, RANK, RANKS, GRAIN)
    if RECEIVES:
        every = receive(words, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN, LOOKS).to(tl.int64)
        best = tl.max(tl.sum(tl.reshape(every << bit[None, :], (RANKS, 4, QUARTER)), axis=1), axis=0)
        number = program * QUARTER + tl.arange(0, QUARTER)
        tl.store(values_ptr + number, best, mask=number < count)
        tl.store(steps_ptr + grain, steps, mask=column == 0)


_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def peer_sum(
    share: torch.Tensor, peers: Peers, residual: torch.Tensor | None = None, *, parts: Parts = EVERY_PART
) -> torch.Tensor:
    """The sum of all ranks' shares, in the memory of `share`; or residual + that sum, in the memory of `residual`.

    share, residual: contiguous, of one shape and floating type, `suits_peers`. All ranks call it together.
    """
    output = share if residual is None else residual
    grains = triton.cdiv(share.numel() * share.element_size() // 4, GRAIN)
    row = triton.cdiv(grains, _MOST_PROGRAMS) * GRAIN
    _launch_sum(share, None, peers, output, None, None, row, parts, added=residual is not None)
    return output


def peer_sum_normalised(
    share: torch.Tensor,
    peers: Peers,
    norm: Norm,
    residual: torch.Tensor | None = None,
    *,
    parts: Parts = EVERY_PART,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `peer_sum` returns, and that normalised. share: [rows, size], `suits_rows`."""
    output = share if residual is None else residual
    normalised = torch.empty_like(share)
    _launch_sum(share, None, peers, output, normalised, norm, _row(share), parts, added=residual is not None)
    return output, normalised


def peer_sum_of_choices(
    outputs: torch.Tensor,
    peers: Peers,
    weights: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor,
    *,
    parts: Parts = EVERY_PART,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`peer_sum_normalised` where a rank's share of a row is the weighted sum of a token's outputs, rounded.

    outputs: [tokens * choices, size], contiguous; weights: [tokens, choices] float32; residual: [tokens, size],
    `suits_rows`, of the type of `outputs`.
    """
    normalised = torch.empty_like(residual)
    _launch_sum(outputs, weights, peers, residual, normalised, norm, _row(residual), parts, added=True)
    return residual, normalised


def _launch_sum(
    values: torch.Tensor,
    choice_weights: torch.Tensor | None,
    peers: Peers,
    output: torch.Tensor,
    normalised: torch.Tensor | None,
    norm: Norm | None,
    row: int,
    parts: Parts,
    *,
    added: bool,
) -> None:
    """row: words of a program."""
    if output.numel() == 0:
        return
    words = _as_words(output)
    block = _grains(row) * GRAIN
    overlap, programs = overlaps(output.device), triton.cdiv(words.numel(), row)
    _peer_sum_kernel[(programs,)](
        _as_words(values),
        words if choice_weights is None else choice_weights,
        words,
        words if normalised is None else _as_words(normalised),
        words if norm is None else norm.weight,
        peers.addresses,
        peers.steps,
        words.numel(),
        0.0 if norm is None else norm.eps,
        DTYPE=getattr(tl, _DTYPES[output.dtype]),
        NUMBERS=4 // output.element_size(),
        CHOICES=0 if choice_weights is None else choice_weights.shape[1],
        ADDED=added,
        NORMALISED=norm is not None,
        TWO_SHOTS=row == block and _in_two_shots(words.numel() * 4, peers.ranks),  # else a slice may be empty
        RANK=peers.rank,
        RANKS=peers.ranks,
        ROW=row,
        BLOCK=block,
        GRAIN=GRAIN,
        LOOKS=LOOKS,
        SENDS=parts.sends,
        ADDS=parts.adds,
        RECEIVES=parts.receives,
        PAUSE_NS=_PAUSE_NS if programs > _MOST_RESTLESS else 0,
        OVERLAP=overlap,
        num_warps=min(_MOST_WARPS, block // GRAIN * GRAIN_WARPS),
        **({"launch_pdl": True} if overlap else {}),
    )


def _in_two_shots(size: int, ranks: int) -> bool:
    """Whether so many bytes go faster that way."""
    spared = size * (ranks - 1) - size * 2 * (ranks - 1) // ranks
    return spared >= _WORTH_A_SECOND_WAY


def peer_largest(values: torch.Tensor, peers: Peers, *, parts: Parts = EVERY_PART) -> torch.Tensor:
    """The largest of all ranks' values, one by one, in place. values: [count] int64, at most MOST_NUMBERS."""
    if values.numel():
        _largest_kernel[(triton.cdiv(values.numel(), GRAIN // 4),)](
            values,
            peers.addresses,
            peers.steps,
            values.numel(),
            RANK=peers.rank,
            RANKS=peers.ranks,
            GRAIN=GRAIN,
            LOOKS=LOOKS,
            SENDS=parts.sends,
            RECEIVES=parts.receives,
            num_warps=GRAIN_WARPS,
        )
    return values


def _row(values: torch.Tensor) -> int:
    """Words of a row of [rows, size]."""
    return values.shape[1] * values.element_size() // 4


def _grains(row: int) -> int:
    """That a program of so many words takes: a power of two, since its columns are."""
    return triton.next_power_of_2(triton.cdiv(row, GRAIN))


def _as_words(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1).view(torch.int32)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    share = torch.empty(8, model.hidden_size, dtype=dtype, device="meta")
    addresses, steps = (torch.empty(9, dtype=kind, device="meta") for kind in (torch.int64, torch.int32))
    peers = Peers(addresses, steps, 3, steps)
    keys = torch.empty(64, dtype=torch.int64, device="meta")
    wide = Norm(torch.empty(model.hidden_size, dtype=torch.float32, device="meta"), 1e-6)
    many = torch.empty(_MOST_RESTLESS + 1, model.hidden_size, dtype=dtype, device="meta")
    large = [lambda: peer_sum_normalised(many, peers, wide)] if suits_rows(many, peers.ranks) else []
    choices = torch.empty(8, model.choices + model.shared_expert, device="meta")
    outputs = torch.empty(choices.numel(), model.hidden_size, dtype=dtype, device="meta")
    of_experts = [lambda: peer_sum_of_choices(outputs, peers, choices, wide, share)] if model.experts else []
    return [
        *large,
        *of_experts,
        lambda: peer_sum(share, peers, share),
        lambda: peer_sum(share, peers),
        lambda: peer_sum_normalised(share, peers, Norm(share[0], 1e-6), share),
        lambda: peer_sum_normalised(share, peers, wide),
        lambda: peer_largest(keys, peers),
    ]
