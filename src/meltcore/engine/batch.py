"""From a step's plan to the flat arrays that the device reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.scheduler import Chunk, pages_for
from meltcore.kernels.attention import query_tiles
from meltcore.kernels.delta_net import delta_chunks
from meltcore.kernels.paged_attention import SegmentGroup

# A padded group's mask has segments * queries * keys entries; past this many the group is split (16 MiB of bool).
_MASK_LIMIT = 2**24


class StateStep(NamedTuple):
    """What recurrent layers are told of a step besides.

    slots: each chunk's; first_tokens: the index of each one's first token, then the number of tokens; pieces: how
    those longer than one token are cut (`delta_chunks`); restores, snapshots: (from, to) slots to copy in this order
    before the step and after it.
    """

    slots: list[int]
    first_tokens: np.ndarray
    pieces: np.ndarray
    restores: list[tuple[int, int]]
    snapshots: list[tuple[int, int]]


class Batch(NamedTuple):
    """The chunks of a step, flat, in an order in which neighbours pad together; token arrays follow it.

    decodes: how many chunks, the first ones, are of one token; tiles: the queries of the others
    (`query_tiles`), counted from the first of them.
    token_ids: known ids, 0 where the token is still on the device; unread_tokens / unread_rows: where those sit and
    which row's last token they are; last_tokens / sample_rows: for each chunk that samples, its last token's index
    and its row; states: None where the model has no recurrent layers.
    """

    decodes: int
    tiles: np.ndarray
    groups: list[SegmentGroup]
    token_ids: np.ndarray
    positions: np.ndarray
    token_rows: np.ndarray
    places: np.ndarray
    rows: list[int]
    starts: list[int]
    unread_tokens: list[int]
    unread_rows: list[int]
    last_tokens: list[int]
    sample_rows: list[int]
    states: StateStep | None


class NewPages(NamedTuple):
    """Entries of the device's page table that change: sequence rows[i] has pages[i] as its columns[i]-th."""

    rows: list[int]
    columns: list[int]
    pages: list[int]


class Step(NamedTuple):
    """All that the device is told of a step: numbers only, so that it can be sent to another process.

    Where every sequence decodes a token that is on the device already, rows and positions say which and where, and
    batch is None; else they are empty.
    """

    new_pages: NewPages
    rows: list[int]
    positions: list[int]
    batch: Batch | None


def take_new_pages(plan: list[Chunk]) -> NewPages:
    """The pages that sequences were given since their last step. They count as sent from now on."""
    rows: list[int] = []
    columns: list[int] = []
    pages: list[int] = []
    for chunk in plan:
        request = chunk.request
        sent, held = request.sent_pages, len(request.pages)
        if sent < held:
            rows += [request.row] * (held - sent)
            columns += range(sent, held)
            pages += request.pages[sent:]
            request.sent_pages = held
    return NewPages(rows, columns, pages)


def longest_first(plan: list[Chunk]) -> list[Chunk]:
    """Decoding sequences in the order in which attention to them is best begun: one that is begun last runs on alone,
    and then should be short (longest processing time first: Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
    """
    return sorted(plan, key=lambda chunk: chunk.start, reverse=True)


def build_batch(plan: list[Chunk], *, recurrent: bool) -> tuple[list[Chunk], Batch]:
    """Sort, group and flatten a plan of at least one chunk. Returns the chunks in the order of the batch too."""
    chunks = sorted(longest_first(plan), key=_order)
    sizes = np.array([chunk.size for chunk in chunks])
    ends = np.cumsum(sizes)
    starts = np.array([chunk.start for chunk in chunks])
    rows = np.array([chunk.request.row for chunk in chunks])
    within = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    groups = _groups(chunks, ends.tolist())
    decodes = int((sizes == 1).sum())

    token_ids = np.zeros(ends[-1], dtype=np.int64)
    unread_tokens, unread_rows = [], []
    for chunk, end in zip(chunks, ends.tolist(), strict=True):
        known = chunk.request.token_ids
        if chunk.start < len(known):
            token_ids[end - chunk.size : end] = known[chunk.start : chunk.start + chunk.size]
        else:
            unread_tokens.append(end - 1)
            unread_rows.append(chunk.request.row)

    places = within.copy()
    for group in groups:
        members = np.arange(group.last - group.first).repeat(sizes[group.first : group.last])
        places[group.first_token : group.last_token] += members * group.max_queries
    samples = [(end - 1, chunk.request.row) for chunk, end in zip(chunks, ends.tolist(), strict=True) if chunk.samples]
    batch = Batch(
        decodes=decodes,
        tiles=query_tiles(
            [
                (chunk.request.row, end - chunk.size - decodes, chunk.size, chunk.start)
                for chunk, end in zip(chunks[decodes:], ends.tolist()[decodes:], strict=True)
            ]
        ),
        groups=groups,
        token_ids=token_ids,
        positions=within + np.repeat(starts, sizes),
        token_rows=np.repeat(rows, sizes),
        places=places,
        rows=rows.tolist(),
        starts=starts.tolist(),
        unread_tokens=unread_tokens,
        unread_rows=unread_rows,
        last_tokens=[token for token, _ in samples],
        sample_rows=[row for _, row in samples],
        states=_state_step(plan, chunks, sizes, decodes) if recurrent else None,
    )
    return chunks, batch


def _state_step(plan: list[Chunk], chunks: list[Chunk], sizes: np.ndarray, decodes: int) -> StateStep:
    """Copies in the order of the plan: a snapshot may be evicted and its slot handed out once its copy is planned."""
    return StateStep(
        slots=[chunk.request.state_slot for chunk in chunks],
        first_tokens=np.concatenate([[0], np.cumsum(sizes)]),
        pieces=delta_chunks(sizes.tolist(), decodes),
        restores=[(chunk.restore, chunk.request.state_slot) for chunk in plan if chunk.restore],
        snapshots=[(chunk.request.state_slot, chunk.snapshot) for chunk in plan if chunk.snapshot],
    )


def _order(chunk: Chunk) -> tuple[int, int]:
    """Single tokens first, and what pads well together beside each other; among those of a size the longest first."""
    queries, pages = _padding_class(chunk)
    return queries, -pages


def _padding_class(chunk: Chunk) -> tuple[int, int]:
    """Sizes and page counts rounded up to powers of two: chunks of one class waste less than half by padding."""
    return (chunk.size - 1).bit_length(), (pages_for(chunk.start + chunk.size) - 1).bit_length()


def _groups(chunks: list[Chunk], ends: list[int]) -> list[SegmentGroup]:
    groups = []
    first = 0
    while first < len(chunks):
        last = first + 1
        queries, pages = chunks[first].size, pages_for(chunks[first].start + chunks[first].size)
        while last < len(chunks) and _padding_class(chunks[last]) == _padding_class(chunks[first]):
            wider = max(queries, chunks[last].size)
            longer = max(pages, pages_for(chunks[last].start + chunks[last].size))
            if (last + 1 - first) * wider * longer * PAGE_SIZE > _MASK_LIMIT:
                break
            queries, pages, last = wider, longer, last + 1
        first_token = ends[first - 1] if first else 0
        groups.append(SegmentGroup(first, last, first_token, ends[last - 1], queries, pages))
        first = last
    return groups
