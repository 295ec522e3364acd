"""Symmetric memory: a buffer per rank that the kernels of all ranks write to, in words of 32 bits.

Every rank's buffer is mapped into the address space of all others (`SymmetricMemory`). A slot holds EMPTY until a word
is written to it, and again once that word is read. The word is its own arrival flag, so neither a fence nor a separate
flag is needed (Lamport 1977, doi:10.1145/359863.359878). NCCL's LL protocol sends a flag with each word instead, which
takes half of the bandwidth. No word equals EMPTY, see `avoid_empty`.

A chunk of 512 words has a step counter, and in the buffer one slot per sender, double-buffered by the step's parity.
Double buffering is safe for two reasons. Every launch makes every rank receive something from every other rank, and a
rank sends only after its earlier launches have ended. So a sender that reuses a slot has, since the last use, received
something that its receiver sent after emptying the slot. This is why every launch must exchange data between all ranks.

Behind the chunks is space for one long message, which staged_all_reduce.py reduces: counters of its two stages, its
rows and its sums. These words are not emptied.

NVLink multicast is not used. A rank that waits for a rank that has ended waits until the host sets the abort flag.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.comm.buffer_sizes import CHUNKS, chunk_words
from meltcore.kernels.jit import tl, triton

CHUNK_WARPS = 4  # a thread stores four words at a time
STAGES = 2  # of a long message: rows to their owners, sums to all
# Polls of the buffer between two of the host's abort flag, which lies behind PCIe: about half a millisecond.
POLLS = 1024
# Every byte of an empty slot: all ones.
EMPTY_BYTE = 255
_EMPTY, _OTHER_NAN = (tl.constexpr(-1), tl.constexpr(0x7FFF7FFF)) if tl else (None, None)


class SymmetricMemory(NamedTuple):
    """The buffers of a group as one rank sees them.

    Args:
        pointers: [ranks + 1] int64, each rank's buffer as mapped on this device, then the abort flag.
        steps: [chunks] int32, zeros at start, when all buffers are EMPTY_BYTE.
        messages: [STAGES] int64, the number of waits of each stage that have ended, zeros at start.
        rank: this rank.
        abort_flag: [1] int32, host memory that the device reads. Once it is not zero, reductions stop waiting and their
            results are undefined.
        has_messages: False if the buffers end with the chunks. Kernels of long messages are then compiled, but not run.
    """

    pointers: torch.Tensor
    steps: torch.Tensor
    messages: torch.Tensor
    rank: int
    abort_flag: torch.Tensor
    has_messages: bool = True
    backing_memory: torch.Tensor | None = None  # memory behind `pointers` that lives as long as this object

    @classmethod
    def of(cls, buffers: list[int], rank: int, device: torch.device) -> SymmetricMemory:
        """Create this rank's view of the buffers. `buffers` are the addresses of all ranks' buffers on this device."""
        flag = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        pointers = torch.tensor([*buffers, flag.data_ptr()], dtype=torch.int64, device=device)
        steps = torch.zeros(CHUNKS, dtype=torch.int32, device=device)
        return cls(pointers, steps, torch.zeros(STAGES, dtype=torch.int64, device=device), rank, flag)

    @property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return self.pointers.shape[0] - 1

    def abort(self) -> None:
        """Make the device skip all waits for other ranks."""
        self.abort_flag.fill_(1)


def aborted_memory(memory: SymmetricMemory) -> SymmetricMemory:
    """Return a private memory for the same number of ranks with the abort flag set.

    Reductions on it launch their kernels, but neither send to other ranks nor wait for them.
    """
    device = memory.steps.device
    buffer = torch.empty(chunk_words(memory.ranks), dtype=torch.int32, device=device)
    aborted = SymmetricMemory.of([buffer.data_ptr()] * memory.ranks, memory.rank, device)
    aborted.abort()
    return aborted._replace(has_messages=False, backing_memory=buffer)


class Phases(NamedTuple):
    """The phases of a reduction that a launch runs. Tests that run all ranks in one process launch them separately."""

    send: bool = True
    reduce: bool = True  # of a two-shot all-reduce: sum the received slices and send the sum to all
    receive: bool = True


ALL_PHASES = Phases()
PHASES_IN_TURN = (Phases(True, False, False), Phases(False, True, False), Phases(False, False, True))


@triton.jit
def avoid_empty(words):
    """Replace words that equal EMPTY, which is a NaN, by another NaN."""
    return tl.where(words == _EMPTY, _OTHER_NAN, words)


@triton.jit
def slot_pointers(pointers_ptr, owner, sender, column, chunk, steps, RANKS: tl.constexpr, CHUNK: tl.constexpr):
    """Return pointers to the slots in `owner`'s buffer for the words that `sender` sends in this step."""
    buffer = tl.multiple_of(tl.load(pointers_ptr + owner).to(tl.pointer_type(tl.int32)), 16)
    return buffer + slot_offset(sender, column, chunk, steps, RANKS, CHUNK)


