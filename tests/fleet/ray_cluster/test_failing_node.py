"""An engine that keeps dying on a node which lives is started on another one. No Ray needed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from scripted_cluster import Node, ScriptedCluster, starts
from scripted_fleet import fleet, rows, states
from waiting import wait_until

from meltcore.cli.main import main

pytestmark = pytest.mark.slow
BIG = "  big: {LOAD, memory: 30GiB}\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_engine_leaves_a_node_on_which_it_keeps_dying_unless_it_is_pinned_there(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], is_faulty=True), b=Node("b", [40]))
    pinned = "  pinned: {LOAD, memory: 4GiB, device: [0]}\n"
    with fleet(tmp_path, cluster, BIG + pinned) as server:
        wait_until(lambda: states(server) == ["ready", "failed"], "moved, and failed")
        assert starts(tmp_path, "big") == ["a"] * 3 + ["b"]
        assert starts(tmp_path, "pinned") == ["a"] * 5
        assert rows(server)["big.0"]["node"] == "b"
        assert "it has died 3 times on a: its engine of big is started on b" in server.stderr

        # There it stays.
        os.kill(rows(server)["big.0"]["pid"], signal.SIGKILL)
        wait_until(lambda: rows(server)["big.0"]["restarts"] == 4, "restarted")
        wait_until(lambda: rows(server)["big.0"]["state"] == "ready", "ready")
        assert starts(tmp_path, "big") == ["a"] * 3 + ["b"] * 2


@pytest.mark.parametrize(
    ("other", "asked"), [(Node("b", [20]), "aaaaa"), (Node("b", [40], is_full=True), "aaababa")], ids=["small", "full"]
)
def test_engine_stays_on_its_node_while_no_other_has_room(tmp_path: Path, other: Node, asked: str) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], is_faulty=True), b=other)
    with fleet(tmp_path, cluster, BIG) as server:
        wait_until(lambda: states(server) == ["failed"], "failed")
        assert "".join(starts(tmp_path, "big")) == asked
        assert server.stderr.count("it is started there again") == 2


def test_sleepable_models_that_were_moved_apart_are_awake_together(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], host_gib=99))
    models = "".join(f"  {name}: {{LOAD, memory: 15GiB, residency: sleepable}}\n" for name in ("one", "two"))
    with fleet(tmp_path, cluster, models) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        with cluster.change() as there:
            there.nodes = {name: Node(name, [20], host_gib=99) for name in "bc"}
        wait_until(lambda: sorted(row["node"] or "" for row in rows(server).values()) == ["b", "c"], "moved")
        wait_until(lambda: states(server) == ["ready"] * 2, "ready on two nodes")
        # A larger one takes the place that they had: it takes turns with neither.
        with cluster.change() as there:
            there.nodes["a"] = Node("a", [40], host_gib=99)
        file = tmp_path / "fleet.yaml"
        load = file.read_text().partition("one: {")[2].partition(", memory")[0]
        file.write_text(f"{file.read_text()}  three: {{{load}, memory: 30GiB, residency: sleepable}}\n")
        assert main(["reload"]) == 0
        wait_until(lambda: rows(server)["three.0"]["state"] == "ready", "loaded")
        assert states(server) == ["ready"] * 3
        assert "event=engine_asleep" not in server.stderr
