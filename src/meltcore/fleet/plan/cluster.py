"""Describes a Ray cluster for the plan of a fleet. A driver process reads its nodes."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.process import run
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.machine import read_machine, unloadable
from meltcore.fleet.plan.placement import PlacedFleet, loaded_section
from meltcore.fleet.plan.plan import Plan
from meltcore.fleet.plan.site import Site
from meltcore.models.checkpoints.checkpoint import is_on_hub
from meltcore.protocol.cluster import (
    DRIVER_MODULE,
    ClusterFailed,
    ClusterNode,
    FromDriver,
    Nodes,
    ReadNodes,
    gpu_resource,
)
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

_READ_LIMIT_S = 180.0  # to start a local cluster and to probe all nodes
_MAX_NAMES_SHOWN = 8
_T = TypeVar("_T")


class Cluster(Site, frozen=True, tag="cluster"):
    """A Ray cluster at `address`, as a plan sees it. Memory that the fleet's own engines take on a node counts as free.

    `before` has the nodes that cannot be used now, in the state before the fleet had engines there.
    """

    before: tuple[ClusterNode, ...] = ()
    address: str = ""

    title = "the cluster"

    @classmethod
    def of(cls, nodes: Iterable[ClusterNode], known_gpus: tuple[tuple[str, int], ...] = (), address: str = "") -> Self:
        """Return the cluster of these nodes, without nodes that have a problem."""
        usable: list[ClusterNode] = []
        left_out: list[ClusterNode] = []
        for node in nodes:
            (left_out if node.problem else usable).append(node)
        return cls(tuple(usable), known_gpus, tuple(left_out), address=address)

    @classmethod
    def read(cls, address: str, checkpoints: Sequence[str] = ()) -> Self:
        """Read the cluster at `address`, and which of its nodes can load these checkpoints.

        The address is "auto", "local" or HOST:PORT. For "local" no cluster is started; this machine is read as the only
        node. Raises ConfigError if no cluster is found, or if no node can be used.
        """
        if address == "local":
            return cls.of([_this_node(checkpoints)], address=address)
        command = [sys.executable, "-m", DRIVER_MODULE, address]
        done = run(command, limit_s=_READ_LIMIT_S, stdin=msgspec.json.encode(ReadNodes(list(checkpoints))) + b"\n")
        if done.returncode is None:
            raise ConfigError(f"--ray {address}: the cluster gave no answer within {_READ_LIMIT_S:g} s")
        lines = done.stdout.splitlines()
        if not lines:
            last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"--ray {address}: the driver ended with status {done.returncode}: {last_line}")
        answer = msgspec.json.decode(lines[-1], type=FromDriver)
        if isinstance(answer, ClusterFailed):
            raise ConfigError(answer.message)
        assert isinstance(answer, Nodes)
        cluster = cls.of(answer.nodes, address=address)
        if not cluster.nodes:
            raise ConfigError(f"--ray {address}: no node can be used: {left_out_text(cluster.left_out)}")
        return cluster

    @property
    def machine(self) -> Machine:
        """All nodes as one machine: their GPUs, their host memory, and the driver version of the first node with a GPU.

        A GPU that is gone counts with 0 bytes. Memory that Ray has given to other jobs, or may not give away, counts as
        used. NVML shows only what these jobs have allocated so far.
        """
        there = {(node.name, gpu.number): _as_used(node, gpu) for node in self.nodes for gpu in node.machine.gpus}
        driver = next((node.machine.driver for node in self.nodes if node.machine.gpus), "")
        gpus = [there.get(gpu, VisibleGpu(0, "", 0, 0)) for gpu in self.gpus]
        numbered = tuple(gpu._replace(number=number) for number, gpu in enumerate(gpus))
        return Machine(numbered, driver, sum(node.machine.host_bytes for node in self.nodes))

    @property
    def gpu_names(self) -> list[str]:
        """The name of each GPU: the name of its node and its number on the node."""
        return [f"{node}:{number}" for node, number in self.gpus]

    def launched_by(self, _local: _T, on_ray: Callable[[str], _T]) -> _T:
        """Return `on_ray(address)`, because engines of a cluster are started by Ray."""
        return on_ray(self.address)

    def with_current_nodes(self, nodes: Sequence[ClusterNode], places: Mapping[tuple[str, int], Place]) -> Self:
        """Return the cluster with the nodes as they are now, without the memory of the fleet's engines at `places`.

        A node with a problem is left out. Its engines may continue, so its state before they started is kept in
        `before`.
        """
        before, own = {node.name: node for node in (*self.before, *self.nodes)}, list(places.values())
        found = self.of((without_engines(node, before.get(node.name), own) for node in nodes), self.gpus, self.address)
        return msgspec.structs.replace(
            found, before=tuple(before[node.name] for node in found.left_out if node.name in before)
        )

    def taking_turns(self, _sleepable: tuple[str, ...]) -> tuple[str, ...]:
        """Return an empty tuple, because no model takes turns. Ray counts the memory of a sleeping model as used."""
        return ()

    def why_no_turns(self, spec: FleetSpec) -> tuple[str, ...]:
        """Return the reason why sleepable models take no turns in a cluster.

        Without sleepable models, return no reason.
        """
        if any(model.residency == "sleepable" for model in spec.models.values()):
            return ("on Ray, which counts the memory of engines that sleep, models do not take turns",)
        return ()

    def check_numbers(self, spec: FleetSpec, kept: Collection[str]) -> None:
        """Raise ConfigError if a model's `device` names a GPU that is gone.

        Models in `kept` are not checked, because they run already, or wait until their GPU comes back.
        """
        gpus = self.machine.gpus
        for name, model in spec.models.items():
            for number in () if isinstance(model.device, str) or name in kept else model.device:
                if gpus[number].total_bytes == 0:
                    node = self.gpu_nodes[number]
                    left_out = left_out_text(each for each in self.left_out if each.name == node)
                    raise ConfigError(
                        f"models.{name}.device: got GPU {number}, "
                        + (left_out or f"which was on the node {node} and is gone from the cluster")
                    )

    def check(self, spec: FleetSpec, excluded_nodes: Mapping[str, Sequence[ClusterNode]]) -> None:
        """Raise ConfigError if a model's nodes cannot load it, or if the GPUs of one engine are on several nodes."""
        self._check_loadable(spec, excluded_nodes)
        self._check_one_node(spec)

    def _check_loadable(self, spec: FleetSpec, excluded_nodes: Mapping[str, Sequence[ClusterNode]]) -> None:
        """Raise ConfigError if no node can load a model, or if a node of the model's `device` cannot load it."""
        for name, nodes in excluded_nodes.items():
            named = {self.gpu_nodes[number] for group in spec.models[name].replica_gpus for number in group}
            if len(nodes) == len(self.nodes) or named.intersection(node.name for node in nodes):
                needed = [node for node in nodes if not named or node.name in named]
                raise ConfigError(model_lacking_text(spec, name, needed))

    def _check_one_node(self, spec: FleetSpec) -> None:
        """Raise ConfigError if the GPUs of one engine are on several nodes."""
        gpu_nodes = self.gpu_nodes
        largest = max(Counter(gpu_nodes).values(), default=0)
        for name, model in spec.models.items():
            ranks = model.tensor_parallel_size
            if model.device == "cpu" or model.kind == "url" or ranks == 1:
                continue
            if ranks > largest:
                raise ConfigError(
                    f"models.{name}.tensor_parallel_size: got {ranks}; the largest node of the cluster has "
                    f"{largest} GPUs, and tensor parallelism does not go over nodes"
                )
            for group in model.replica_gpus:
                nodes = sorted({gpu_nodes[number] for number in group if number < len(gpu_nodes)})
                if len(nodes) > 1:
                    raise ConfigError(
                        f"models.{name}.device: the GPUs {', '.join(map(str, group))} of one engine are on "
                        f"{' and '.join(nodes)}; tensor parallelism does not go over nodes"
                    )

    def place_fleet(self, spec: FleetSpec, plan: Plan, kept: Mapping[str, tuple[Place, ...]]) -> PlacedFleet:
        """Return a planned fleet with the place of each replica: the node, and the numbers of the GPUs on this node.

        Models in `kept` stay where they are. Raises ConfigError for settings that a cluster cannot run, and if a node
        does not offer the resources that its engines need.
        """
        for name, model in spec.models.items():
            if model.command:
                raise ConfigError(f"models.{name}.command: --ray starts engines of Meltcore only; name its url")
        if spec.sharing.means == "mps":
            raise ConfigError("sharing.means: mps runs on one machine; with --ray it must be pacing or none")
        models, places = dict(spec.models), dict(kept)
        for name, model in spec.engines.items():
            if name in kept:
                continue
            if not (nodes := plan.nodes(name)):
                raise ConfigError(f"models.{name}.memory: must be named with --ray, as its sizes cannot be read here")
            gpus = [tuple(self.gpus[at][1] for at in group) for group in plan.replicas(name)] or [()] * len(nodes)
            for node in self.nodes:
                if node.name in nodes:
                    _check_node(node, gpus)
            model = loaded_section(model)
            models[name] = msgspec.structs.replace(model, checkpoint=absolute_path(model.model) or model.model)
            places[name] = tuple(map(Place, nodes, gpus))
        return PlacedFleet(msgspec.structs.replace(spec, models=models), places)


