"""How much memory an engine takes, and what for: measured, never guessed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.engine.messages import MemoryRow
from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.sampler import PenaltyTable
from meltcore.engine.scheduler import pages_for
from meltcore.errors import ConfigError
from meltcore.models.cache import split_groups
from meltcore.models.decoder import Decoder
from meltcore.models.room import host_available_bytes

# What a step needs beside weights and pages, until a profiled step says better: activations, workspaces, fragmentation.
RESERVE_SHARE = 0.08
# The most of it for token counts of sequences with penalties, 1 % of all memory. Qwen3's take 0.7 MiB a sequence: 1,024
# run at once on 80 GB, and 78 on 6 GB, whose pages hold 480 tokens for each of so many (Qwen3-0.6B).
PENALTY_SHARE = 0.125
# The most of it for logits of sequences that do not just take the likeliest token, which choose in blocks of so many.
LOGITS_SHARE = 0.25
LOGIT_BYTES = 6  # in 16 bits as the model gives them, and in float32 where penalties change them
# On a CPU, cached pages share memory with everything else: a quarter of what is free unless the user says otherwise.
HOST_SHARE = 0.25
# The most that recurrent states take of what weights and reserve leave, where nobody asked for more: a sequence of a
# few thousand tokens needs about as much in pages as its states take (Qwen3.5-35B-A3B: 62 MiB, and 20 KiB a token).
STATE_SHARE = 0.5
# Snapshots to keep where their share has room, though fewer sequences run at once: they may be turns of conversations.
CONVERSATIONS = 64


class MemoryPlan(NamedTuple):
    """How many pages and state slots fit, for how many sequences at once, those with penalties, how many of them choose
    at once, and the table."""

    pages: int
    state_slots: int
    penalty_slots: int
    logit_rows: int
    max_num_seqs: int
    rows: list[MemoryRow]


class _Budget(NamedTuple):
    """Bytes: all there are, those of the weights and of the reserve, and what one page and one state slot take."""

    total: int
    weights: int
    reserve: int
    page: int
    slot: int

    @property
    def room(self) -> int:
        return self.total - self.weights - self.reserve

    def states(self, slots: int) -> int:
        """So many slots, and the null slot beside them."""
        return self.slot * (slots + 1)


def plan_memory(
    model: Decoder,
    *,
    memory_bytes: int | None,
    max_model_len: int,
    max_num_seqs: int,
    may_run_fewer: bool,
    cache_dtype: torch.dtype,
    snapshots: bool = True,
) -> MemoryPlan:
    """Divide what the weights and the reserve leave. Raises ConfigError where one full sequence does not fit.

    may_run_fewer: `max_num_seqs` is a wish, lowered where the recurrent states of so many would take more than their
    share; else it is what somebody asked for, and a ConfigError where it does not fit. snapshots: whether the prefix
    cache is to keep some of the states.
    """
    device = model.embedding.device
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    total = memory_bytes if memory_bytes is not None else weights + free_bytes(device)
    pages_of, states_of = split_groups(model.cache_groups())
    page_bytes = pages_of.page_bytes(PAGE_SIZE, cache_dtype.itemsize)
    slot_bytes = states_of.slot_bytes(model.embedding.element_size()) if states_of else 0
    budget = _Budget(total, weights, int(total * RESERVE_SHARE), page_bytes, slot_bytes)

    slots = 0
    if states_of:
        share = min(int(budget.room * STATE_SHARE), budget.room - page_bytes * pages_for(max_model_len))
        share = max(0, share // slot_bytes - 1)
        if may_run_fewer:
            max_num_seqs = max(1, min(max_num_seqs, share * 3 // 4))
        slots = max_num_seqs + (_snapshots(max_num_seqs, share) if snapshots else 0)
    fitting = max(0, (budget.room - budget.states(slots)) // page_bytes)
    if fitting < pages_for(max_model_len):
        raise ConfigError(_refusal(budget, fitting, slots, max_num_seqs, max_model_len))
    pages = min(pages_for(max_model_len) * max_num_seqs, fitting)
    penalty_bytes = PenaltyTable.BYTES_PER_TOKEN * model.config.vocab_size
    penalty_slots = max(1, min(max_num_seqs, int(budget.reserve * PENALTY_SHARE) // penalty_bytes))
    logit_rows = max(1, int(budget.reserve * LOGITS_SHARE) // (LOGIT_BYTES * model.config.vocab_size))
    counts = f"penalties of {penalty_slots:,} sequences ({_size(penalty_slots * penalty_bytes)})"
    rows = [
        MemoryRow("weights", weights),
        MemoryRow("KV pages", pages * page_bytes, f"{pages:,} pages of {PAGE_SIZE} tokens"),
        MemoryRow("reserve", budget.reserve, f"activations, workspaces, {counts}"),
    ]
    if slots:
        note = f"{slots:,} slots of {_size(slot_bytes)}: {max_num_seqs:,} to run, the rest for snapshots"
        rows.insert(1, MemoryRow("recurrent states", budget.states(slots), note))
    return MemoryPlan(pages, slots, penalty_slots, logit_rows, max_num_seqs, rows)


def _snapshots(max_num_seqs: int, share: int) -> int:
    """States to keep beside those of running sequences: as many, while all stay within their share of slots."""
    return max(min(max(max_num_seqs, CONVERSATIONS), share - max_num_seqs), _few(max_num_seqs))


def _few(max_num_seqs: int) -> int:
    """The fewest snapshots that make the prefix cache worth having."""
    return max(max_num_seqs // 8, 1)


def _refusal(budget: _Budget, pages: int, slots: int, max_num_seqs: int, max_model_len: int) -> str:
    """Why one sequence of `max_model_len` does not fit, and the largest settings that would."""
    longest = pages * PAGE_SIZE
    needed = budget.page * pages_for(max_model_len)
    advice = [f"--max-model-len {longest} or less"] if longest else []
    states = ""
    if slots:
        states = f", the recurrent states of {max_num_seqs} sequences and of snapshots ({_size(budget.states(slots))})"
        fitting = max(0, (budget.room - needed) // budget.slot - 1)
        most = max((sequences for sequences in range(fitting) if sequences + _few(sequences) <= fitting), default=0)
        advice += [f"--max-num-seqs {most} or less"] if 0 < most < max_num_seqs else []
    return (
        f"{_size(budget.total)} hold the weights ({_size(budget.weights)}){states}, a reserve of "
        f"{_size(budget.reserve)} and pages for {longest} tokens; --max-model-len {max_model_len} needs "
        f"{_size(needed)} of pages. "
        + (f"Set {' or '.join(advice)}, or raise --memory." if advice else "Raise --memory.")
    )


def free_bytes(device: torch.device) -> int:
    """What may be taken of it where nobody says how much."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(host_available_bytes() * HOST_SHARE)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
