"""Actors of engines that die without them: no engine is started beside one that lives on. No Ray needed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_cluster import Node, ScriptedCluster, starts
from scripted_fleet import POLICY, fleet, rows, states
from server_harness import RunningServer, wait_until

from meltcore.process import start_ticks
from meltcore.protocol.tcp import ORPHAN_S

pytestmark = pytest.mark.slow
MODELS = "  gpu: {LOAD, memory: 30GiB, replicas: 2}\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@contextmanager
def two_replicas(folder: Path) -> Iterator[tuple[ScriptedCluster, RunningServer]]:
    cluster = ScriptedCluster(folder, a=Node("a", [40]), b=Node("b", [40]))
    (folder / "device").mkdir()
    with fleet(folder, cluster, MODELS) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        yield cluster, server


def kill_actor(cluster: ScriptedCluster, node: str, *, is_evicted: bool = False) -> None:
    with cluster.change() as there:
        there.nodes[node].actor_deaths += 1
        there.nodes[node].evictions += is_evicted


def pid_on(server: RunningServer, node: str) -> int | None:
    return next((row["pid"] for row in rows(server).values() if row["node"] == node), None)


def test_engine_ends_with_its_actor_before_another_is_started(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (cluster, server):
        before, other = pid_on(server, "a"), pid_on(server, "b")
        assert before is not None
        kill_actor(cluster, "a")
        wait_until(lambda: pid_on(server, "a") not in (None, before), "another engine")
        assert start_ticks(before) is None, "the first one has ended"
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        assert pid_on(server, "b") == other
        assert "node a: its actor has died" in server.stderr


def test_engine_that_does_not_end_is_waited_for(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (cluster, server):
        before = pid_on(server, "a")
        assert before is not None
        # It hangs, so it keeps its GPU memory; ZeroMQ notices after 4 s.
        os.kill(before, signal.SIGSTOP)
        try:
            kill_actor(cluster, "a")
            wait_until(lambda: "its actor has died" in server.stderr, "the death")
            died_s = time.monotonic()
            wait_until(lambda: pid_on(server, "a") not in (None, before), "another engine", 30)
            waited_s = time.monotonic() - died_s
        finally:
            os.kill(before, signal.SIGKILL)
        assert waited_s > ORPHAN_S


def test_eviction_is_no_death(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (cluster, server):
        for number in range(POLICY.max_deaths + 1):
            before = pid_on(server, "a")
            kill_actor(cluster, "a", is_evicted=True)
            wait_until(lambda: len(starts(tmp_path, "gpu")) == 3 + number, "the next start")  # noqa: B023
            wait_until(lambda: states(server) == ["ready"] * 2, "ready")
            assert pid_on(server, "a") != before
        assert "gpu replica 0" in server.stderr
        assert server.stderr.count("node a: its memory is low") >= POLICY.max_deaths + 1
        assert "is not started again" not in server.stderr
        assert starts(tmp_path, "gpu")[2:] == ["a"] * (POLICY.max_deaths + 1), "it stays on its node"
