"""A Ray cluster as a fleet sees it: its nodes, read by a driver process, and what may be planned on them."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.process import run
from meltcore.fleet.plan.machine import read_machine, unloadable
from meltcore.fleet.plan.placement import replica_gpus
from meltcore.fleet.plan.plan import Plan
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
from meltcore.settings.config import ServerConfig
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

_READ_LIMIT_S = 180.0  # to start a local cluster and to probe all nodes
_MAX_NAMES_SHOWN = 8


class Cluster(NamedTuple):
    """The nodes of a cluster that can be used. Their GPUs are numbered from 0 on through all of them, by name.

    known_gpus: GPUs that have a number since an earlier look, each as its node and its number there. They keep it, also
    where they are gone; others get the next ones. left_out: nodes with a problem.
    """

    nodes: tuple[ClusterNode, ...]
    known_gpus: tuple[tuple[str, int], ...] = ()
    left_out: tuple[ClusterNode, ...] = ()

    @classmethod
    def of(cls, nodes: Iterable[ClusterNode], known_gpus: tuple[tuple[str, int], ...] = ()) -> Self:
        """Return the cluster of these nodes, those with a problem left out."""
        usable: list[ClusterNode] = []
        left_out: list[ClusterNode] = []
        for node in nodes:
            (left_out if node.problem else usable).append(node)
        return cls(tuple(usable), known_gpus, tuple(left_out))

    @classmethod
    def read(cls, address: str, checkpoints: Sequence[str] = ()) -> Self:
        """Read the cluster at `address`: "auto", "local" or HOST:PORT; and which nodes can load these checkpoints.

        "local" starts none: this machine is read. Raises ConfigError where there is none, or where no node can be used.
        """
        if address == "local":
            return cls((_this_node(checkpoints),))
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
        cluster = cls.of(answer.nodes)
        if not cluster.nodes:
            raise ConfigError(f"--ray {address}: no node can be used: {left_out_text(cluster.left_out)}")
        return cluster

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """Each GPU as its node and its number there, in the order of their numbers."""
        there = [(node.name, gpu.number) for node in self.nodes for gpu in node.machine.gpus]
        return tuple(dict.fromkeys([*self.known_gpus, *there]))

    @property
    def machine(self) -> Machine:
        """All nodes as one machine: their GPUs, the driver of the first that has one, and their host memory.

        A GPU that is gone is there without memory. What Ray has given to other jobs, or may not give away, counts as
        used: NVML shows only what these jobs have taken so far.
        """
        there = {(node.name, gpu.number): _as_used(node, gpu) for node in self.nodes for gpu in node.machine.gpus}
        driver = next((node.machine.driver for node in self.nodes if node.machine.gpus), "")
        gpus = [there.get(gpu, VisibleGpu(0, "", 0, 0)) for gpu in self.gpus]
        numbered = tuple(gpu._replace(number=number) for number, gpu in enumerate(gpus))
        return Machine(numbered, driver, sum(node.machine.host_bytes for node in self.nodes))

    @property
    def gpu_nodes(self) -> list[str]:
        """The node of each GPU."""
        return [node for node, _ in self.gpus]

    @property
    def gpu_names(self) -> list[str]:
        """The name of each GPU: its node's, and its number there."""
        return [f"{node}:{number}" for node, number in self.gpus]

    @property
    def host_bytes(self) -> dict[str, int]:
        """The available bytes of host memory of each node."""
        return {node.name: node.machine.host_bytes for node in self.nodes}

    def lacking(self, checkpoint: str | None) -> list[ClusterNode]:
        """Return the nodes that cannot load a checkpoint, which is a path or a hub id."""
        return [node for node in self.nodes if checkpoint in node.missing]


def _as_used(node: ClusterNode, gpu: VisibleGpu) -> VisibleGpu:
    """Return a GPU of a node, of which everything but what Ray can give to this fleet is used."""
    if (size := node.gib.get(gpu.number)) is None:
        return gpu
    left_bytes = round((size - node.reserved_gib.get(gpu.number, 0.0)) * 2**30)
    return gpu._replace(used_bytes=max(gpu.used_bytes, gpu.total_bytes - left_bytes))


def left_out_text(nodes: Iterable[ClusterNode]) -> str:
    """Return which of these nodes are left out, and why; "" for none."""
    return "; ".join(f"node {node.name} is left out: {node.problem}" for node in nodes if node.problem)


