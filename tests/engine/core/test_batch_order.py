"""The order of a step's sequences on the device."""

from __future__ import annotations

import random

from meltcore.engine.core.batch import build_batch, sort_longest_first
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import PAGE_SIZE
from meltcore.engine.core.request import Request
from meltcore.engine.worker.prefill_graphs import GraphBucket
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams


def chunk(row: int, start: int, size: int = 1) -> Chunk:
    request = Request(AddRequest(str(row), [0] * (start + size), SamplingParams()), row, frozenset(), None)
    request.row = row
    return Chunk(request, start, size, samples=True)


def test_longest_sequences_come_first() -> None:
    plan = [chunk(1, 5), chunk(2, 900), chunk(3, 5), chunk(4, 70)]
    assert [each.request.row for each in sort_longest_first(plan)] == [2, 4, 1, 3]


def test_order_is_stable_while_all_sequences_grow() -> None:
    """Rows and positions are sent to a graph only when they differ from the expected ones."""
    starts = random.Random(0).choices(range(1000), k=200)
    plan = [chunk(row, start) for row, start in enumerate(starts, 1)]
    grown = [chunk(row, start + 1) for row, start in enumerate(starts, 1)]
    assert [each.request.row for each in sort_longest_first(plan)] == [
        each.request.row for each in sort_longest_first(grown)
    ]


def test_longest_decodes_come_first_in_mixed_batches() -> None:
    plan = [chunk(1, 3, 40), chunk(2, 5), chunk(3, 20 * PAGE_SIZE), chunk(4, 0, 300), chunk(5, 20 * PAGE_SIZE + 7)]
    chunks, batch = build_batch(plan, has_recurrent=False)
    assert [each.request.row for each in chunks] == batch.rows == [5, 3, 2, 1, 4]
    assert batch.num_decodes == 3


def test_windows_are_not_cut_into_chunks_of_prompts() -> None:
    """Nor do they run in a graph, whose decodes have one token."""
    plans = [[chunk(1, 3, 300), chunk(2, 7, 4)._replace(drafts=drafts), chunk(3, 9)] for drafts in ((), (5, 6, 7))]
    batches = [build_batch(plan, has_recurrent=True)[1] for plan in plans]
    decodes, windows = (batch.recurrent for batch in batches)
    assert decodes is not None
    assert windows is not None
    assert (decodes.num_windows, windows.num_windows) == (1, 2)
    assert decodes.chunks[:, 0].tolist() == [1, 2, 2, 2, 2, 2]
    assert windows.chunks.tolist() == decodes.chunks[1:].tolist()
    assert [GraphBucket(16, 512).holds(batch) for batch in batches] == [True, False]
