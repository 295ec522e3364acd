"""Connections that no API server process can take."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import WAIT_S

from meltcore.fleet.run import worker_pool
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.run.worker_pool import WorkerPool
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import FleetSpec


def test_connection_that_no_process_takes_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was kept without an answer for as long as no process served all open models."""
    monkeypatch.setattr(worker_pool, "ASSIGN_LIMIT_S", 0.1)

    async def wait() -> None:
        callbacks = {"report": Mock(), "on_lost": Mock(), "on_unreadable": Mock()}
        pool = WorkerPool(FleetSpec(models={}), ServerStats(), tmp_path, policy=RestartAfterPause(), **callbacks)
        client, accepted = socket.socketpair()
        with client:
            client.setblocking(False)
            pool.assign(accepted)
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(loop.sock_recv(client, 1), WAIT_S) == b""

    asyncio.run(wait())
