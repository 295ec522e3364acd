"""Computes the memory of a generation engine and its parts from bytes, shapes and counts.

This module does not import torch, so a planner can call it without a GPU. The engine asserts at its start that it
allocates what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from meltcore.common.errors import BudgetError
from meltcore.common.sizes import size_text
from meltcore.engine.core.kv_cache import PAGE_SIZE, PageLayout, pages_for
from meltcore.engine.memory.workspace import LOGIT_BYTES, MAX_LOGIT_ROWS, PENALTY_BYTES, Workspace, plan_workspace
from meltcore.models.decoders.kv_cache_specs import KVCacheGroups
from meltcore.models.quantized.step_sizes import StepBytes
from meltcore.protocol.shell import MemoryRow

# For activations, workspaces and fragmentation: what a step needs beside weights and caches, of an engine that takes
# what is free. One with a budget in bytes on a GPU computes it (workspace.py).
RESERVE_FRACTION = 0.08
# At most this fraction of the reserve holds token counts of sequences with penalties, 1 % of all memory. Qwen3 takes
# 0.7 MiB per sequence: 1,024 sequences on 80 GB, and 78 on 6 GB, where 78 sequences have pages for 480 tokens each
# (Qwen3-0.6B).
PENALTY_FRACTION = 0.125
# At most this fraction of the reserve holds logits of sequences that are not greedy, which are sampled in blocks, and
# their log-probabilities.
LOGITS_FRACTION = 0.25
# At most this fraction of what weights and reserve leave holds recurrent states, unless --max-num-seqs asks for more:
# a sequence of a few thousand tokens takes about as much in pages (Qwen3.5-35B-A3B: 62 MiB, and 20 KiB per token).
RECURRENT_FRACTION = 0.5
_STEP_BYTES = 2**20  # a computed budget is whole MiB
TABLE_ENTRY_BYTES = 8  # page numbers are int64
# Sequences of an engine with a budget that names no number, at least.
DEFAULT_SEQS = 16
# Snapshots to keep when their fraction allows it, though fewer sequences run: they may be turns of conversations.
KEPT_CONVERSATIONS = 64


class ModelShape(NamedTuple):
    """The sizes of a model that the plan needs.

    On a tensor-parallel rank these are the sizes of the rank's shards and of the whole vocabulary.

    Args:
        element_size: bytes of a value of the model's type.
        cache_element_size: bytes of a value of the KV cache.
        scratch_bytes: memory into which a step dequantizes a slice of a quantized weight.
        step: sizes of a step. Only a plan with a budget needs them.
    """

    weight_bytes: int
    vocab_size: int
    caches: KVCacheGroups
    element_size: int
    cache_element_size: int
    scratch_bytes: int = 0
    step: StepBytes | None = None


class MemoryPlan(NamedTuple):
    """The numbers of pages, recurrent-state slots, penalty slots and running sequences for which memory is allocated.

    Args:
        logit_rows: the number of sequences that are sampled from their logits in one block.
        rows: the rows of the memory table that is printed at the start.
        workspace: None if the workspace is a fraction of the memory.
    """

    pages: int
    recurrent_slots: int
    penalty_slots: int
    logit_rows: int
    max_num_seqs: int
    page_bytes: int
    slot_bytes: int
    rows: list[MemoryRow]
    workspace: Workspace | None = None

    @property
    def cache_bytes(self) -> int:
        """The bytes of the caches, including the null page and the null slot, which padding uses."""
        slots = (self.recurrent_slots + 1) * self.slot_bytes
        return (self.pages + 1) * self.page_bytes + slots


class _Budget(NamedTuple):
    """A memory budget and its parts in bytes.

    The parts are weights, reserve, page tables and scratch. The bytes of one page and of one recurrent-state slot are
    given too.
    """

    total: int
    weights: int
    reserve: int
    tables: int
    scratch: int
    page: int
    slot: int

    @property
    def available_bytes(self) -> int:
        return self.total - self.weights - self.reserve - self.tables - self.scratch

    def states(self, slots: int) -> int:
        """Return the bytes of `slots` recurrent-state slots and of the null slot."""
        return self.slot * (slots + 1)


def plan_memory(
    model: ModelShape,
    *,
    memory_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    may_run_fewer: bool,
    snapshots: bool = True,
    has_graphs: bool | None = None,
    window: int = 1,
) -> MemoryPlan:
    """Divide the memory that weights and reserve leave of `memory_bytes`. Raises BudgetError if no full sequence fits.

    While a prompt is prefilled, a sliding group keeps its window and `max_num_batched_tokens` tokens.

    Args:
        model: the sizes of the model.
        memory_bytes: the memory to divide, including weights and reserve.
        max_model_len: the maximum number of tokens of a sequence.
        max_num_seqs: the maximum number of running sequences.
        max_num_batched_tokens: the maximum number of tokens of a step.
        may_run_fewer: whether `max_num_seqs` is a default, which is lowered if the recurrent states would exceed their
            fraction of the memory. A number that the user has set raises BudgetError instead.
        snapshots: whether the prefix cache keeps recurrent states.
        has_graphs: whether an engine with a budget on a GPU has CUDA graphs. Its reserve is computed from `model.step`.
            None makes the reserve a fraction of the memory.
        window: the maximum number of tokens of a decoding sequence in a step: 1, and the drafts of an engine that
            speculates.
    """
    page_bytes = model.caches.page_bytes(PAGE_SIZE, model.cache_element_size)
    slot_bytes = model.caches.slot_bytes(model.element_size, window)
    layout = PageLayout.of(model.caches)
    needed_pages = layout.max_pages(max_model_len, max_num_batched_tokens)
    # The page table of a model with one sub-group is part of the reserve: at most some MiB.
    table_entries = layout.column_pages * layout.table_rows(max_num_seqs) * pages_for(max_model_len)
    tables = table_entries * TABLE_ENTRY_BYTES if layout.column_pages > 1 else 0
    reserve = int(memory_bytes * RESERVE_FRACTION)
    penalty_slots = max(1, min(max_num_seqs, int(reserve * PENALTY_FRACTION) // (PENALTY_BYTES * model.vocab_size)))
    logit_rows = max(1, int(reserve * LOGITS_FRACTION) // (2 * LOGIT_BYTES * model.vocab_size))
    workspace = None
    if has_graphs is not None:
        needed = partial(
            _workspace,
            model,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            penalty_slots=penalty_slots,
            has_graphs=has_graphs,
            window=window,
        )
        if may_run_fewer:  # a default, whose logits and graphs must not take more than the fraction
            while max_num_seqs > DEFAULT_SEQS and needed(max_num_seqs).total_bytes > reserve:
                max_num_seqs //= 2
        workspace, tables = needed(max_num_seqs), table_entries * TABLE_ENTRY_BYTES
        logit_rows, reserve = min(max_num_seqs, MAX_LOGIT_ROWS), workspace.total_bytes
        model = model._replace(scratch_bytes=0)  # part of the workspace
    budget = _Budget(memory_bytes, model.weight_bytes, reserve, tables, model.scratch_bytes, page_bytes, slot_bytes)

    slots = 0
    if slot_bytes:
        max_bytes = min(
            int(budget.available_bytes * RECURRENT_FRACTION), budget.available_bytes - page_bytes * needed_pages
        )
        max_slots = max(0, max_bytes // slot_bytes - 1)
        if may_run_fewer:
            max_num_seqs = max(1, min(max_num_seqs, max_slots * 3 // 4))
        slots = max_num_seqs + (_snapshots(max_num_seqs, max_slots) if snapshots else 0)
    fitting_pages = max(0, (budget.available_bytes - budget.states(slots)) // page_bytes)
    if fitting_pages < needed_pages:
        max_fitting_len = layout.max_sequence_tokens(fitting_pages, max_model_len, max_num_batched_tokens)
        raise BudgetError(_memory_error(budget, needed_pages, max_fitting_len, slots, max_num_seqs, max_model_len))
    pages = min(needed_pages * max_num_seqs, fitting_pages)
    penalty_slots = min(penalty_slots, max_num_seqs)
    rows = _rows(model, budget, pages, slots, penalty_slots, max_num_seqs, layout)
    if workspace is not None:
        rows.append(unused(memory_bytes, rows))
    return MemoryPlan(pages, slots, penalty_slots, logit_rows, max_num_seqs, page_bytes, slot_bytes, rows, workspace)


def smallest_budget(is_enough: Callable[[int], bool], largest_bytes: int) -> int | None:
    """Return the smallest number of whole MiB that is enough, or None if `largest_bytes` are not enough.

    `is_enough` may raise BudgetError instead of returning False.
    """

    def suffices(num_mib: int) -> bool:
        try:
            return is_enough(num_mib * _STEP_BYTES)
        except BudgetError:
            return False

    low, high = 0, largest_bytes // _STEP_BYTES
    if not suffices(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high * _STEP_BYTES


def _rows(
    model: ModelShape,
    budget: _Budget,
    pages: int,
    slots: int,
    penalty_slots: int,
    max_num_seqs: int,
    layout: PageLayout,
) -> list[MemoryRow]:
    """Return the rows of the memory table that the engine shows to its user, in bytes per purpose."""
    penalty_size = size_text(penalty_slots * PENALTY_BYTES * model.vocab_size)
    penalty_note = f"{penalty_size} for penalties of {penalty_slots:,} sequences"  # 80 columns part no size and unit
    rows = [
        MemoryRow("weights", model.weight_bytes),
        MemoryRow(
            "KV pages", pages * budget.page, f"{pages:,} pages of {PAGE_SIZE} tokens{_layers_note(model.caches)}"
        ),
        MemoryRow("reserve", budget.reserve, f"activations, workspaces, {penalty_note}"),
    ]
    if slots:
        note = f"{slots:,} slots of {size_text(budget.slot)}: {max_num_seqs:,} to run, the rest for snapshots"
        rows.insert(1, MemoryRow("recurrent states", budget.states(slots), note))
    if budget.tables:
        note = f"{layout.column_pages} tables, each of {max_num_seqs:,} sequences"
        rows.insert(-1, MemoryRow("page tables", budget.tables, note))
    if budget.scratch:
        rows.insert(-1, MemoryRow("scratch", budget.scratch, "of weights that a step dequantizes"))
    return rows


def _workspace(
    model: ModelShape,
    seqs: int,
    *,
    max_num_batched_tokens: int,
    max_model_len: int,
    penalty_slots: int,
    has_graphs: bool,
    window: int,
) -> Workspace:
    """Return the workspace of an engine of `seqs` sequences."""
    assert model.step is not None, "the caller knows the sizes of a step"
    return plan_workspace(
        model.step,
        vocab_size=model.vocab_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        penalty_slots=min(seqs, penalty_slots),
        logit_rows=min(seqs, MAX_LOGIT_ROWS),
        has_graphs=has_graphs,
        window=window,
    )


def unused(memory_bytes: int, rows: list[MemoryRow]) -> MemoryRow:
    """Return a row for the part of `memory_bytes` that `rows` do not use. An engine allocates it at its start too."""
    return MemoryRow("unused", memory_bytes - sum(row.size_bytes for row in rows), "held, for steps that need more")


def _snapshots(max_num_seqs: int, max_slots: int) -> int:
    """Return the number of snapshots: one per running sequence, or fewer so that all states fit into `max_slots`."""
    return max(min(max(max_num_seqs, KEPT_CONVERSATIONS), max_slots - max_num_seqs), _min_snapshots(max_num_seqs))


def _min_snapshots(max_num_seqs: int) -> int:
    """Return the minimum number of snapshots with which the prefix cache is useful."""
    return max(max_num_seqs // 8, 1)


def _layers_note(caches: KVCacheGroups) -> str:
    """Return a text that says which layers a page holds.

    The text is empty if a page holds all layers that have pages.
    """
    max_slots = sum(len(group.layers) for group in caches.attention)
    return "" if caches.layers_per_page == max_slots else f" in {caches.layers_per_page} of {max_slots} layers"


def _memory_error(
    budget: _Budget, pages: int, max_fitting_len: int, slots: int, max_num_seqs: int, max_model_len: int
) -> str:
    """Return the error for a `max_model_len` with which not even one sequence fits.

    It names the largest settings that fit. A full sequence has `pages` pages. `max_fitting_len` is the largest
    `max_model_len` that fits.
    """
    needed_pages = budget.page * pages
    advice = [f"--max-model-len {max_fitting_len} or less"] if max_fitting_len else []
    tables = f", page tables ({size_text(budget.tables)})" if budget.tables else ""
    tables += f", scratch of quantized weights ({size_text(budget.scratch)})" if budget.scratch else ""
    states = ""
    if slots:
        states = (
            f", the recurrent states of {max_num_seqs} sequences and of snapshots ({size_text(budget.states(slots))})"
        )
        fitting_pages = max(0, (budget.available_bytes - needed_pages) // budget.slot - 1)
        max_slots = max(
            (count for count in range(fitting_pages) if count + _min_snapshots(count) <= fitting_pages), default=0
        )
        advice += [f"--max-num-seqs {max_slots} or less"] if 0 < max_slots < max_num_seqs else []
    return (
        f"{size_text(budget.total)} must hold the weights ({size_text(budget.weights)}){states}{tables} and a reserve "
        f"of {size_text(budget.reserve)}, which leaves pages for {max_fitting_len} tokens; --max-model-len "
        f"{max_model_len} needs {size_text(needed_pages)} of pages. "
        + (f"Set {' or '.join(advice)}, or raise --memory." if advice else "Raise --memory.")
    )
