"""Creates the engine process of a replica, on this machine or on the cluster node that the plan has chosen."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.placement import Placement, shared_engine
from meltcore.fleet.processes.engine_process import EngineProcess, LocalEngineProcess
from meltcore.fleet.processes.remote_engine import RemoteEngineProcess
from meltcore.fleet.ray.cluster_driver import ClusterDriver
from meltcore.fleet.run.replica import Replica
from meltcore.protocol.cluster import ClusterNode, StartEngine
from meltcore.protocol.engines import FromEngine
from meltcore.settings.config import EngineConfig, PriorityClass, SharingSection

if TYPE_CHECKING:
    from meltcore.fleet.plan.planned import FleetPlanner


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The settings with which all engines of a server are started."""

    command: Sequence[str]
    sockets: Path
    client_count: int
    environment: Callable[[Placement, PriorityClass], dict[str, str]]  # of an engine, beside that of its placement
    cpu_engines: Callable[[str], int]  # that share the cores of a node
    gpu_ranks: Callable[[str], int]  # of all engines on GPUs of a node
    on_moved: Callable[[], None]  # an engine of a cluster has another place
    held_places: Callable[[], dict[tuple[str, int], Place]]  # that a pending engine must leave free, by model, replica
    sharing: SharingSection  # of engines among each other

    def engine(self, placement: Placement) -> EngineConfig:
        """Return the settings of a placed engine.

        They include the number of all ranks on its node, which may compile kernels concurrently.
        """
        return msgspec.structs.replace(placement.engine, node_ranks=self.gpu_ranks(placement.node))


class Launcher(ABC):
    """Starts the engines of a server, on this machine or in a cluster."""

    problem: str  # why no engine can be started anywhere; "": one can

    @abstractmethod
    async def connect(self) -> None:
        """Connect to the place where engines are started. Raises ConfigError if engines cannot be started."""

    @abstractmethod
    async def stop(self) -> None:
        """End the process that starts engines, and with it the engines that still run."""

    @abstractmethod
    async def read_nodes(self, checkpoints: Iterable[str]) -> list[ClusterNode]:
        """Return the nodes of a cluster as they are now, each with the checkpoints that it cannot load.

        Raises ConfigError if the nodes cannot be read.
        """

    @abstractmethod
    def new_engine(
        self,
        replica: Replica,
        priority_class: PriorityClass,
        failed_nodes: Mapping[str, int],
        on_message: Callable[[FromEngine], None],
    ) -> EngineProcess:
        """Return an engine process that is not started yet.

        Args:
            replica: the replica, with the place of the engine.
            priority_class: class of the model's requests.
            failed_nodes: number of the engine's exits by node. Nodes of a cluster with exits are avoided if others have
                memory.
            on_message: receives the engine's messages to the supervisor.
        """


MakeLauncher = Callable[[LaunchSettings, Callable[[str], None]], Launcher]  # with what prints a line


class LocalLauncher(Launcher):
    """Starts engines on this machine."""

    problem = ""

    def __init__(self, settings: LaunchSettings, _report: Callable[[str], None]) -> None:
        self._settings = settings

    async def connect(self) -> None:
        """Do nothing, because this machine needs no connection."""

    async def stop(self) -> None:
        """Do nothing, because each model ends its own engines."""

    async def read_nodes(self, checkpoints: Iterable[str]) -> list[ClusterNode]:  # noqa: ARG002 - there are no nodes
        """Return no nodes, because the plan knows the memory of this machine without the engines."""
        return []

    def new_engine(
        self,
        replica: Replica,
        priority_class: PriorityClass,
        failed_nodes: Mapping[str, int],  # noqa: ARG002 - there is no other node
        on_message: Callable[[FromEngine], None],
    ) -> EngineProcess:
        """Return an engine process of this machine."""
        settings, placement = self._settings, replica.placement
        config = settings.engine(placement)
        return LocalEngineProcess(
            shared_engine(placement._replace(engine=config), settings.sharing, priority_class, settings.sockets),
            settings.command,
            on_message,
            directory=replica.sockets or settings.sockets,
            client_count=settings.client_count,
            environment=placement.environment | settings.environment(placement, priority_class),
            log=replica.log,
        )


class RayLauncher(ClusterDriver, Launcher):
    """Starts engines on the nodes of a Ray cluster."""

    def __init__(
        self, address: str, planner: FleetPlanner, settings: LaunchSettings, report: Callable[[str], None]
    ) -> None:
        super().__init__(address, planner, report)
        self._settings = settings

    def places(self) -> dict[tuple[str, int], Place]:
        """Return the places of engines, by model and replica.

        An engine that does not run counts at the place where it will be started again.
        """
        return super().places() | self._settings.held_places()

    def new_engine(
        self,
        replica: Replica,
        priority_class: PriorityClass,
        failed_nodes: Mapping[str, int],
        on_message: Callable[[FromEngine], None],
    ) -> EngineProcess:
        """Return an engine process on the node of its placement."""
        directory = replica.sockets or self._settings.sockets
        return RemoteEngineProcess(
            self,
            self._order(replica, directory.name, priority_class),
            on_message,
            directory,
            replica.log,
            on_place=partial(replica.move, self._settings.on_moved),
            failed_nodes=failed_nodes,
        )

    def _order(self, replica: Replica, number: str, priority_class: PriorityClass) -> StartEngine:
        """Return the message that starts an engine on its node. `number` names the folder of the engine's sockets."""
        settings, placement = self._settings, replica.placement
        size_bytes = placement.engine.memory_bytes or 0
        return StartEngine(
            engine=int(number) if number.isdigit() else -1,
            node=placement.node,
            command=list(settings.command[1:]),
            config=settings.engine(placement),
            client_count=settings.client_count,
            client_key=self.keys.public,
            gpus=list(placement.gpus),
            gib=size_bytes / 2**30,
            cpu_engines=settings.cpu_engines(placement.node),
            fleet=self.name,
            sharing=settings.sharing,
            priority_class=priority_class,
            model=placement.model,
            replica=replica.index,
        )
