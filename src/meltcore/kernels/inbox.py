"""Inboxes through which ranks hand each other words of 32 bits, within kernels.

Every rank has an inbox in its own memory that all others can write to (`Peers`). A place there is EMPTY until a word
is written to it, and again once that is read: that a word is there and what it is are seen at once, so no fence is
needed, and nothing travels beside it. (Lamport 1977, doi:10.1145/359863.359878. NCCL's protocol "LL" sends a step
number with each word instead, which takes half of the link.) No word is EMPTY, see `sendable`. Steps are counted for
each grain of 512 words, and a grain has a place of its own in the inbox for every sender, twice, taken in turns. Who
writes a place again has ended a launch between in which its reader sent it something, and a rank sends nothing before
its own launches before are done: so the reader has emptied the place. Every launch must therefore bring every rank
something from every other one. NVLink's multicast is not used. A rank that waits for one that is gone waits until its
host says to give up.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton

GRAIN, GRAIN_WARPS = 512, 4  # four words a thread, stored at once
GRAINS = 512
# Looks into the inbox between two at the host's word, which lies behind PCIe: every half a millisecond or so.
LOOKS = 1024
# What stands where no word is: all ones.
EMPTY_BYTE = 255
_EMPTY, _ANOTHER_NAN = (tl.constexpr(-1), tl.constexpr(0x7FFF7FFF)) if tl else (None, None)


class Peers(NamedTuple):
    """addresses: [ranks + 1] int64, of each rank's inbox on this device, then of our own host's word; steps: [grains]
    int32, zeros at first, when inboxes are EMPTY_BYTE all over; rank: our own; word: [1] int32, host memory that the
    device can read, not zero once sums are to be given up: what they return from then on means nothing."""

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
    return GRAINS * 2 * ranks * GRAIN * 4


def make_peers(inboxes: list[int], rank: int, device: torch.device) -> Peers:
    """inboxes: the address of each rank's on this device."""
    word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    addresses = torch.tensor([*inboxes, word.data_ptr()], dtype=torch.int64, device=device)
    return Peers(addresses, torch.zeros(GRAINS, dtype=torch.int32, device=device), rank, word)


def nobody(peers: Peers) -> Peers:
    """As many peers, none of whom will ever send anything, and sums among them that know it."""
    device = peers.steps.device
    inbox = torch.empty(inbox_bytes(peers.ranks), dtype=torch.uint8, device=device)
    alone = make_peers([inbox.data_ptr()] * peers.ranks, peers.rank, device)
    alone.give_up()
    return alone._replace(inbox=inbox)


class Parts(NamedTuple):
    """What a launch does of its work: all of it, but in a test that has all ranks in one process, in turns."""

    sends: bool = True
    adds: bool = True  # where sums are sent on: what came is added up, and sent to all
    receives: bool = True


EVERY_PART = Parts()
IN_TURNS = (Parts(True, False, False), Parts(False, True, False), Parts(False, False, True))


@triton.jit
def sendable(words):
    """Words of one or two floating numbers, none of them EMPTY: that is not a number, which another word says too."""
    return tl.where(words == _EMPTY, _ANOTHER_NAN, words)


@triton.jit
def place_of(addresses_ptr, owner, sender, column, grain, steps, RANKS: tl.constexpr, GRAIN: tl.constexpr):
    """Where `sender`'s words of this step stand in `owner`'s inbox, by their grain and column."""
    inbox = tl.multiple_of(tl.load(addresses_ptr + owner).to(tl.pointer_type(tl.int32)), 16)
    return inbox + offset_of(sender, column, grain, steps, RANKS, GRAIN)


@triton.jit
def offset_of(sender, column, grain, steps, RANKS: tl.constexpr, GRAIN: tl.constexpr):
    """`place_of` within an inbox."""
    return ((grain * 2 + (steps & 1)) * RANKS + sender) * GRAIN + column % GRAIN


@triton.jit
def send(
    words,
    inside,
    addresses_ptr,
    rank,
    column,
    grain,
    steps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """Write our words [BLOCK], `sendable`, into the inbox of `rank`."""
    place = place_of(addresses_ptr, rank, RANK, column, grain, steps, RANKS, GRAIN)
    tl.store(place, words, mask=inside, cache_modifier=".wt")


@triton.jit
def send_to_all(
    words, inside, addresses_ptr, column, grain, steps, RANK: tl.constexpr, RANKS: tl.constexpr, GRAIN: tl.constexpr
):
    """Write our words [BLOCK], `sendable`, into every rank's inbox and our own: at once, so that of a short row too
    each thread stores four."""
    inbox = tl.multiple_of(tl.load(addresses_ptr + tl.arange(0, RANKS)).to(tl.pointer_type(tl.int32)), 16)
    place = inbox[:, None] + offset_of(RANK, column, grain, steps, RANKS, GRAIN)[None, :]
    tl.store(place, tl.broadcast_to(words[None, :], place.shape), mask=inside[None, :], cache_modifier=".wt")


@triton.jit
def pause(NANOSECONDS: tl.constexpr):
    """Rest for about so long."""
    time = tl.full((), NANOSECONDS, tl.int32)
    tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [time], tl.int32, is_pure=False, pack=1)


@triton.jit
def arrived(place, awaited, addresses_ptr, RANKS: tl.constexpr, LOOKS: tl.constexpr, PAUSE_NS: tl.constexpr = 0):
    """[...] int32: the words at these places of our own inbox, once all that are awaited are there; and empty them."""
    host_word = tl.load(addresses_ptr + RANKS).to(tl.pointer_type(tl.int32))
    found = tl.load(place, mask=awaited, other=0, volatile=True)
    looks = 0
    given_up = 0  # threads may see that at unlike times: it goes through the minimum, by which they leave together
    while tl.min(((found != _EMPTY) | (given_up != 0)).to(tl.int32)) == 0:
        if PAUSE_NS:
            pause(PAUSE_NS)
        found = tl.load(place, mask=awaited, other=0, volatile=True)
        looks += 1
        if looks % LOOKS == 0:
            given_up = tl.load(host_word, volatile=True)
    tl.store(place, tl.full(place.shape, _EMPTY, tl.int32), mask=awaited)
    return found


@triton.jit
def receive(
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
    place = place_of(addresses_ptr, RANK, rank, column[None, :], grain[None, :], steps[None, :], RANKS, GRAIN)
    awaited = inside[None, :] & (rank != RANK)
    found = arrived(place, awaited, addresses_ptr, RANKS, LOOKS, PAUSE_NS)
    return tl.where(rank == RANK, words[None, :], found)
