"""Actors of engines that die without them: no engine is started beside one that lives on. No Ray needed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from scripted_cluster import ORPHAN_S, ROOM_POLL_S, Node, ScriptedCluster, noted, starts
from scripted_fleet import POLICY, fleet, rows, states
from server_harness import RunningServer
from waiting import WAIT_S, wait_until

from meltcore.common.process import start_ticks
from meltcore.fleet.admin.admin import call_admin
from meltcore.fleet.daemon import find_fleet
from meltcore.protocol.cluster import EngineEnded, KillEngine
from meltcore.protocol.tcp import FIRST_CLIENT_S

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


@contextmanager
def one_engine(folder: Path) -> Iterator[tuple[RunningServer, int]]:
    """A server with one engine, and its process id. No two engines may have the memory of the device together."""
    cluster, device = ScriptedCluster(folder, a=Node("a", [40])), folder / "device"
    device.mkdir()
    with fleet(folder, cluster, "  gpu: {LOAD, memory: 30GiB}\n", "--device-folder", str(device)) as server:
        wait_until(lambda: states(server) == ["ready"], "ready")
        pid = pid_on(server, "a")
        assert pid is not None
        yield server, pid
    overcommitted = device / "overcommitted"
    assert not overcommitted.exists(), overcommitted.read_text()


def restart(server: RunningServer) -> None:
    call_admin(find_fleet(server.port).admin, "POST", "/restart", 60, model="gpu")


def lose_actors(server: RunningServer) -> None:
    """Kill the driver; the one that is started again knows no engine, and none has an actor."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    (driver,) = [pid for pid, command in commands.items() if "scripted_cluster" in command]
    os.kill(driver, signal.SIGKILL)
    wait_until(lambda: "the cluster can be changed again" in server.stderr, "another driver")


def test_restarted_engine_exits_by_itself(tmp_path: Path) -> None:
    with one_engine(tmp_path) as (server, before):
        restart(server)
        assert pid_on(server, "a") != before
        ends = [message for message in noted(tmp_path) if isinstance(message, EngineEnded)]
        assert [end.reason for end in ends] == ["exit status 0"]
        assert not any(isinstance(message, KillEngine) for message in noted(tmp_path))


def test_restart_ends_an_engine_without_an_actor_first(tmp_path: Path) -> None:
    with one_engine(tmp_path) as (server, before):
        lose_actors(server)
        restart(server)
        assert start_ticks(before) is None
        assert pid_on(server, "a") not in (None, before)


def test_restart_waits_for_an_engine_without_an_actor_that_hangs(tmp_path: Path) -> None:
    with one_engine(tmp_path) as (server, before), ThreadPoolExecutor(1) as pool:
        lose_actors(server)
        os.kill(before, signal.SIGSTOP)
        wait_until(lambda: "the connection is lost" in server.stderr, "the lost connection")
        restarted = pool.submit(restart, server)  # while the end of the first engine is waited for
        try:
            time.sleep(ORPHAN_S / 2)
            assert starts(tmp_path, "gpu") == ["a"], "the first one has its memory"
        finally:
            os.kill(before, signal.SIGKILL)
        restarted.result(WAIT_S)
        assert pid_on(server, "a") not in (None, before)


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
            died_s = time.monotonic()
            kill_actor(cluster, "a")
            wait_until(lambda: "its actor has died" in server.stderr, "the death")
            wait_until(lambda: pid_on(server, "a") not in (None, before), "another engine")
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


def engine_processes(folder: Path) -> set[int]:
    """The processes of scripted engines whose sockets are in a folder; those that have ended have no command."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_text()
            if "scripted_engine.py\0" in command and f"\0{folder}/" in command and "scripted_cluster" not in command:
                found.add(int(path.parent.name))
    return found


def test_evicted_start_leaves_one_process_and_is_tried_nowhere_else(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40]), b=Node("b", [40]))
    with fleet(tmp_path, cluster, "  gpu: {LOAD, memory: 30GiB}\n") as server:
        wait_until(lambda: states(server) == ["ready"], "ready")
        (node,) = starts(tmp_path, "gpu")
        with cluster.change() as there:
            there.nodes[node].evicts_starts = True
        (before,) = engine_processes(tmp_path)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: len(starts(tmp_path, "gpu")) == 2, "a start")
        wait_until(lambda: rows(server)["gpu.0"]["state"] == "pending", "pending")
        assert "its memory is low" in rows(server)["gpu.0"]["reason"]
        (left,) = engine_processes(tmp_path) - {before}
        time.sleep(10 * ROOM_POLL_S)
        assert starts(tmp_path, "gpu") == [node] * 2
        with cluster.change() as there:
            there.nodes[node].evicts_starts = False
        wait_until(lambda: len(starts(tmp_path, "gpu")) == 3, "the next start", 2 * FIRST_CLIENT_S)
        assert starts(tmp_path, "gpu") == [node] * 3
        wait_until(lambda: start_ticks(left) is None, "the end of the first one without a client")
        wait_until(lambda: states(server) == ["ready"], "ready")
        assert "is not started again" not in server.stderr