@triton.jit
def slot_offset(sender, column, chunk, steps, RANKS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the offset of a slot within a buffer, in words."""
    return ((chunk * 2 + (steps & 1)) * RANKS + sender) * CHUNK + column % CHUNK


@triton.jit
def send(
    words,
    mask,
    pointers_ptr,
    rank,
    column,
    chunk,
    steps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write this rank's words [BLOCK] to the buffer of `rank`. No word may equal EMPTY."""
    slot = slot_pointers(pointers_ptr, rank, RANK, column, chunk, steps, RANKS, CHUNK)
    tl.store(slot, words, mask=mask, cache_modifier=".wt")


@triton.jit
def send_to_all(
    words, mask, pointers_ptr, column, chunk, steps, RANK: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr
):
    """Write this rank's words [BLOCK] to the buffers of all ranks, its own included. No word may equal EMPTY.

    One store for all ranks: each thread then stores four words of a short row too.
    """
    buffer = tl.multiple_of(tl.load(pointers_ptr + tl.arange(0, RANKS)).to(tl.pointer_type(tl.int32)), 16)
    slot = buffer[:, None] + slot_offset(RANK, column, chunk, steps, RANKS, CHUNK)[None, :]
    tl.store(slot, tl.broadcast_to(words[None, :], slot.shape), mask=mask[None, :], cache_modifier=".wt")


@triton.jit
def backoff(NANOSECONDS: tl.constexpr):
    """Make the thread sleep for about the given time."""
    time = tl.full((), NANOSECONDS, tl.int32)
    tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [time], tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for(slot, mask, pointers_ptr, RANKS: tl.constexpr, POLLS: tl.constexpr, BACKOFF_NS: tl.constexpr = 0):
    """Wait for words in slots of this rank's buffer, then mark the slots as empty.

    Returns the words [...] int32 once all words in `mask` have arrived.
    """
    abort_flag = tl.load(pointers_ptr + RANKS).to(tl.pointer_type(tl.int32))
    words = tl.load(slot, mask=mask, other=0, volatile=True)
    polls = 0
    aborted = 0  # threads may see it at different times: as part of the minimum they leave the loop together
    while tl.min(((words != _EMPTY) | (aborted != 0)).to(tl.int32)) == 0:
        if BACKOFF_NS:
            backoff(BACKOFF_NS)
        words = tl.load(slot, mask=mask, other=0, volatile=True)
        polls += 1
        if polls % POLLS == 0:
            aborted = tl.load(abort_flag, volatile=True)
    tl.store(slot, tl.full(slot.shape, _EMPTY, tl.int32), mask=mask)
    return words


@triton.jit
def receive(
    words,
    mask,
    pointers_ptr,
    column,
    chunk,
    steps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    POLLS: tl.constexpr,
    BACKOFF_NS: tl.constexpr = 0,
):
    """Wait for the words of all other ranks.

    Returns [RANKS, BLOCK] int32: the words of all ranks, with this rank's `words` in its row.

    All are polled together: one rank after the other would cost a memory round trip per rank.
    """
    rank = tl.arange(0, RANKS)[:, None]
    slot = slot_pointers(pointers_ptr, RANK, rank, column[None, :], chunk[None, :], steps[None, :], RANKS, CHUNK)
    receive_mask = mask[None, :] & (rank != RANK)
    received = wait_for(slot, receive_mask, pointers_ptr, RANKS, POLLS, BACKOFF_NS)
    return tl.where(rank == RANK, words[None, :], received)
