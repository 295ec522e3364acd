"""Plans for the nodes of a cluster, which `plan --ray` and `up --ray` make alike; no Ray needed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from scripted_cluster import Node, ScriptedCluster, noted, use_scripted_cluster

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError, EnginePendingError
from meltcore.fleet.plan.cluster import Cluster, cluster_reader, node_checkpoints
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.plan.planned import FleetPlanner
from meltcore.fleet.plan.running_fleet import Running
from meltcore.fleet.ray.cluster_driver import ClusterDriver
from meltcore.protocol.cluster import Nodes, ReadNodes, StartEngine, ToDriver
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_file import load_fleet

SUMS = "checkpoint: meltcore/sums"
MISSING = {"/none": "it is not there", "owner/none": "no such repository"}
SLEEPS = "memory: 30GiB, residency: sleepable"
BY_NVML, BY_RAY = {"used_gib": 20}, {"reserved_gib": 20}  # who says that others use a GPU


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_scripted_cluster(monkeypatch.setattr)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


def nodes_of(fleet: PlacedFleet) -> dict[str, list[str]]:
    """The node of each replica, by model."""
    return {name: [place.node for place in places] for name, places in fleet.places.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "others", "status", "says"),
    [
        (f"a: {{{SUMS}, memory: 30GiB}}", BY_NVML, 0, "The fleet fits on b GPU 1; a GPU 0 is idle"),
        (f"a: {{{SUMS}, memory: 30GiB}}", BY_RAY, 0, "The fleet fits on b GPU 1; a GPU 0 is idle"),
        (f"a: {{{SUMS}, memory: 30GiB, replicas: 2}}", BY_NVML, 1, "(others use 19."),
        (f"a: {{{SUMS}, memory: 30GiB, replicas: 2}}", BY_RAY, 1, "(others use 19."),
        (f"a: {{{SUMS}}}, b: {{checkpoint: /none}}", BY_NVML, 2, "models.b.memory: must be named with --ray"),
        # Node a has no room, and b, which has, cannot load it.
        ("a: {checkpoint: /none, memory: 30GiB}", BY_RAY, 1, "models.a.checkpoint: /none is not on node b; copy it"),
        (
            "a: {checkpoint: owner/none, memory: 30GiB}",
            BY_NVML,
            1,
            "models.a.checkpoint: node b, with the HF_HOME and HF_TOKEN of its Ray: no such repository",
        ),
        (
            f"a: {{{SUMS}, {SLEEPS}}}, b: {{{SUMS}, {SLEEPS}}}",
            BY_RAY,
            1,
            "on Ray, which counts the memory of engines that sleep",
        ),
        (
            "a: {command: 'x {port}', memory: 2GiB}",
            BY_NVML,
            2,
            "models.a.command: --ray starts engines of Meltcore only",
        ),
    ],
)
def test_plan_of_a_cluster_is_that_of_up(
    models: str,
    others: dict[str, float],
    status: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], **others), b=Node("b", [40], missing=MISSING))
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{{models}}}")
    assert main(["plan", str(file), "--ray", str(cluster.path)]) == status
    printed = capsys.readouterr()
    assert says in " ".join(f"{printed.out} {printed.err}".split())
    planner = FleetPlanner(file, cluster_reader(str(cluster.path)))
    if status == 0:
        assert nodes_of(planner.config()) == {"a": ["b"]}
    else:
        with pytest.raises(ConfigError, match=says if status == 2 else "the fleet does not fit"):
            planner.config()


@pytest.mark.slow
def test_nodes_that_cannot_load_a_model_are_no_place_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path. A hub id is missing in the same way, with a reason that the test above reads."""
    alpha, beta = Node("alpha", [40], host_gib=8, missing=MISSING), Node("beta", [40])
    cluster = ScriptedCluster(tmp_path, alpha=alpha, beta=beta)
    file = tmp_path / "fleet.yaml"

    def plan(settings: str, others: str = "") -> tuple[int, str]:
        file.write_text(f"models: {{a: {{checkpoint: /none, {settings}}}{others}}}")
        status = main(["plan", str(file), "--ray", str(cluster.path)])
        printed = capsys.readouterr()
        return status, " ".join(f"{printed.out} {printed.err}".split())

    def nodes() -> list[list[str]]:
        return [*nodes_of(FleetPlanner(file, cluster_reader(str(cluster.path))).config()).values()]

    reason = "models.a.checkpoint: /none is not on node alpha; copy it, or name a hub id"
    # On the CPU alpha has more memory free, on GPUs it comes first. A bundled model is everywhere.
    status, printed = plan("memory: 1GiB, device: cpu")
    assert status == 0
    assert f"{reason}; it is planned for other nodes" in printed
    assert nodes() == [["beta"]]
    assert plan("memory: 30GiB", f", b: {{{SUMS}, memory: 30GiB}}")[0] == 0
    assert nodes() == [["beta"], ["alpha"]]
    # Two replicas of 30 GiB need both nodes.
    status, printed = plan("memory: 30GiB, replicas: 2")
    assert status == 1
    assert reason in printed
    assert plan("memory: 1GiB, device: [0]") == (2, f"meltcore plan: {reason}")
    assert plan("memory: 1GiB, device: [1]")[0] == 0
    with cluster.change() as there:
        there.nodes["beta"].missing = MISSING
    status, printed = plan("memory: 1GiB, device: cpu")
    assert status == 2
    assert "nodes alpha, beta" in printed
    with pytest.raises(ConfigError, match="nodes alpha, beta"):
        nodes()


