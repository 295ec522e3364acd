"""Memory given back after a burst: once, when nothing runs any more, and never under load."""

import asyncio
from typing import Any

import pytest

from meltcore.server import idle
from meltcore.server.counts import Counts


def test_memory_is_given_back_once_after_a_burst_and_not_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[Any] = []
    monkeypatch.setattr(idle, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("gc.collect", lambda: trims.append(1))

    async def run() -> None:
        counts = Counts()
        idle.IdleTrim(counts)

        async def trims_after(accepted: int, in_flight: int) -> int:
            counts.add("accepted", accepted)
            counts.note_in_flight(in_flight)
            await asyncio.sleep(0.1)
            return len(trims)

        assert await trims_after(idle.ENOUGH_EVENTS - 1, 0) == 0  # too few to be worth it
        assert await trims_after(1, 5) == 0  # five are still open
        assert await trims_after(0, 0) == 1
        assert await trims_after(0, 0) == 1
        assert await trims_after(idle.ENOUGH_EVENTS, 0) == 2

    asyncio.run(run())
