"""Sums over the ranks of a group in one launch, for sizes at which a message takes longer to begin than to pass.

Every rank has an inbox in its own memory that all others can write to (`Peers`). A rank writes its values into all
others, waits for theirs in its own, and adds them up: one way over the link, and every rank gets the same bits, since
all add in the order of ranks. Values travel in words of 32 bits, each beside the number of the step, in one store of 64
that cannot be torn: that a value is there and what it is are seen at once, so no fence is needed. (NCCL's protocol "LL"
does the same.) A program has a place of its own in the inbox, twice, taken in turns: who writes a place again has seen
its reader take part in the step between, and so be done with the one before. NVLink's multicast is not used.

The torch body that says what is computed is `sum_of_shares`; without inboxes, collectives of torch.distributed do it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

# Words of a program: four a thread, so that a word and its step number of 8 bytes are stored in pairs.
_BLOCK, _WARPS = 512, 4
_PROGRAMS = 256
MOST_BYTES = _PROGRAMS * _BLOCK * 4  # of a message to add up
MOST_NUMBERS = _PROGRAMS * _BLOCK // 2  # of 64 bits, to find the largest of
_MULTIPLE_BYTES = 16  # read at once


class Peers(NamedTuple):
    """inboxes: [ranks] int64, the address of each rank's inbox on this device; steps: [programs] int32, zeros at first,
    as the inboxes are; rank: our own."""

    inboxes: torch.Tensor
    steps: torch.Tensor
    rank: int

    @property
    def ranks(self) -> int:
        return self.inboxes.shape[0]


def inbox_bytes(ranks: int) -> int:
    return _PROGRAMS * 2 * ranks * _BLOCK * 8


def new_steps(device: torch.device) -> torch.Tensor:
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


def suits_one_shot(values: torch.Tensor) -> bool:
    size = values.numel() * values.element_size()
    return size <= MOST_BYTES and size % _MULTIPLE_BYTES == 0 and values.is_contiguous()


def sum_of_shares(shares: list[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """The specification: a sum in float32 in the order of ranks, rounded once; with `residual`, after adding it."""
    total = torch.stack([share.float() for share in shares]).sum(0)
    return (total if residual is None else residual.float() + total).to(shares[0].dtype)


@triton.jit
def _flagged(words, step):
    """[...] int64: the words of 32 bits, and above them the number of the step."""
    return (words.to(tl.int64) & 0xFFFFFFFF) | (step.to(tl.int64) << 32)


@triton.jit
def _inbox(inboxes_ptr, owner, program, step, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Where programs of this number write in this step in `owner`'s inbox: BLOCK words of each rank."""
    inbox = tl.multiple_of(tl.load(inboxes_ptr + owner).to(tl.pointer_type(tl.int64)), 16)
    return inbox + (program.to(tl.int64) * 2 + (step & 1)) * RANKS * BLOCK


