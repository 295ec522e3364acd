"""Defines the JSON lines between a process of Meltcore and the driver process of a Ray cluster, over two pipes.

Only the driver uses Ray. If a cluster loses its head node, the driver ends, but nothing else of Meltcore. `python -m
meltcore.fleet.ray.driver ADDRESS` is the driver. At the end of its input it ends, together with all processes that it
has started.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from meltcore.common.gpus.machine import Machine
from meltcore.protocol.tcp import Listening
from meltcore.settings.config import EngineConfig, PriorityClass, SharingSection

DRIVER_MODULE = "meltcore.fleet.ray.driver"


def gpu_resource(number: int) -> str:
    """Return the name of Ray's custom resource for the memory of a node's GPU, in GiB."""
    return f"gpu{number}_gib"


# --- to the driver -------------------------------------------------------------------------------------------------


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Asks whether the driver still answers. The driver answers with `Pong`."""


class ReadNodes(msgspec.Struct, tag="read_nodes", frozen=True):
    """Asks for all living nodes, and which of these checkpoints each node can load. The driver answers with `Nodes`.

    Args:
        checkpoints: Absolute paths, and ids of the hub.
        limit_s: Time for a node to answer. NVML takes up to 60 s, and a worker process several seconds to start.
        names: Names of known nodes by id. The nodes keep these names.
        used: Ids of the nodes that have engines.
    """

    checkpoints: list[str] = []
    limit_s: float = 90.0
    names: dict[str, str] = {}
    used: list[str] = []


class StartEngine(msgspec.Struct, tag="start_engine", frozen=True):
    """Asks for an engine process on a node. The answer is `EngineListening` or `EngineEnded`.

    Args:
        engine: Number of the engine.
        command: The command that starts the engine, without the interpreter.
        client_key: Public key of the engine's clients.
        gpus: Indices among the GPUs of the node that Ray may use.
        gib: Memory on each of these GPUs, in GiB.
        cpu_engines: Number of engines that share the cores of the node.
        sharing: How engines of one GPU wait for each other.
        fleet: A name that all engines that wait for each other share.
        model: Name of the model.
        replica: Index of the replica of the model.
    """

    engine: int
    node: str
    command: list[str]
    config: EngineConfig
    client_count: int
    client_key: str
    gpus: list[int] = []
    gib: float = 0.0
    cpu_engines: int = 1
    fleet: str = ""
    sharing: SharingSection = SharingSection(means="none")
    priority_class: PriorityClass = "standard"
    model: str = ""
    replica: int = 0


class KillEngine(msgspec.Struct, tag="kill_engine", frozen=True):
    """Kills an engine process immediately. `EngineEnded` follows."""

    engine: int


class RunOnNodes(msgspec.Struct, tag="run_on_nodes", frozen=True):
    """Asks every node to run a command of Meltcore. The answers are `CommandStarted`, then one `CommandEnded` per node.

    Args:
        command: Name and options of the command.
        limit_s: Time limit on each node.
        needs_gpu: Nodes without a GPU do not run the command.
        takes_gpus: Ray gives all GPUs of the node to the command, so that no other Ray job runs there.
        has_folder: The command writes a run folder, which the node removes.
    """

    command: list[str]
    limit_s: float
    needs_gpu: bool = False
    takes_gpus: bool = False
    has_folder: bool = False


# --- from the driver -----------------------------------------------------------------------------------------------


class ClusterNode(msgspec.Struct, frozen=True):
    """Describes a node of the cluster.

    Args:
        name: Host name. If several nodes have the same host name, the beginning of the node's id is added.
        gib: Total memory in GiB of each GPU that Ray may assign (`gpu_resource`), by GPU index.
        reserved_gib: Memory in GiB that Ray has assigned to jobs, by GPU index.
        missing: The reason why the node cannot load a checkpoint, by checkpoint.
        problem: Why no engine can be started on the node, or "". With a problem nothing else is known about the node.
    """

    name: str
    node_id: str
    address: str
    machine: Machine
    gib: dict[int, float] = {}
    missing: dict[str, str] = {}
    reserved_gib: dict[int, float] = {}
    problem: str = ""


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answers `Ping`."""


class Nodes(msgspec.Struct, tag="nodes", frozen=True):
    """Answers `ReadNodes` with the living nodes, in the order of their names."""

    nodes: list[ClusterNode]


class ClusterFailed(msgspec.Struct, tag="cluster_failed", frozen=True):
    """Says in one line why a request cannot be answered, or why the cluster cannot be reached."""

    message: str


class EngineListening(msgspec.Struct, tag="listening", frozen=True):
    """Reports that an engine process runs and loads its model.

    Clients reach the engine at `host`, with the port and key in `listening`. `pid` is the process id on its node.
    """

    engine: int
    host: str
    listening: Listening
    pid: int


class EngineOutput(msgspec.Struct, tag="output", frozen=True):
    """Has the output that an engine process has written since the last such message."""

    engine: int
    data: bytes


class EngineEnded(msgspec.Struct, tag="ended", frozen=True):
    """Reports that an engine process has ended, or could not be started.

    With `no_room` nothing was started, because the node is gone or has too little memory. Another node may take the
    engine. With `is_evicted` the cluster has ended the engine, or its start, because the node ran out of memory. The
    process may still run.
    """

    engine: int
    reason: str
    no_room: bool = False
    is_evicted: bool = False


class ClusterState(msgspec.Struct, tag="cluster_state", frozen=True):
    """Reports that the head node has stopped to answer, or answers again.

    `problem` says why nothing can be changed. It is empty if the head node answers.
    """

    problem: str


class CommandStarted(msgspec.Struct, tag="command_started", frozen=True):
    """Answers `RunOnNodes` with the names of the nodes that run the command."""

    nodes: list[str]


class CommandEnded(msgspec.Struct, tag="command_ended", frozen=True):
    """Reports the end of a command on one node. "late": it exceeded its time limit. "failed": it did not start.

    `output` is the command's standard output. `reason` is the last line of its standard error, or why it did not end.
    """

    node: str
    status: Literal["ended", "late", "failed", "no GPU"]
    reason: str = ""
    returncode: int | None = None
    output: bytes = b""
    has_gpu: bool = False
    duration_s: float = 0.0


ToDriver = Ping | ReadNodes | StartEngine | KillEngine | RunOnNodes
FromDriver = (
    Pong
    | Nodes
    | ClusterFailed
    | ClusterState
    | EngineListening
    | EngineOutput
    | EngineEnded
    | CommandStarted
    | CommandEnded
)
