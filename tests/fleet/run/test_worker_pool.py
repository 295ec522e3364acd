"""Connections that no API server process can take, and a process that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import WAIT_S, until

from meltcore.common.process import is_stopped
from meltcore.fleet.run import worker_pool
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.run.worker_pool import APIServerWorker, WorkerPool
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


@pytest.mark.parametrize(("started", "assigned", "ends"), [(True, 1, True), (False, 0, True), (True, 0, False)])
def test_stopped_process_with_connections_is_ended(started: bool, assigned: int, ends: bool, tmp_path: Path) -> None:
    """Also one that has not started; one that has nothing to do may be stopped for as long as its user wants."""

    async def stop() -> None:
        callbacks = {"report": Mock(), "on_lost": Mock(), "on_unreadable": Mock()}
        stats = ServerStats(num_processes=2)
        pool = WorkerPool(FleetSpec(models={}), stats, tmp_path, policy=RestartAfterPause(), **callbacks)
        worker = APIServerWorker(1)
        pool._workers.append(worker)
        worker.started, worker.assigned = started, assigned
        process = worker.process = await asyncio.create_subprocess_exec("sleep", "600")
        try:
            now_s = time.monotonic()
            pool._stuck_watch.check(now_s)
            pool._stuck_watch.check(now_s + 60)
            assert worker.problem == ""
            os.kill(process.pid, signal.SIGSTOP)
            await until(lambda: is_stopped(process.pid))
            pool._stuck_watch.check(now_s + 61)
            assert worker.problem == "", "seen for a moment is not enough"
            pool._stuck_watch.check(now_s + 70)
            assert worker.problem == ("its process is stopped by a signal" if ends else "")
        finally:
            if not ends:
                process.kill()
            assert await asyncio.wait_for(process.wait(), WAIT_S) == -signal.SIGKILL

    asyncio.run(stop())
