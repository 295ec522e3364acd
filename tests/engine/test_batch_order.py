"""The order in which a step's sequences stand on the device."""

from __future__ import annotations

import random

from meltcore.engine.batch import build_batch, longest_first
from meltcore.engine.messages import AddRequest
from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.request import Request
from meltcore.engine.sampling_params import SamplingParams
from meltcore.engine.scheduler import Chunk


def chunk(row: int, start: int, size: int = 1) -> Chunk:
    request = Request(AddRequest(str(row), [0] * (start + size), SamplingParams()), row, frozenset(), None)
    request.row = row
    return Chunk(request, start, size, samples=True)


def test_long_sequences_come_first_and_equals_as_planned() -> None:
    plan = [chunk(1, 5), chunk(2, 900), chunk(3, 5), chunk(4, 70)]
    assert [each.request.row for each in longest_first(plan)] == [2, 4, 1, 3]


def test_the_order_stays_while_all_grow_by_a_token() -> None:
    """A graph is told rows and positions only where they are not what it expects."""
    starts = random.Random(0).choices(range(1000), k=200)
    plan = [chunk(row, start) for row, start in enumerate(starts, 1)]
    grown = [chunk(row, start + 1) for row, start in enumerate(starts, 1)]
    assert [each.request.row for each in longest_first(plan)] == [each.request.row for each in longest_first(grown)]


def test_beside_prompts_too_the_longest_that_decode_come_first() -> None:
    plan = [chunk(1, 3, 40), chunk(2, 5), chunk(3, 20 * PAGE_SIZE), chunk(4, 0, 300), chunk(5, 20 * PAGE_SIZE + 7)]
    chunks, batch = build_batch(plan, recurrent=False)
    assert [each.request.row for each in chunks] == batch.rows == [5, 3, 2, 1, 4]
    assert batch.decodes == 3
