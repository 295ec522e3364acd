"""`meltcore snapshot --ray` on a cluster of two raylets: results, failures and processes of every node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import start_nodes

from meltcore.cli.main import main


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node without a GPU, and one that Ray believes to have one and whose driver shows none."""
    folder = tmp_path_factory.mktemp("nodes")
    with start_nodes(folder, [], [80]) as cluster:
        (folder / "pynvml.py").unlink()  # the commands ask the real one
        yield cluster.address


@pytest.mark.slow
def test_snapshots_of_all_nodes_are_one_report(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "--json", "--ray", address]) == 2
    report = json.loads(capfd.readouterr().out)
    assert sorted(node["status"] for node in report["nodes"]) == ["done", "failed"]
    assert all(node["document"]["fingerprint"]["cores"] > 0 for node in report["nodes"])
    [failed] = [node for node in report["nodes"] if node["status"] == "failed"]
    assert "its driver shows none" in failed["reason"]
    assert report["verdict"] == "FAILED"


@pytest.mark.slow
def test_nodes_that_are_late_are_ended_and_named(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "--ray", address, "--node-limit", "0.01"]) == 2
    printed = " ".join(capfd.readouterr().out.split())
    assert printed.count("it did not end within 0.01 s") >= 2
    assert "0 of 2 nodes have a result; failed:" in printed


def test_options_of_one_node_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "--ray", "auto", "--gpu", "0"]) == 2
    assert "--gpu is for one node; it excludes --ray" in capsys.readouterr().err
