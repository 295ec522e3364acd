"""Memory is returned to the system after a burst: once, when idle, and never under load."""

import asyncio
from typing import Any

import pytest

from meltcore.serve.http import http_server
from meltcore.serve.requests.stats import ServerStats


def test_memory_is_returned_once_after_a_burst_and_not_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[Any] = []
    monkeypatch.setattr("gc.collect", lambda: trims.append(1))

    async def run() -> None:
        server = ServerStats()
        (stats,) = server.models
        trim = http_server.IdleTrim(server)

        async def trims_after(accepted: int, in_flight: int) -> int:
            stats.add("accepted", accepted)
            stats.set_in_flight(in_flight)
            for _ in range(4):
                trim._check()
            return len(trims)

        assert await trims_after(http_server.MIN_EVENTS - 1, 0) == 0  # too few to be worth it
        assert await trims_after(1, 5) == 0  # five are still open
        assert await trims_after(0, 0) == 1
        assert await trims_after(0, 0) == 1
        assert await trims_after(http_server.MIN_EVENTS, 0) == 2

    asyncio.run(run())