@pytest.mark.slow
def test_engine_is_not_started_elsewhere_on_a_node_that_cannot_load_its_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", host_gib=4), b=Node("b", host_gib=16), c=Node("c", host_gib=8))
    file = tmp_path / "fleet.yaml"
    on_cpu = "memory: 1GiB, device: cpu"
    file.write_text(f"models: {{hub: {{checkpoint: owner/none, {on_cpu}}}, path: {{checkpoint: /none, {on_cpu}}}}}")
    planner = FleetPlanner(file, cluster_reader(str(cluster.path)))
    planner.config()
    with cluster.change() as there:
        there.nodes.pop("b")
        there.nodes["c"].missing = MISSING  # since the plan
    answer = Nodes(list(Cluster.read(str(cluster.path)).nodes))

    async def move(*models: tuple[str, EngineConfig]) -> tuple[list[list[str]], list[object]]:
        driver = ClusterDriver(str(cluster.path), planner, print)
        asked: list[list[str]] = []

        def send(message: ToDriver) -> None:
            assert isinstance(message, ReadNodes)
            asked.append(message.checkpoints)
            missing = {key: MISSING[key] for key in message.checkpoints if key in MISSING}
            found = [msgspec.structs.replace(node, missing=missing if node.missing else {}) for node in answer.nodes]
            asyncio.get_running_loop().call_soon(driver._on_line, Nodes(found))

        monkeypatch.setattr(driver, "_send", send)
        starts = [StartEngine(0, "b", [], config, 1, "", [], model=name) for name, config in models]
        moved = await asyncio.gather(
            *(driver._elsewhere(start, "the node b is gone", {}) for start in starts), return_exceptions=True
        )
        return asked, [each if isinstance(each, BaseException) else each.node for each in moved]

    hub, path = EngineConfig(model="owner/none"), EngineConfig(model="/none")
    assert asyncio.run(move(("hub", hub))) == ([["owner/none"]], ["a"])
    # Those who ask meanwhile do not take an answer that has not named theirs.
    asked, moved = asyncio.run(move(("hub", hub), ("path", path), ("path", path)))
    assert moved == ["a"] * 3
    assert asked == [["owner/none"], ["/none", "owner/none"]]
    # Random weights need no repository.
    assert asyncio.run(move(("hub", EngineConfig(model="owner/none", load_format="dummy")))) == ([[]], ["c"])
    with cluster.change() as there:
        there.nodes.pop("a")
    answer = Nodes(list(Cluster.read(str(cluster.path)).nodes))
    _, (error,) = asyncio.run(move(("hub", hub)))
    assert isinstance(error, EnginePendingError)
    assert str(error).endswith("node c, with the HF_HOME and HF_TOKEN of its Ray: no such repository")