def lacking_text(checkpoint: str | None, nodes: Sequence[ClusterNode]) -> str:
    """Return why these nodes cannot load a checkpoint; "" for none."""
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
    """Return this machine as the only node of a cluster that is still to be started, with the name that Ray will give.

    Ray may give away all memory of its GPUs, as the driver starts it.
    """
    machine, name = read_machine().checked(), socket.gethostname()
    gib = {gpu.number: gpu.total_bytes / 2**30 for gpu in machine.gpus}
    return ClusterNode(name, name, "127.0.0.1", machine, gib, unloadable(checkpoints))


def node_checkpoints(spec: FleetSpec) -> list[str]:
    """Return the paths and hub ids of checkpoints: every node of the model must be able to load them."""
    found = {node_checkpoint(model) for model in spec.models.values()}
    return sorted(checkpoint for checkpoint in found if checkpoint is not None)


def node_checkpoint(model: ModelSection) -> str | None:
    """Return the path or the hub id that each node of a model must be able to load; None: nodes are not asked.

    That is so for hub ids of models with `shapes` or random weights, which may be planned before their checkpoint is
    there.
    """
    if model.kind != "engine" or not model.checkpoint:
        return None
    if (path := absolute_path(model.checkpoint)) is not None:
        return path
    is_asked = is_on_hub(model.checkpoint) and model.shapes is None and model.load_format != "dummy"
    return model.checkpoint if is_asked else None


def absolute_path(checkpoint: str) -> str | None:
    """Return the absolute path of a checkpoint; None for an id of the hub, and for a bundled one."""
    path = Path(checkpoint).expanduser()
    is_path = path.is_absolute() or checkpoint.startswith(".") or path.exists()
    return str(path.absolute()) if is_path else None


def lacking_nodes(spec: FleetSpec, cluster: Cluster, kept: Collection[str]) -> dict[str, list[ClusterNode]]:
    """Return the nodes that cannot load a model, by its name. Those in `kept` are loaded."""
    found = {name: cluster.lacking(node_checkpoint(spec.models[name])) for name in spec.models.keys() - set(kept)}
    return {name: found[name] for name in spec.models if found.get(name)}


def model_lacking_text(spec: FleetSpec, name: str, nodes: Sequence[ClusterNode]) -> str:
    """Return why these nodes cannot load a model."""
    return f"models.{name}.checkpoint: {lacking_text(node_checkpoint(spec.models[name]), nodes)}"


def check_loadable(spec: FleetSpec, cluster: Cluster, lacking: Mapping[str, Sequence[ClusterNode]]) -> None:
    """Raise ConfigError for a model that no node can load, or not one that its `device` names."""
    for name, nodes in lacking.items():
        named = {cluster.gpu_nodes[number] for group in replica_gpus(spec.models[name]) for number in group}
        if len(nodes) == len(cluster.nodes) or named.intersection(node.name for node in nodes):
            needed = [node for node in nodes if not named or node.name in named]
            raise ConfigError(model_lacking_text(spec, name, needed))


def on_nodes(config: ServerConfig, plan: Plan, cluster: Cluster, kept: Collection[str] = ()) -> ServerConfig:
    """Return the settings of a planned fleet with the node of each replica, and GPUs numbered on it.

    kept: names of models that are left as they are. Raises ConfigError for what a cluster cannot run, and where a node
    lacks its resources.
    """
    for foreign in config.foreign:
        if foreign.command:
            raise ConfigError(f"models.{foreign.names[0]}.command: --ray starts engines of Meltcore only; name its url")
    if config.sharing is not None and config.sharing.mps_sm_percent is not None:
        raise ConfigError("sharing.means: mps runs on one machine; with --ray it must be pacing or none")
    models = []
    for model in config.models:
        name = model.names[0]
        if name in kept:
            models.append(model)
            continue
        if not (nodes := plan.nodes(name)):
            raise ConfigError(f"models.{name}.memory: must be named with --ray, as its sizes cannot be read here")
        gpus = tuple(tuple(cluster.gpus[at][1] for at in group) for group in plan.replicas(name))
        path = absolute_path(model.engine.model)
        for node in cluster.nodes:
            if node.name in nodes:
                _check_node(node, gpus)
        engine = model.engine if path is None else dataclasses.replace(model.engine, model=path)
        models.append(dataclasses.replace(model, engine=engine, replica_nodes=nodes, replica_gpus=gpus))
    return dataclasses.replace(config, models=tuple(models))


def _check_node(node: ClusterNode, gpus: Sequence[Sequence[int]]) -> None:
    if gpus and len(node.gib) < len(node.machine.gpus):
        needed = {gpu_resource(gpu.number): gpu.total_bytes // 2**30 for gpu in node.machine.gpus}
        raise ConfigError(
            f"node {node.name}: Ray does not know the memory of its GPUs; "
            f"start it with --resources '{msgspec.json.encode(needed).decode()}'"
        )
