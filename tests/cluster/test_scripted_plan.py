"""Plans for the nodes of a cluster, which `plan --ray` and `up --ray` make alike; no Ray needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripted_cluster import Node, ScriptedCluster, use_scripted_cluster

from meltcore.cli.main import main
from meltcore.config import EngineConfig
from meltcore.errors import ConfigError
from meltcore.fleet.cluster import Cluster
from meltcore.fleet.plan import Place
from meltcore.fleet.planned import FleetPlanner
from meltcore.protocol.cluster import StartEngine

SUMS = "checkpoint: meltcore/sums"
SLEEPS = "memory: 30GiB, residency: sleepable"


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
        (
            f"a: {{{SUMS}, {SLEEPS}}}, b: {{{SUMS}, {SLEEPS}}}",
            1,
            "on Ray, which counts the memory of engines that sleep",
        ),
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


@pytest.mark.slow
def test_engine_elsewhere_is_where_the_plan_would_have_it(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40, 40]), b=Node("b", [40]), c=Node("c", [40], host_gib=16))
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "gpus: [{id: 0}, {id: 1, memory: 20GiB}, {id: 2}, {id: 3}]\n"
        f"models: {{big: {{{SUMS}, memory: 30GiB}}, pinned: {{{SUMS}, memory: 4GiB, device: [2]}}, "
        f"small: {{{SUMS}, memory: 8GiB, replicas: 2}}, cpu: {{{SUMS}, memory: 3GiB, device: cpu}}}}"
    )
    planner = FleetPlanner(file, ray=str(cluster.path))
    with cluster.change() as there:
        lost = there.nodes.pop("b")
    nodes = Cluster.read(str(cluster.path)).nodes

    def elsewhere(model: str, gpus: list[int], places: dict[tuple[str, int], Place], replica: int = 0) -> Place | None:
        start = StartEngine(0, "b", [], EngineConfig(model="m"), 1, "", gpus, model=model, replica=replica)
        return planner.elsewhere(start, nodes, places)

    assert elsewhere("big", [0], {}) == Place("a", (0,))
    # GPU 1 has 20 GiB for the fleet; the other GPU of 40 GiB has no room beside the first engine.
    assert elsewhere("big", [0], {("small", 0): Place("a", (0,))}) == Place("c", (0,))
    assert elsewhere("big", [0], {("small", 0): Place("a", (0,)), ("small", 1): Place("c", (0,))}) is None
    # A replica goes to another node than the first one.
    assert elsewhere("small", [0], {("small", 0): Place("a", (0,))}, 1) == Place("c", (0,))
    assert elsewhere("pinned", [0], {}) is None, "its GPU 2 is gone, and only that one is allowed"
    assert elsewhere("cpu", [], {}) == Place("c", ())
    assert elsewhere("cpu", [], {("other", 0): Place("c", ())}) == Place("c", ())
    assert elsewhere("gone", [0], {}) is None
    with cluster.change() as there:
        there.nodes["b"] = lost
    nodes = Cluster.read(str(cluster.path)).nodes
    assert elsewhere("pinned", [0], {}) == Place("b", (0,)), "its number has stayed"
