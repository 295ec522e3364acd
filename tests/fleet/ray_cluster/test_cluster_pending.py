"""Engines that no node has room for, or whose cluster cannot be changed, wait: that is no death. No Ray needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import scripted_cluster
from scripted_cluster import ROOM_POLL_S, Node, ScriptedCluster, noted, starts, use_scripted_cluster
from scripted_fleet import TWO_MODELS, fleet, rows, states
from server_harness import MODEL
from waiting import wait_until

from meltcore.cli.main import main
from meltcore.common.process import start
from meltcore.fleet import daemon
from meltcore.fleet.admin.admin import call_admin
from meltcore.protocol.cluster import ReadNodes

pytestmark = pytest.mark.slow
POLLS_S = 12 * ROOM_POLL_S  # more tries than deaths are allowed
GONE = "the node b is gone, and no other node has 2.50 GiB free for it"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_engine_waits_for_its_lost_node_and_for_the_head(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", host_gib=8), b=Node("b", [40]))
    with fleet(tmp_path, cluster, TWO_MODELS) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")

        # Its node is lost: it is pending for longer than five tries take, and starts once a node has room.
        with cluster.change() as there:
            lost = there.nodes.pop("b")
        wait_until(lambda: rows(server)["gpu.0"]["state"] == "pending", "pending")
        time.sleep(POLLS_S)
        row = rows(server)["gpu.0"]
        assert (row["state"], row["status"]) == ("pending", "restarting")
        assert row["reason"] == f"gpu is pending: {GONE}"
        health = server.request("GET", "/health").json
        assert (health["status"], health["models"]) == ("degraded", {"gpu": f"gpu is pending: {GONE}"})
        assert server.stderr.count("event=engine_pending") == 1, "said once, and tried again quietly"
        assert server.chat().status == 200
        with cluster.change() as there:
            there.nodes["b"] = lost
        wait_until(lambda: states(server) == ["ready"] * 2, "ready on the node that is back")
        assert server.post("/v1/completions", {"model": "gpu", "prompt": "ab", "max_tokens": 2}).status == 200

        # The head is silent: engines serve, `ps` says so, and one that dies meanwhile waits for it.
        with cluster.change() as there:
            there.problem = "the head node has not answered for 3 s"
        problem = f"the cluster cannot be changed: --ray {cluster.path}: {there.problem}"
        wait_until(lambda: {row["reason"] for row in rows(server).values()} == {problem}, "the problem in ps")
        os.kill(rows(server)["gpu.0"]["pid"], signal.SIGKILL)
        wait_until(lambda: rows(server)["gpu.0"]["state"] == "pending", "pending")
        time.sleep(POLLS_S)
        assert rows(server)["gpu.0"]["reason"] == f"gpu is pending: {problem}"
        assert server.chat().status == 200
        with cluster.change() as there:
            there.problem = ""
        wait_until(lambda: states(server) == ["ready"] * 2, "ready with the head")
        assert {row["reason"] for row in rows(server).values()} == {""}


def test_node_with_a_problem_does_not_keep_engines_of_a_lost_one_from_others(tmp_path: Path) -> None:
    nodes = {"a": Node("a", host_gib=8), "b": Node("b", [40]), "c": Node("c", [40], problem="it does not answer")}
    cluster = ScriptedCluster(tmp_path, **nodes)
    left_out = "node c is left out: it does not answer"
    with fleet(tmp_path, cluster, TWO_MODELS) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        assert left_out in server.stderr
        with cluster.change() as there:
            there.nodes.pop("b")
        wait_until(lambda: rows(server)["gpu.0"]["state"] == "pending", "pending")
        assert rows(server)["gpu.0"]["reason"] == f"gpu is pending: {GONE}; {left_out}"
        assert server.request("GET", "/health").json["models"] == {"gpu": f"gpu is pending: {GONE}; {left_out}"}
        with cluster.change() as there:
            there.nodes["d"] = Node("d", [40])
        wait_until(lambda: states(server) == ["ready"] * 2, "ready on another node")
        assert rows(server)["gpu.0"]["node"] == "d"
        with cluster.change() as there:
            there.nodes["c"].problem = ""
            there.nodes.pop("d")
        wait_until(lambda: rows(server)["gpu.0"]["node"] == "c", "ready on the node that had a problem")
        assert "node c can be used again" in server.stderr
        assert server.stderr.count("event=engine_pending") == 1

        # Its node is left out as the nodes are read for another engine: its next start does not ask it.
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        with cluster.change() as there:
            there.nodes["c"].problem = "it does not answer"
        assert main(["reload"]) == 0
        there.nodes["e"] = Node("e", [40])
        with cluster.change():
            os.kill(rows(server)["gpu.0"]["pid"], signal.SIGKILL)
        wait_until(lambda: rows(server)["gpu.0"]["node"] == "e", "ready on another node")
        assert "the node c is left out: its engine of gpu is started on e" in server.stderr
        assert starts(tmp_path, "gpu")[-2:] == ["c", "e"]


def test_engine_whose_device_is_gone_says_so_while_another_node_has_room(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, b=Node("b", [40]), c=Node("c", [40, 40]))
    models = "  pinned: {LOAD, memory: 2.5GiB, device: [0]}\n  free: {LOAD, memory: 2.5GiB}\n"
    with fleet(tmp_path, cluster, models) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        assert rows(server)["pinned.0"]["node"] == "b"
        with cluster.change() as there:
            lost = there.nodes.pop("b")
        wait_until(lambda: rows(server)["pinned.0"]["state"] == "pending", "pending")
        assert rows(server)["pinned.0"]["reason"] == "pinned is pending: the node b is gone, and device: GPU 0 is gone"
        with cluster.change() as there:
            there.nodes["b"] = lost
            lost.reserved_gib = 39
        reason = "other Ray jobs have the memory of GPU 0 of b, and device: GPU 0 has not 2.50 GiB free for it"
        wait_until(lambda: rows(server)["pinned.0"]["reason"].endswith(reason), "no room on its GPU")
        with cluster.change() as there:
            lost.reserved_gib = 0
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        assert rows(server)["pinned.0"]["node"] == "b"


def test_engine_waits_for_a_driver_that_hangs(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], host_gib=8))
    with fleet(tmp_path, cluster, TWO_MODELS) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        (driver,) = [pid for pid in children if b"scripted_cluster" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        with cluster.change() as there:
            there.refuses = True
        os.kill(int(driver), signal.SIGSTOP)
        wait_until(lambda: "nothing answers there" in rows(server)["gpu.0"]["reason"], "the problem in ps")
        assert server.chat().status == 200
        os.kill(rows(server)["gpu.0"]["pid"], signal.SIGKILL)
        wait_until(lambda: rows(server)["gpu.0"]["state"] == "pending", "pending")
        time.sleep(POLLS_S)
        assert rows(server)["gpu.0"]["state"] == "pending"
        with cluster.change() as there:
            there.refuses = False
        wait_until(lambda: states(server) == ["ready"] * 2, "ready with another driver")
        assert "the cluster can be changed again" in server.stderr
        assert "its driver has not answered for 2 s" in server.stderr
        assert not Path(f"/proc/{driver}").exists()
        # An engine that the first driver has started, and that its end has left alone.
        assert server.chat().status == 200


def test_model_opens_with_the_replica_that_has_room_and_the_other_follows(tmp_path: Path) -> None:
    # NVML shows room on c, which Ray has given to another job.
    c = Node("c", [40], reserved_gib=30)
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40]), b=Node("b", [40], is_full=True), c=c)
    with fleet(tmp_path, cluster, f"  {MODEL}: {{LOAD, memory: 30GiB, replicas: 2}}\n") as server:
        wait_until(lambda: states(server) == ["ready", "pending"], "one is ready, one pending")
        assert server.chat().status == 200
        health = server.request("GET", "/health").json
        assert (health["status"], health["models"]) == ("degraded", {MODEL: "1 of 2 replicas serve"})
        reason = "other Ray jobs have the memory of GPU 0 of b"
        assert reason in server.stderr
        assert [row["reason"].partition(",")[0] for row in rows(server).values()] == ["", reason]
        with cluster.change() as there:
            there.nodes["b"].is_full = False
        wait_until(lambda: states(server) == ["ready", "ready"], "both")
        assert rows(server)[f"{MODEL}.1"]["restarts"] == 0


def test_fleet_in_the_background_is_up_with_a_model_that_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_scripted_cluster(monkeypatch.setattr)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))

    def start_scripted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if command[:3] != [sys.executable, "-m", "meltcore.fleet.daemon"]:
            return start(command, **options)
        return start([sys.executable, scripted_cluster.__file__, *command[3:], "background"], **options)

    monkeypatch.setattr("meltcore.common.process.start", start_scripted)
    # The plan sees room on b, and as the engine starts, another job has it.
    cluster = ScriptedCluster(tmp_path, a=Node("a", host_gib=8), b=Node("b", [40], is_full=True))
    file = tmp_path / "fleet.yaml"
    models = "sums: {checkpoint: meltcore/sums, device: cpu}, gpu: {checkpoint: meltcore/sums, memory: 30GiB}"
    file.write_text(f"server: {{port: 0}}\nmodels: {{{models}}}\n")
    try:
        assert main(["up", str(file), "--daemon", "--start-timeout", "120", "--ray", str(cluster.path)]) == 1
        printed = capfd.readouterr()
        assert "listening on http" in printed.out
        pending, goes_on = printed.err.splitlines()
        assert pending == "meltcore: gpu is pending: other Ray jobs have the memory of GPU 0 of b"
        assert goes_on.startswith("meltcore: the fleet goes on in the background, and tries to start gpu again")
        found = {row["model"]: row for row in call_admin(daemon.find_fleet(None).admin, "GET", "/ps")}
        assert (found["sums"]["state"], found["gpu"]["state"]) == ("ready", "pending")
        # The background plans from what `up` has read: the GPUs keep the numbers that the plan has.
        reads = [message for message in noted(tmp_path) if isinstance(message, ReadNodes)]
        assert sum(message.limit_s == ReadNodes().limit_s for message in reads) == 1
    finally:
        assert main(["down"]) == 0


def test_model_is_pending_for_up_while_none_of_its_engines_loads() -> None:
    def answered(*states: str, status: str = "loading") -> bool:
        rows = [{"model": "a", "state": state, "status": status, "reason": "a is pending: x"} for state in states]
        return daemon._has_answered([{"model": "b", "state": "ready", "status": "ready", "reason": ""}, *rows])

    assert answered("pending", "failed")
    assert answered("pending", status="restarting")
    assert not answered("pending", "loading")
    assert not answered("pending", "waiting")
    assert not answered("pausing", status="restarting")
    assert answered("ready", "pending", status="ready")
    assert answered("failed", status="failed")


def test_engine_that_dies_at_each_start_still_fails(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], host_gib=8))
    with fleet(tmp_path, cluster, TWO_MODELS, "--die-loading") as server:
        wait_until(lambda: states(server) == ["failed"] * 2, "failed")