def test_nodes_are_asked_for_paths_and_for_hub_ids_that_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    models = f"{{a: {{{SUMS}}}, b: {{checkpoint: owner/b:Q8_0}}, c: {{checkpoint: owner/c, load_format: dummy}}, "
    models += f"d: {{checkpoint: owner/d, shapes: Qwen/Qwen3-0.6B}}, e: {{checkpoint: {tmp_path}}}}}"
    file.write_text(f"models: {models}")
    assert node_checkpoints(load_fleet(file)) == sorted([str(tmp_path), "owner/b:Q8_0"])


@pytest.mark.slow
def test_driver_of_a_fleet_gets_the_node_names_of_the_plan(tmp_path: Path) -> None:
    """Else it would name raylets that join, end or are given up since the plan as if it were the first to see them."""
    hung = Node("a-1", [80], problem="it does not answer")
    cluster = ScriptedCluster(tmp_path, id1=hung, id2=Node("a-2", [80]), id3=Node("b", [80]))
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{m: {{{SUMS}, memory: 30GiB}}}}")
    planner = FleetPlanner.of(
        FleetPlanner(file, cluster_reader(str(cluster.path))).planned_from
    )  # as the daemon has it
    with cluster.change() as there:
        there.nodes = {"id3": Node("b", [80]), "id4": Node("c", [80])}

    async def connect() -> None:
        driver = ClusterDriver(str(cluster.path), planner, print)
        for _ in range(2):
            await driver.connect()
            await driver.stop()

    asyncio.run(connect())
    asked = [line for line in noted(tmp_path) if isinstance(line, ReadNodes)][1:]  # the first is of the plan
    of_plan = {"id1": "a-1", "id2": "a-2", "id3": "b"}
    assert [line.names for line in asked] == [of_plan, of_plan | {"id4": "c"}]
    assert [line.used for line in asked] == [["a-1", "a-2", "b"], ["a-1", "a-2", "b", "c"]]


@pytest.mark.slow
def test_node_with_a_problem_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [80], problem="it does not answer"), b=Node("b", [40]))
    file = tmp_path / "fleet.yaml"
    left_out = "node a is left out: it does not answer"

    def plan(models: str, top: str = "") -> tuple[int, str]:
        file.write_text(f"{top}models: {{{models}}}")
        status = main(["plan", str(file), "--ray", str(cluster.path)])
        printed = capsys.readouterr()
        return status, " ".join(f"{printed.out} {printed.err}".split())

    status, printed = plan(f"a: {{{SUMS}, memory: 30GiB}}")
    assert status == 0
    assert "The fleet fits on b GPU 0" in printed
    assert left_out in printed
    reported: list[str] = []
    planner = FleetPlanner(file, cluster_reader(str(cluster.path)))
    assert nodes_of(planner.config(reported.append)) == {"a": ["b"]}
    assert reported == [left_out]
    plan(f"a: {{{SUMS}, memory: 60GiB}}")
    with pytest.raises(ConfigError, match=f"there is GPU 0 40 GiB; {left_out}"):
        FleetPlanner(file, cluster_reader(str(cluster.path))).config()
    # Numbers would be those of other GPUs without the node.
    numbers = f"numbers of GPUs count those of all nodes, and {left_out}"
    assert plan(f"a: {{{SUMS}, memory: 3GiB, device: [0]}}") == (2, f"meltcore plan: models.a.device: {numbers}")
    assert plan(f"a: {{{SUMS}, memory: 3GiB}}", "gpus: [{id: 0}]\n") == (2, f"meltcore plan: gpus: {numbers}")
    status, printed = plan(f"a: {{{SUMS}, memory: 3GiB, tensor_parallel_size: 2}}")
    assert status == 2
    assert f"has 1 GPUs, and tensor parallelism does not go over nodes; {left_out}" in printed
    with cluster.change() as there:
        there.nodes["b"].problem = "Ray counts 2 GPUs there"
    status, printed = plan(f"a: {{{SUMS}}}")
    assert status == 2
    assert f"no node can be used: {left_out}; node b is left out: Ray counts 2 GPUs there" in printed