@triton.jit
def _send(words, inside, inboxes_ptr, program, step, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write our words [BLOCK] into all other inboxes."""
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = _inbox(inboxes_ptr, rank, program, step, RANKS, BLOCK) + RANK * BLOCK + tl.arange(0, BLOCK)
            tl.store(place, _flagged(words, step), mask=inside, cache_modifier=".wt")


@triton.jit
def _receive(words, inside, inboxes_ptr, program, step, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """[RANKS, BLOCK] int32: the words of all ranks, our own among them, once they are there. All are asked for at once,
    again and again: one after the other would cost as many trips to memory as there are ranks."""
    rank = tl.arange(0, RANKS)[:, None]
    place = _inbox(inboxes_ptr, RANK, program, step, RANKS, BLOCK) + rank * BLOCK + tl.arange(0, BLOCK)[None, :]
    awaited = inside[None, :] & (rank != RANK)
    found = tl.load(place, mask=awaited, other=0, volatile=True)
    while tl.min((((found >> 32).to(tl.int32) == step) | (awaited == 0)).to(tl.int32)) == 0:
        found = tl.load(place, mask=awaited, other=0, volatile=True)
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


@triton.jit(do_not_specialize=["words"])
def _one_shot_kernel(
    values_ptr,
    output_ptr,
    inboxes_ptr,
    steps_ptr,
    words,
    DTYPE: tl.constexpr,
    ADDED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK words. Values and output come as int32; ADDED: to what is in the output already.

    SENDS and RECEIVES are both true, but in a test that has all ranks in one process.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    step = tl.load(steps_ptr + program) + 1
    word = program * BLOCK + tl.arange(0, BLOCK)
    inside = word < words // 4 * 4  # tells the compiler that a mask never parts 16 bytes
    own = tl.load(values_ptr + word, mask=inside, other=0)
    if SENDS:
        _send(own, inside, inboxes_ptr, program, step, RANK, RANKS, BLOCK)
    if RECEIVES:
        if ADDED:
            low_before, high_before = _halves(tl.load(output_ptr + word, mask=inside, other=0), DTYPE)
        lows, highs = _halves(_receive(own, inside, inboxes_ptr, program, step, RANK, RANKS, BLOCK), DTYPE)
        low, high = tl.sum(lows, axis=0), tl.sum(highs, axis=0)
        if ADDED:
            low += low_before
            high += high_before
        tl.store(output_ptr + word, _words(low, high, DTYPE), mask=inside)
        tl.store(steps_ptr + program, step)


@triton.jit(do_not_specialize=["count"])
def _largest_kernel(
    values_ptr,
    inboxes_ptr,
    steps_ptr,
    count,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
):
    """One program: BLOCK / 2 int64, each of two words, the upper halves after the lower ones."""
    HALF: tl.constexpr = BLOCK // 2
    program = tl.program_id(0)
    step = tl.load(steps_ptr + program) + 1
    place = tl.arange(0, BLOCK)
    number = program * HALF + place % HALF
    inside = number < count
    own = tl.load(values_ptr + number, mask=inside, other=0)
    words = tl.where(place < HALF, own, own >> 32).to(tl.int32)
    if SENDS:
        _send(words, inside, inboxes_ptr, program, step, RANK, RANKS, BLOCK)
    if RECEIVES:
        every = _receive(words, inside, inboxes_ptr, program, step, RANK, RANKS, BLOCK).to(tl.int64)
        halves = tl.where((place < HALF)[None, :], every & 0xFFFFFFFF, every << 32)
        best = tl.max(tl.sum(tl.reshape(halves, (RANKS, 2, HALF)), axis=1), axis=0)
        number = program * HALF + tl.arange(0, HALF)
        tl.store(values_ptr + number, best, mask=number < count)
        tl.store(steps_ptr + program, step)


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
    if share.numel() == 0:
        return output
    words = share.view(-1).view(torch.int32)
    overlap = overlaps(share.device)
    _one_shot_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
        words,
        output.view(-1).view(torch.int32),
        peers.inboxes,
        peers.steps,
        words.numel(),
        DTYPE=getattr(tl, _DTYPES[share.dtype]),
        ADDED=residual is not None,
        RANK=peers.rank,
        RANKS=peers.ranks,
        BLOCK=_BLOCK,
        SENDS=sends,
        RECEIVES=receives,
        OVERLAP=overlap,
        num_warps=_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


def one_shot_largest(values: torch.Tensor, peers: Peers, *, sends: bool = True, receives: bool = True) -> torch.Tensor:
    """The largest of all ranks' values, one by one, in place. values: [count] int64, at most MOST_NUMBERS."""
    if values.numel():
        _largest_kernel[(triton.cdiv(values.numel(), _BLOCK // 2),)](
            values,
            peers.inboxes,
            peers.steps,
            values.numel(),
            RANK=peers.rank,
            RANKS=peers.ranks,
            BLOCK=_BLOCK,
            SENDS=sends,
            RECEIVES=receives,
            num_warps=_WARPS,
        )
    return values


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    share = torch.empty(8, model.hidden_size, dtype=dtype, device="meta")
    addresses, steps = (torch.empty(8, dtype=kind, device="meta") for kind in (torch.int64, torch.int32))
    peers = Peers(addresses, steps, 3)
    keys = torch.empty(64, dtype=torch.int64, device="meta")
    return [
        lambda: one_shot_sum(share, peers, share),
        lambda: one_shot_sum(share, peers),
        lambda: one_shot_largest(keys, peers),
    ]
