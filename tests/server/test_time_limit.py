"""The limit on an answer's time: one timer for all requests of a front."""

import asyncio
import sys
import time

import pytest

from meltcore.server import time_limit
from meltcore.server.generation import Generation
from meltcore.server.time_limit import TimeLimit


def generation(age_s: float) -> Generation:
    return Generation("g", arrived_s=time.monotonic() - age_s, streaming=True)


def test_each_request_past_its_time_is_ended_once_and_no_other() -> None:
    async def run() -> None:
        ended: list[Generation] = []
        limit = TimeLimit(0.2, ended.append)
        late, later, answered = generation(0.1), generation(0.0), generation(0.1)
        for each in (later, late, answered):  # a long upload comes in after younger requests
            limit.watch(each)
        limit.forget(answered)
        await asyncio.sleep(0.15)
        assert ended == [late]
        await asyncio.sleep(0.15)
        assert ended == [late, later]
        limit.forget(late)

    asyncio.run(run())


def test_nobody_looks_while_nothing_is_watched_and_a_new_request_is_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    look = TimeLimit._look
    monkeypatch.setattr(time_limit, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(TimeLimit, "_look", lambda limit: (looks.append(1), look(limit)))

    async def run() -> None:
        ended: list[Generation] = []
        limit = TimeLimit(600.0, ended.append)
        answered = generation(0)
        limit.watch(answered)
        limit.forget(answered)
        await asyncio.sleep(0.1)
        assert len(looks) == 1
        limit.watch(generation(601))
        await asyncio.sleep(0.1)
        assert len(looks) == 2
        assert len(ended) == 1

    asyncio.run(run())


def test_a_burst_leaves_no_room_in_the_table() -> None:
    async def run() -> None:
        limit = TimeLimit(600.0, lambda generation: None)
        burst = [generation(0) for _ in range(1000)]
        for each in burst:
            limit.watch(each)
        for each in burst:
            limit.forget(each)
        assert sys.getsizeof(limit._watched) == sys.getsizeof(set())

    asyncio.run(run())
