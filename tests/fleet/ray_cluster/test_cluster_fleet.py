"""A fleet on two raylets: replicas on both, the same answers, and every fault that ends an engine but no other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import (
    POLICY,
    SAID,
    all_ready,
    children,
    engine_pids,
    is_on_gpu_node,
    rows,
    start_nodes,
    write_fleet,
)
from server_harness import MODEL, fleet_command, running
from waiting import WAIT_S, wait_until

from meltcore.common.errors import ConfigError
from meltcore.common.process import start_ticks
from meltcore.fleet.plan.cluster import cluster_reader
from meltcore.fleet.plan.planned import FleetPlanner

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with start_nodes(tmp_path_factory.mktemp("nodes"), [], [40, 40]) as nodes:
        yield nodes


@pytest.fixture
def fleet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return write_fleet(tmp_path)


def test_fleet_serves_from_both_nodes_and_survives_what_ends_an_engine(cluster: Any, fleet_file: Path) -> None:
    with running(fleet_command(fleet_file, POLICY, cluster.address), fleet_file.with_suffix(".err")) as server:
        wait_until(lambda: server.request("GET", "/health").status == 200, "healthy")
        wait_until(lambda: all_ready(server), "both ready")
        found = rows(server)
        pids = [row["pid"] for row in found]
        assert engine_pids() == set(pids)
        environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        assert [b"CUDA_VISIBLE_DEVICES=0" in each for each in environments] == [False, False, True]
        threads = [name for each in environments for name in each if name.startswith(b"OMP_NUM_THREADS=")]
        assert len(threads) == 2
        answers = {
            server.chat("same words", max_tokens=20, seed=1).json["choices"][0]["message"]["content"] for _ in range(6)
        }
        assert len(answers) == 1
        logs = [Path(row["log"]) for row in found]
        assert [path.name for path in logs] == [f"{MODEL}@0.log", f"{MODEL}@1.log", "gpu.log"]
        wait_until(lambda: [path.read_text() for path in logs] == [f"{SAID}\n"] * 3, "the log of each engine")
        marks = [path for folder in cluster.temporary.glob("meltcore-marks-*") for path in folder.iterdir()]
        assert sorted(path.name for path in marks) == ["marks-cpu", "marks-node:0"]

        # A killed engine fails its own requests; the other goes on, and the replica comes back.
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: "has died: killed by signal 9" in server.stderr, "death reported")
        assert server.chat("other", max_tokens=3).status == 200
        wait_until(lambda: all_ready(server), "back")

        # One that hangs is lost by its connection.
        hanging = rows(server)[1]["pid"]
        os.kill(hanging, signal.SIGSTOP)
        wait_until(lambda: "cannot be reached: the connection is lost" in server.stderr, "loss reported")
        assert server.chat("other", max_tokens=3).status == 200
        wait_until(lambda: all_ready(server), "back")
        wait_until(lambda: start_ticks(hanging) is None, "ended")

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        wait_until(lambda: not engine_pids(), "no engine left")
        assert not list(cluster.temporary.glob("meltcore-*"))
        text = logs[0].read_text()
        assert text.count(SAID) == 2, "that of an engine that died, and of the one after it"


def test_killed_supervisor_leaves_no_engine(cluster: Any, fleet_file: Path) -> None:
    with running(fleet_command(fleet_file, POLICY, cluster.address), fleet_file.with_suffix(".err")) as server:
        wait_until(lambda: server.request("GET", "/health").status == 200, "healthy")
        wait_until(lambda: all_ready(server), "both ready")
        assert len(engine_pids()) == 3
        server.process.kill()
        wait_until(lambda: not engine_pids(), "no engine left")


def test_checkpoint_that_a_node_lacks_is_named_before_anything_starts(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("models: {a: {checkpoint: /none/here, device: cpu, memory: 64MiB}}\n")
    with pytest.raises(
        ConfigError, match=r"models\.a\.checkpoint: /none/here is not on nodes .*, .*; copy it, or name a hub id"
    ):
        FleetPlanner(path, cluster_reader(cluster.address)).config()
    assert not engine_pids()


def test_replica_starts_elsewhere_and_engines_outlive_the_driver(cluster: Any, fleet_file: Path) -> None:
    with running(fleet_command(fleet_file, POLICY, cluster.address), fleet_file.with_suffix(".err")) as server:
        wait_until(lambda: server.request("GET", "/health").status == 200, "healthy")
        wait_until(lambda: all_ready(server), "all ready")
        pids = engine_pids()
        (driver,) = children(server.process.pid, b"meltcore.fleet.ray.driver")
        os.kill(driver, signal.SIGKILL)
        problem = "the cluster cannot be changed: --ray"
        wait_until(lambda: rows(server)[0]["reason"].startswith(problem), "the problem in ps")
        time.sleep(3.0)  # Ray ends the actors of a driver that has died
        assert engine_pids() == pids
        assert len(list(cluster.temporary.glob("meltcore-engine-*"))) == 3
        assert server.chat("go on", max_tokens=3).status == 200

        # The next start of an engine connects again; its node is gone then.
        node = cluster.list_all_nodes()[-1]
        (lost,) = [row["pid"] for row in rows(server)[:2] if is_on_gpu_node(row["pid"])]
        cluster.remove_node(node, allow_graceful=False)
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: "its engine of" in server.stderr, "a start on another node")
        wait_until(lambda: [row["state"] for row in rows(server)][:2] == ["ready"] * 2, "both")
        # Its start has removed what the killed engine left, and nothing of those that have outlived their actors.
        wait_until(lambda: len(list(cluster.temporary.glob("meltcore-engine-*"))) == 3, "folders of the living")
        assert len(list(cluster.temporary.glob("meltcore-marks-*/*"))) == 2
        assert server.chat("go on", max_tokens=3).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        wait_until(lambda: not engine_pids(), "no engine left")
