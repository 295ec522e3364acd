"""Open answers over HTTP while a node or the head of the cluster goes: those of lost engines end, others go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ray_nodes import (
    POLICY,
    Stream,
    add_node,
    all_ready,
    engine_pids,
    is_on_gpu_node,
    rows,
    start_nodes,
    write_fleet,
)
from server_harness import MODEL, RunningServer, fleet_command, running
from waiting import WAIT_S, wait_until

from meltcore.common.process import start_ticks
from meltcore.fleet.run.served_model import ROOM_POLL_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEP_S, TOKENS = 0.02, 600


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def wait_all_ready(server: RunningServer) -> None:
    wait_until(lambda: server.request("GET", "/health").status == 200, "healthy")
    wait_until(lambda: all_ready(server), "all ready")


def end(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0
    wait_until(lambda: not engine_pids(), "no engine left")


@pytest.mark.parametrize("lost", ["node", "raylet"])
def test_answers_of_a_lost_node_end_and_health_names_its_model(lost: str, tmp_path: Path) -> None:
    """With the raylet its actors die, and leave their engines without a parent."""
    path = write_fleet(tmp_path, step_s=STEP_S)
    with (
        start_nodes(tmp_path, [], [40, 40]) as cluster,
        running(fleet_command(path, POLICY, cluster.address), tmp_path / "err") as server,
    ):
        wait_all_ready(server)
        on_node = {pid for pid in engine_pids() if is_on_gpu_node(pid)}
        assert len(on_node) == 2
        streams = [Stream(server, model, TOKENS) for model in (MODEL, MODEL, "gpu")]
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        for pid in on_node if lost == "node" else ():
            os.kill(pid, signal.SIGKILL)
        ends = [stream.end() for stream in streams]
        assert sorted(each == "done" for each in ends) == [False, False, True]
        assert all("has died" in how or "cannot be reached" in how for how in ends if how != "done")
        kept = streams[ends.index("done")]
        assert all(stream.ended_s < kept.ended_s for stream in streams if stream is not kept), "it goes on"

        # The replica on a CPU has room on the head; the model on a GPU has none, and is named.
        wait_until(lambda: [row["state"] for row in rows(server)][:2] == ["ready"] * 2, "both replicas")
        wait_until(lambda: "no other node has 2.50 GiB free" in server.stderr, "no room")
        health = server.request("GET", "/health").json
        assert (health["status"], list(health["models"])) == ("degraded", ["gpu"])
        assert "is gone, and no other node has 2.50 GiB free for it" in health["models"]["gpu"]
        assert rows(server)[2]["state"] == "pending"
        assert server.post("/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 2}).status == 200
        assert server.post("/v1/completions", {"model": "gpu", "prompt": "ab", "max_tokens": 2}).status == 503

        # A node comes back after more tries than deaths are allowed.
        time.sleep(6 * ROOM_POLL_S)
        assert rows(server)[2]["state"] == "pending"
        add_node(cluster, tmp_path, [40, 40])
        wait_until(lambda: all_ready(server), "all ready")
        assert Stream(server, "gpu", 3).end() == "done"
        end(server)
        assert not [line for line in server.stderr.splitlines() if "\x1b[" in line or "raylet" in line], "Ray's own log"


def test_engine_ends_with_its_actor_before_another_is_started(tmp_path: Path) -> None:
    path = write_fleet(tmp_path, step_s=STEP_S)
    with (
        start_nodes(tmp_path, [], [40, 40]) as cluster,
        running(fleet_command(path, POLICY, cluster.address), tmp_path / "err") as server,
    ):
        wait_all_ready(server)
        pid = rows(server)[2]["pid"]
        actor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: rows(server)[2]["pid"] not in (None, pid), "another engine")
        assert start_ticks(pid) is None, "the first one has ended"
        wait_all_ready(server)
        assert len(engine_pids()) == 3
        assert "its actor has died" in server.stderr
        end(server)


def test_answers_go_on_without_the_head_and_ps_says_so(tmp_path: Path) -> None:
    path = write_fleet(tmp_path, step_s=STEP_S)
    with (
        start_nodes(tmp_path, [], [40, 40]) as cluster,
        running(fleet_command(path, POLICY, cluster.address), tmp_path / "err") as server,
    ):
        wait_all_ready(server)
        pids = engine_pids()
        streams = [Stream(server, model, TOKENS) for model in (MODEL, MODEL, "gpu")]
        cluster.head_node.kill_gcs_server()
        problem = "the cluster cannot be changed: --ray"
        wait_until(lambda: all(row["reason"].startswith(problem) for row in rows(server)), "ps")
        assert [stream.end() for stream in streams] == ["done"] * 3
        assert engine_pids() == pids
        assert [row["state"] for row in rows(server)] == ["ready"] * 3
        assert server.request("GET", "/health").json["status"] == "ready"
        assert Stream(server, "gpu", 3).end() == "done"
        end(server)
