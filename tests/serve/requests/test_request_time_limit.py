"""The time limit of requests: one timer for all."""

import asyncio
import sys
import time

import pytest
from waiting import WAIT_S

from meltcore.serve.requests import open_tickets
from meltcore.serve.requests.open_tickets import RequestTimeLimit
from meltcore.serve.tasks.generation.generation_ticket import GenerationTicket


def aged(age_s: float) -> GenerationTicket:
    return GenerationTicket(arrived_s=time.monotonic() - age_s, streaming=True)


def test_each_overdue_request_is_ended_once_and_no_other() -> None:
    async def run() -> None:
        ended: list[tuple[GenerationTicket, float]] = []  # with its age in s
        both = asyncio.Event()

        def end(each: GenerationTicket) -> None:
            ended.append((each, time.monotonic() - each.arrived_s))
            if len(ended) == 2:
                both.set()

        limit = RequestTimeLimit(0.2, end)
        late, later, answered = aged(0.1), aged(0.0), aged(0.1)
        for each in (later, late, answered):  # a long upload comes in after younger requests
            limit.watch(each)
        limit.forget(answered)
        await asyncio.wait_for(both.wait(), WAIT_S)
        await asyncio.sleep(0.05)
        assert {each for each, _ in ended} == {late, later}
        assert len(ended) == 2
        assert all(age_s >= 0.2 for _, age_s in ended)
        limit.forget(late)

    asyncio.run(run())


def test_timer_runs_only_while_requests_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    look = RequestTimeLimit._check
    monkeypatch.setattr(open_tickets, "TIME_CHECK_S", 0.01)
    monkeypatch.setattr(RequestTimeLimit, "_check", lambda limit: (looks.append(1), look(limit)))

    async def run() -> None:
        ended: list[GenerationTicket] = []
        limit = RequestTimeLimit(600.0, ended.append)
        answered = aged(0)
        limit.watch(answered)
        limit.forget(answered)
        await asyncio.sleep(0.1)
        assert len(looks) == 1
        limit.watch(aged(601))
        await asyncio.sleep(0.1)
        assert len(looks) == 2
        assert len(ended) == 1

    asyncio.run(run())


def test_burst_leaves_no_memory_in_the_table() -> None:
    async def run() -> None:
        limit = RequestTimeLimit(600.0, lambda ticket: None)
        burst = [aged(0) for _ in range(1000)]
        for each in burst:
            limit.watch(each)
        for each in burst:
            limit.forget(each)
        assert sys.getsizeof(limit._watched) == sys.getsizeof(set())

    asyncio.run(run())
