"""Sums over the ranks of a group in one launch, for sizes at which a message takes longer to begin than to pass.

Every rank has an inbox in its own memory that all others can write to (`Peers`). A rank writes its values into all
others, waits for theirs in its own, and adds them up: one way over the link, and every rank gets the same bits, since
all add in the order of ranks. What a layer does next with a sum goes along: it is added to the residual stream, and
that is normalised, a program a row.

Values travel in words of 32 bits, each beside the number of the step, in one store of 64 that cannot be torn: that a
value is there and what it is are seen at once, so no fence is needed. (NCCL's protocol "LL" does the same.) Steps are
counted for each grain of 512 words, and a grain has a place of its own in the inbox, twice, taken in turns: who writes
a place again has seen its reader take part in the step between, and so be done with the one before. NVLink's multicast
is not used. A rank that waits for one that is gone waits until its host says to give up.

The torch body that says what is computed is `sum_of_shares`, then `rms_norm`; without inboxes, collectives of
torch.distributed do it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm, before_weight, rms_norm
from meltcore.kernels.overlap import overlaps

# Four words a thread, so that a word and its step number of 8 bytes are stored in pairs.
_GRAIN, _GRAIN_WARPS = 512, 4
_GRAINS = 512
# Of a row that is normalised, and of what its program waits for: more would not fit into a program's registers.
_MOST_ROW_GRAINS, _MOST_GRAINS_AWAITED = 8, 32
_MOST_WARPS = 16
_MOST_PROGRAMS = 256
# More programs than this look into the inbox less often. Where 256 and more looked without a pause, 1 MiB took 0.7 to
# 0.9 ms in some graphs and 8 us in others (two H200s): as long as it takes until they all go for the host's word, when
# for once nobody looks. What comes over the link seems to wait for that. With the pause: 8.2 and 8.8 us.
_MOST_RESTLESS, _PAUSE_NS = 128, 200
MOST_BYTES = _GRAINS * _GRAIN * 4  # of a message to add up
MOST_NUMBERS = _GRAINS * _GRAIN // 2  # of 64 bits, to find the largest of
_MULTIPLE_BYTES = 16  # read at once
# Looks into the inbox between two at the host's word, which lies behind PCIe: every half a millisecond or so.
_LOOKS = 1024


class Peers(NamedTuple):
    """addresses: [ranks + 1] int64, of each rank's inbox on this device, then of our own host's word; steps: [grains]
    int32, zeros at first, as the inboxes are; rank: our own; word: [1] int32, host memory that the device can read, not
    zero once sums are to be given up: what they return from then on means nothing."""

    addresses: torch.Tensor
    steps: torch.Tensor
    rank: int
    word: torch.Tensor
    inbox: torch.Tensor | None = None  # what some of the addresses are of, kept for as long as they are used

    @property
    def ranks(self) -> int:
        return self.addresses.shape[0] - 1

    def give_up(self) -> None:
        """Let the device get past all sums that wait for ranks that are gone."""
        self.word.fill_(1)


def inbox_bytes(ranks: int) -> int:
    return _GRAINS * 2 * ranks * _GRAIN * 8


def make_peers(inboxes: list[int], rank: int, device: torch.device) -> Peers:
    """inboxes: the address of each rank's on this device."""
    word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    addresses = torch.tensor([*inboxes, word.data_ptr()], dtype=torch.int64, device=device)
    return Peers(addresses, torch.zeros(_GRAINS, dtype=torch.int32, device=device), rank, word)


def nobody(peers: Peers) -> Peers:
    """As many peers, none of whom will ever send anything, and sums among them that know it."""
    device = peers.steps.device
    inbox = torch.empty(inbox_bytes(peers.ranks), dtype=torch.uint8, device=device)
    alone = make_peers([inbox.data_ptr()] * peers.ranks, peers.rank, device)
    alone.give_up()
    return alone._replace(inbox=inbox)


def suits_one_shot(values: torch.Tensor) -> bool:
    size = values.numel() * values.element_size()
    return size <= MOST_BYTES and size % _MULTIPLE_BYTES == 0 and values.is_contiguous()


