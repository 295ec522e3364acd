"""A reload on a cluster that has changed since the start. No Ray needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_cluster import ROOM_POLL_S, Node, ScriptedCluster
from scripted_fleet import fleet, rows, states
from waiting import wait_until

from meltcore.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("pause_s", [0.0, 10 * ROOM_POLL_S], ids=["immediately", "late"])
def test_reload_reads_the_cluster_anew_and_leaves_what_did_not_change(
    pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Late: a pending engine is tried again in the gap between the end of a changed model and its new engine."""
    monkeypatch.setenv("PAUSE_BEFORE_ADDING_S", str(pause_s))
    cluster = ScriptedCluster(tmp_path, b=Node("b", [40]))
    first = "  one: {LOAD, memory: 20GiB}\n"
    with fleet(tmp_path, cluster, first) as server:
        wait_until(lambda: states(server) == ["ready"], "ready")
        pid = rows(server)["one.0"]["pid"]
        file = tmp_path / "fleet.yaml"
        text = file.read_text()
        model = text.partition("one: {")[2].partition(", memory")[0]
        file.write_text(f"{text}  two: {{{model}, memory: 30GiB}}\n")
        assert main(["reload"]) == 2
        error = capsys.readouterr().err
        assert "and there is GPU 0 40 GiB. Models that did not change stay where they are (one)." in error
        assert list(rows(server)) == ["one.0"]

        # A node has joined whose name comes first: by itself the plan would have the other model there.
        with cluster.change() as there:
            there.nodes["a"] = Node("a", [30, 40])
        assert main(["reload"]) == 0, capsys.readouterr().err
        wait_until(lambda: states(server) == ["ready"] * 2, "the new model on the new node")
        assert rows(server)["one.0"]["pid"] == pid
        assert [row["node"] for row in rows(server).values()] == ["b", "a"]
        assert "added: two" in capsys.readouterr().out

        # The node of one is lost: it waits, which is no reason to refuse a change of the other.
        with cluster.change() as there:
            there.nodes.pop("b")
            there.nodes["a"].gib = [10, 40]
        wait_until(lambda: rows(server)["one.0"]["state"] == "pending", "pending")
        file.write_text(file.read_text().replace("30GiB", "31GiB"))
        assert main(["reload"]) == 0, capsys.readouterr().err
        wait_until(lambda: states(server) == ["pending", "ready"], "the changed model")

        # Numbers of GPUs stay: 0 was on b, 1 and 2 are on a, and the next is 3.
        file.write_text(file.read_text().replace("31GiB", "31GiB, device: [0]"))
        assert main(["reload"]) == 2
        assert "models.two.device: got GPU 0, which was on the node b and is gone" in capsys.readouterr().err
        with cluster.change() as there:
            there.nodes["0"] = Node("0", [60])  # has room for both
        file.write_text(file.read_text().replace("device: [0]", "device: [3]"))
        assert main(["reload"]) == 0, capsys.readouterr().err
        wait_until(lambda: (states(server), rows(server)["two.0"]["node"]) == (["ready"] * 2, "0"), "the pinned model")

        with cluster.change() as there:
            there.problem = "the head node has not answered for 3 s"
        wait_until(lambda: rows(server)["two.0"]["reason"], "the problem in ps")
        assert main(["reload"]) == 2
        assert "the cluster cannot be changed" in capsys.readouterr().err
