"""Plans for the nodes of a cluster, which `plan --ray` and `up --ray` make alike; no Ray needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted_cluster import Node, ScriptedCluster, use_scripted_cluster

from meltcore.cli.main import main
from meltcore.errors import ConfigError
from meltcore.fleet.planned import FleetPlanner

SUMS = "checkpoint: meltcore/sums"


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_scripted_cluster(monkeypatch.setattr)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "status", "says"),
    [
        (f"a: {{{SUMS}, memory: 30GiB}}", 0, "The fleet fits on b GPU 1; a GPU 0 is idle"),
        (f"a: {{{SUMS}, memory: 30GiB, replicas: 2}}", 1, "(others use 19."),
        (f"a: {{{SUMS}}}, b: {{checkpoint: /none}}", 2, "models.b.memory: must be named with --ray"),
        ("a: {checkpoint: /none, memory: 30GiB}", 2, "models.a.checkpoint: /none is not on node b"),
        ("a: {command: 'x {port}', memory: 2GiB}", 2, "models.a.command: --ray starts engines of Meltcore only"),
    ],
)
def test_plan_of_a_cluster_is_that_of_up(
    models: str, status: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], used_gib=20), b=Node("b", [40], missing=["/none"]))
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{{models}}}")
    assert main(["plan", str(file), "--ray", str(cluster.path)]) == status
    printed = capsys.readouterr()
    assert says in " ".join(f"{printed.out} {printed.err}".split())
    planner = FleetPlanner(file, ray=str(cluster.path))
    if status == 0:
        assert planner.config().models[0].replica_nodes == ("b",)
    else:
        with pytest.raises(ConfigError, match=says if status == 2 else "the fleet does not fit"):
            planner.config()