def suits_rows(share: torch.Tensor, ranks: int) -> bool:
    """Whether a sum of shares [rows, size] can be normalised in the same launch."""
    row = share.shape[1] * share.element_size()
    grains = _grains(row // 4)
    within = grains <= _MOST_ROW_GRAINS and grains * ranks <= _MOST_GRAINS_AWAITED
    return within and row % _MULTIPLE_BYTES == 0 and len(share) * grains <= _GRAINS and suits_one_shot(share)


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
def _flagged(words, steps):
    """[...] int64: the words of 32 bits, and above them the number of the step."""
    return (words.to(tl.int64) & 0xFFFFFFFF) | (steps.to(tl.int64) << 32)


@triton.jit
def _place(addresses_ptr, owner, sender, column, grain, steps, RANKS: tl.constexpr, GRAIN: tl.constexpr):
    """Where `sender`'s words of this step stand in `owner`'s inbox, by their grain and column."""
    inbox = tl.multiple_of(tl.load(addresses_ptr + owner).to(tl.pointer_type(tl.int64)), 16)
    return inbox + ((grain * 2 + (steps & 1)) * RANKS + sender) * GRAIN + column % GRAIN


@triton.jit
def _send(
    words,
    inside,
    addresses_ptr,
    column,
    grain,
    steps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """Write our words [BLOCK] into all other inboxes."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = _place(addresses_ptr, rank, RANK, column, grain, steps, RANKS, GRAIN)
            tl.store(place, _flagged(words, steps), mask=inside, cache_modifier=".wt")


@triton.jit
def _pause(NANOSECONDS: tl.constexpr):
    """Rest for about so long."""
    time = tl.full((), NANOSECONDS, tl.int32)
    tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [time], tl.int32, is_pure=False, pack=1)


@triton.jit
def _receive(
    words,
    inside,
    addresses_ptr,
    column,
    grain,
    steps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOKS: tl.constexpr,
    PAUSE_NS: tl.constexpr = 0,
):
    """[RANKS, BLOCK] int32: the words of all ranks, our own among them, once they are there. All are asked for at once,
    again and again: one after the other would cost as many trips to memory as there are ranks."""
    rank = tl.arange(0, RANKS)[:, None]
    place = _place(addresses_ptr, RANK, rank, column[None, :], grain[None, :], steps[None, :], RANKS, GRAIN)
    awaited = inside[None, :] & (rank != RANK)
    host_word = tl.load(addresses_ptr + RANKS).to(tl.pointer_type(tl.int32))
    found = tl.load(place, mask=awaited, other=0, volatile=True)
    looks = 0
    given_up = 0  # threads may see that at unlike times: it goes through the minimum, by which they leave together
    while tl.min((((found >> 32).to(tl.int32) == steps[None, :]) | (awaited == 0) | (given_up != 0)).to(tl.int32)) == 0:
        if PAUSE_NS:
            _pause(PAUSE_NS)
        found = tl.load(place, mask=awaited, other=0, volatile=True)
        looks += 1
        if looks % LOOKS == 0:
            given_up = tl.load(host_word, volatile=True)
    return tl.where(rank == RANK, words[None, :], found.to(tl.int32))


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


@triton.jit(do_not_specialize=["words"])
def _one_shot_kernel(
    values_ptr,
    output_ptr,
    normalised_ptr,
    weight_ptr,
    addresses_ptr,
    steps_ptr,
    words,
    eps,
    DTYPE: tl.constexpr,
    NUMBERS: tl.constexpr,
    ADDED: tl.constexpr,
    NORMALISED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    LOOKS: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    PAUSE_NS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROW words of NUMBERS numbers. Values and outputs come as int32; ADDED: to what is in the output.

    SENDS and RECEIVES are both true, but in a test that has all ranks in one process.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if NORMALISED:  # weights are written by nobody: they need not wait
        weight = weight_ptr + column * NUMBERS
        low_weight = tl.load(weight, mask=column < ROW, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + NUMBERS - 1, mask=column < ROW, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    grain = program * (BLOCK // GRAIN) + column // GRAIN
    steps = tl.load(steps_ptr + grain) + 1
    word = program * ROW + column
    inside = (column < ROW) & (word < words // 4 * 4)  # tells the compiler that a mask never parts 16 bytes
    own = tl.load(values_ptr + word, mask=inside, other=0)
    if SENDS:
        _send(own, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN)
    if RECEIVES:
        if ADDED:
            low_before, high_before = _halves(tl.load(output_ptr + word, mask=inside, other=0), DTYPE)
        every = _receive(own, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN, LOOKS, PAUSE_NS)
        lows, highs = _halves(every, DTYPE)
        low, high = tl.sum(lows, axis=0), tl.sum(highs, axis=0)
        if ADDED:
            low += low_before
            high += high_before
        total = _words(low, high, DTYPE)
        tl.store(output_ptr + word, total, mask=inside)
        if NORMALISED:
            normalised = _normalised(total, low_weight, high_weight, weight_ptr, eps, DTYPE, NUMBERS, ROW)
            tl.store(normalised_ptr + word, normalised, mask=inside)
        tl.store(steps_ptr + grain, steps, mask=column % GRAIN == 0)


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
    """One program: a grain, GRAIN / 2 int64, each of two words, the upper halves after the lower ones."""
    HALF: tl.constexpr = GRAIN // 2
    program = tl.program_id(0)
    column = tl.arange(0, GRAIN)
    grain = program + tl.zeros_like(column)
    steps = tl.load(steps_ptr + grain) + 1
    number = program * HALF + column % HALF
    inside = number < count
    own = tl.load(values_ptr + number, mask=inside, other=0)
    words = tl.where(column < HALF, own, own >> 32).to(tl.int32)
    if SENDS:
        _send(words, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN)
    if RECEIVES:
        every = _receive(words, inside, addresses_ptr, column, grain, steps, RANK, RANKS, GRAIN, LOOKS).to(tl.int64)
        halves = tl.where((column < HALF)[None, :], every & 0xFFFFFFFF, every << 32)
        best = tl.max(tl.sum(tl.reshape(halves, (RANKS, 2, HALF)), axis=1), axis=0)
        number = program * HALF + tl.arange(0, HALF)
        tl.store(values_ptr + number, best, mask=number < count)
        tl.store(steps_ptr + grain, steps, mask=column == 0)


_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def one_shot_sum(
    share: torch.Tensor,
    peers: Peers,
    residual: torch.Tensor | None = None,
    *,
    sends: bool = True,
    receives: bool = True,
) -> torch.Tensor:
    """The sum of all ranks' shares, in the memory of `share`; or residual + that sum, in the memory of `residual`.

    share, residual: contiguous, of one shape and floating type, `suits_one_shot`. All ranks call it together.
    """
    output = share if residual is None else residual
    grains = triton.cdiv(share.numel() * share.element_size() // 4, _GRAIN)
    row = triton.cdiv(grains, _MOST_PROGRAMS) * _GRAIN
    _launch_sum(share, peers, output, None, None, row, added=residual is not None, sends=sends, receives=receives)
    return output


def one_shot_sum_normalised(
    share: torch.Tensor,
    peers: Peers,
    norm: Norm,
    residual: torch.Tensor | None = None,
    *,
    sends: bool = True,
    receives: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `one_shot_sum` returns, and that normalised. share: [rows, size], `suits_rows`."""
    output = share if residual is None else residual
    normalised = torch.empty_like(share)
    row = share.shape[1] * share.element_size() // 4
    added = residual is not None
    _launch_sum(share, peers, output, normalised, norm, row, added=added, sends=sends, receives=receives)
    return output, normalised


def _launch_sum(
    share: torch.Tensor,
    peers: Peers,
    output: torch.Tensor,
    normalised: torch.Tensor | None,
    norm: Norm | None,
    row: int,
    *,
    added: bool,
    sends: bool,
    receives: bool,
) -> None:
    """row: words of a program."""
    if share.numel() == 0:
        return
    words = _as_words(share)
    block = _grains(row) * _GRAIN
    overlap, programs = overlaps(share.device), triton.cdiv(words.numel(), row)
    _one_shot_kernel[(programs,)](
        words,
        _as_words(output),
        words if normalised is None else _as_words(normalised),
        words if norm is None else norm.weight,
        peers.addresses,
        peers.steps,
        words.numel(),
        0.0 if norm is None else norm.eps,
        DTYPE=getattr(tl, _DTYPES[share.dtype]),
        NUMBERS=4 // share.element_size(),
        ADDED=added,
        NORMALISED=norm is not None,
        RANK=peers.rank,
        RANKS=peers.ranks,
        ROW=row,
        BLOCK=block,
        GRAIN=_GRAIN,
        LOOKS=_LOOKS,
        SENDS=sends,
        RECEIVES=receives,
        PAUSE_NS=_PAUSE_NS if programs > _MOST_RESTLESS else 0,
        OVERLAP=overlap,
        num_warps=min(_MOST_WARPS, block // _GRAIN * _GRAIN_WARPS),
        **({"launch_pdl": True} if overlap else {}),
    )


def one_shot_largest(values: torch.Tensor, peers: Peers, *, sends: bool = True, receives: bool = True) -> torch.Tensor:
    """The largest of all ranks' values, one by one, in place. values: [count] int64, at most MOST_NUMBERS."""
    if values.numel():
        _largest_kernel[(triton.cdiv(values.numel(), _GRAIN // 2),)](
            values,
            peers.addresses,
            peers.steps,
            values.numel(),
            RANK=peers.rank,
            RANKS=peers.ranks,
            GRAIN=_GRAIN,
            LOOKS=_LOOKS,
            SENDS=sends,
            RECEIVES=receives,
            num_warps=_GRAIN_WARPS,
        )
    return values


def _grains(row: int) -> int:
    """That a program of so many words takes: a power of two, since its columns are."""
    return triton.next_power_of_2(triton.cdiv(row, _GRAIN))


def _as_words(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1).view(torch.int32)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    share = torch.empty(8, model.hidden_size, dtype=dtype, device="meta")
    addresses, steps = (torch.empty(9, dtype=kind, device="meta") for kind in (torch.int64, torch.int32))
    peers = Peers(addresses, steps, 3, steps)
    keys = torch.empty(64, dtype=torch.int64, device="meta")
    wide = Norm(torch.empty(model.hidden_size, dtype=torch.float32, device="meta"), 1e-6)
    many = torch.empty(_MOST_RESTLESS + 1, model.hidden_size, dtype=dtype, device="meta")
    large = [lambda: one_shot_sum_normalised(many, peers, wide)] if suits_rows(many, peers.ranks) else []
    return [
        *large,
        lambda: one_shot_sum(share, peers, share),
        lambda: one_shot_sum(share, peers),
        lambda: one_shot_sum_normalised(share, peers, Norm(share[0], 1e-6), share),
        lambda: one_shot_sum_normalised(share, peers, wide),
        lambda: one_shot_largest(keys, peers),
    ]