def _as_used(node: ClusterNode, gpu: VisibleGpu) -> VisibleGpu:
    """Return a GPU of a node, with all its memory marked as used except the bytes that Ray can give to this fleet."""
    if (size := node.gib.get(gpu.number)) is None:
        return gpu
    left_bytes = round((size - node.reserved_gib.get(gpu.number, 0.0)) * 2**30)
    return gpu._replace(used_bytes=max(gpu.used_bytes, gpu.total_bytes - left_bytes))


def without_engines(now: ClusterNode, before: ClusterNode | None, places: Sequence[Place]) -> ClusterNode:
    """Return the node `now` without the memory of the fleet's engines at `places`.

    A GPU with such an engine gets the used bytes that it had in `before`, when the engine had not started yet.
    """
    own = [place for place in places if place.node == now.name]
    if before is None or not own or now.problem:
        return now
    used_bytes = {gpu.number: gpu.used_bytes for gpu in before.machine.gpus}
    gpus = tuple(
        gpu._replace(used_bytes=used_bytes.get(gpu.number, gpu.used_bytes))
        if any(gpu.number in place.gpus for place in own)
        else gpu
        for gpu in now.machine.gpus
    )
    machine = now.machine._replace(gpus=gpus, host_bytes=before.machine.host_bytes)
    return msgspec.structs.replace(now, machine=machine)