@pytest.mark.slow
def test_node_that_was_left_out_keeps_its_numbers_and_its_engines(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40]), b=Node("b", [40]))
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{one: {{{SUMS}, memory: 30GiB}}, two: {{{SUMS}, memory: 4GiB, device: [1]}}}}")
    planner = FleetPlanner(file, cluster_reader(str(cluster.path)))
    config = planner.config()
    places = {("one", 0): Place("b", (0,))}

    def reload() -> PlacedFleet:
        return planner.config(
            running=Running(config, places, [*(seen := Cluster.read(str(cluster.path))).nodes, *seen.left_out])
        )

    with cluster.change() as there:
        there.nodes["b"].used_gib = 30.5  # with the engine that runs there
    kept = reload()
    assert (kept.spec, kept.places) == (config.spec, config.places)
    with cluster.change() as there:
        there.nodes["b"].problem = "it does not answer"
    file.write_text(file.read_text().replace("4GiB", "5GiB"))
    with pytest.raises(ConfigError, match="device: got GPU 1, node b is left out: it does not answer"):
        reload()
    file.write_text(file.read_text().replace("[1]", "[0]"))
    assert nodes_of(reload()) == {"one": nodes_of(config)["one"], "two": ["a"]}
    with cluster.change() as there:
        there.nodes["b"].problem = ""
    file.write_text(file.read_text().replace("[0]", "[1]"))
    assert nodes_of(reload())["two"] == ["b"], "its memory counts as before the engine came"


@pytest.mark.slow
def test_engine_elsewhere_is_where_the_plan_would_have_it(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40, 40]), b=Node("b", [40]), c=Node("c", [40], host_gib=16))
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "gpus: [{id: 0}, {id: 1, memory: 20GiB}, {id: 2}, {id: 3}]\n"
        f"models: {{big: {{{SUMS}, memory: 30GiB}}, pinned: {{{SUMS}, memory: 4GiB, device: [2]}}, "
        f"small: {{{SUMS}, memory: 8GiB, replicas: 2}}, cpu: {{{SUMS}, memory: 3GiB, device: cpu}}}}"
    )
    planner = FleetPlanner(file, cluster_reader(str(cluster.path)))
    with cluster.change() as there:
        lost = there.nodes.pop("b")
    nodes = Cluster.read(str(cluster.path)).nodes

    def start(model: str, gpus: list[int], replica: int = 0) -> StartEngine:
        return StartEngine(0, "b", [], EngineConfig(model="m"), 1, "", gpus, model=model, replica=replica)

    def elsewhere(model: str, gpus: list[int], places: dict[tuple[str, int], Place], replica: int = 0) -> Place | None:
        return planner.elsewhere(start(model, gpus, replica), nodes, places)

    assert elsewhere("big", [0], {}) == Place("a", (0,))
    # GPU 1 has 20 GiB for the fleet; the other GPU of 40 GiB has no room beside the first engine.
    assert elsewhere("big", [0], {("small", 0): Place("a", (0,))}) == Place("c", (0,))
    assert elsewhere("big", [0], {("small", 0): Place("a", (0,)), ("small", 1): Place("c", (0,))}) is None
    # A replica goes to another node than the first one.
    assert elsewhere("small", [0], {("small", 0): Place("a", (0,))}, 1) == Place("c", (0,))
    assert elsewhere("pinned", [0], {}) is None, "its GPU 2 is gone, and only that one is allowed"
    assert planner.why_nowhere(start("pinned", [0])) == "device: GPU 2 is gone"
    assert planner.why_nowhere(start("big", [0])) == "no other node has 0 B free for it"
    assert elsewhere("cpu", [], {}) == Place("c", ())
    assert elsewhere("cpu", [], {("other", 0): Place("c", ())}) == Place("c", ())
    assert elsewhere("gone", [0], {}) is None
    with cluster.change() as there:
        there.nodes["b"] = lost
    nodes = Cluster.read(str(cluster.path)).nodes
    assert elsewhere("pinned", [0], {}) == Place("b", (0,)), "its number has stayed"
    assert planner.why_nowhere(start("pinned", [0])) == "device: GPU 2 has not 0 B free for it"
    with cluster.change() as there:
        lost.problem = "it does not answer"
    read = Cluster.read(str(cluster.path))
    nodes = (*read.nodes, *read.left_out)
    assert elsewhere("pinned", [0], {}) is None
    assert planner.why_nowhere(start("pinned", [0])) == "device: GPU 2 is on a node that is left out"