def left_out_text(nodes: Iterable[ClusterNode]) -> str:
    """Return a text that says which of these nodes are left out, and why. Returns "" if none is left out."""
    return "; ".join(f"node {node.name} is left out: {node.problem}" for node in nodes if node.problem)


def lacking_text(checkpoint: str | None, nodes: Sequence[ClusterNode]) -> str:
    """Return a text that says why these nodes cannot load a checkpoint. Returns "" if `nodes` is empty."""
    if checkpoint is None or not nodes:
        return ""
    if checkpoint.startswith("/"):
        return f"{checkpoint} is not on {_names_text(nodes)}; copy it, or name a hub id"
    by_problem: dict[str, list[ClusterNode]] = {}
    for node in nodes:
        by_problem.setdefault(node.missing[checkpoint], []).append(node)
    return "; ".join(
        f"{_names_text(found)}, with the HF_HOME and HF_TOKEN of {'its' if len(found) == 1 else 'their'} Ray: {problem}"
        for problem, found in by_problem.items()
    )


def _names_text(nodes: Sequence[ClusterNode]) -> str:
    names = [node.name for node in nodes]
    if len(names) > _MAX_NAMES_SHOWN + 1:
        names = [*names[:_MAX_NAMES_SHOWN], f"{len(names) - _MAX_NAMES_SHOWN} more"]
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _this_node(checkpoints: Iterable[str]) -> ClusterNode:
    """Return this machine as the only node of a local cluster that is not started yet. Ray will give it the same name.

    All memory of the GPUs counts as available to Ray, because the driver process will start the cluster in this way.
    """
    machine, name = read_machine().checked(), socket.gethostname()
    gib = {gpu.number: gpu.total_bytes / 2**30 for gpu in machine.gpus}
    return ClusterNode(name, name, "127.0.0.1", machine, gib, unloadable(checkpoints))


def cluster_reader(address: str) -> Callable[[FleetSpec], Cluster]:
    """Return a function that reads the Ray cluster at `address` for a fleet."""
    return lambda spec: Cluster.read(address, node_checkpoints(spec))


def node_checkpoints(spec: FleetSpec) -> list[str]:
    """Return the paths and hub ids of all checkpoints that the nodes of a model must be able to load."""
    found = {node_checkpoint(model) for model in spec.models.values()}
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def node_checkpoint(model: ModelSection) -> str | None:
    """Return the path or the hub id that each node of a model must be able to load.

    Returns None if nodes need not check the checkpoint. This holds for hub ids of models with `shapes` or random
    weights, which may be planned before their checkpoint exists.
    """
    if model.kind != "engine" or not model.checkpoint:
        return None
    if (path := absolute_path(model.checkpoint)) is not None:
        return path
    is_asked = is_on_hub(model.checkpoint) and model.shapes is None and model.load_format != "dummy"
    return model.checkpoint if is_asked else None


def absolute_path(checkpoint: str) -> str | None:
    """Return the absolute path of a checkpoint. Returns None for a hub id and for a bundled checkpoint."""
    path = Path(checkpoint).expanduser()
    is_path = path.is_absolute() or checkpoint.startswith(".") or path.exists()
    return str(path.absolute()) if is_path else None


def lacking_nodes(spec: FleetSpec, site: Site, kept: Collection[str]) -> dict[str, list[ClusterNode]]:
    """Return the nodes that cannot load a model, by model name.

    Models in `kept` are left out, because they run already.
    """
    found = {name: site.nodes_without(node_checkpoint(spec.models[name])) for name in spec.models.keys() - set(kept)}
    return {name: found[name] for name in spec.models if found.get(name)}


def model_lacking_text(spec: FleetSpec, name: str, nodes: Sequence[ClusterNode]) -> str:
    """Return a text that says why these nodes cannot load a model."""
    return f"models.{name}.checkpoint: {lacking_text(node_checkpoint(spec.models[name]), nodes)}"


def _check_node(node: ClusterNode, gpus: Sequence[Sequence[int]]) -> None:
    if any(gpus) and len(node.gib) < len(node.machine.gpus):
        needed = {gpu_resource(gpu.number): gpu.total_bytes // 2**30 for gpu in node.machine.gpus}
        raise ConfigError(
            f"node {node.name}: Ray does not know the memory of its GPUs; "
            f"start it with --resources '{msgspec.json.encode(needed).decode()}'"
        )
