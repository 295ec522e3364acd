"""Places the replicas of a model, and creates their engine processes, on this machine or on nodes of a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meltcore.common.cores import core_share, near_cores
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import gpu_environment, visible_gpus
from meltcore.common.process import start_call
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.machine import bus_ids
from meltcore.fleet.plan.placement import (
    PlacedFleet,
    cpu_environment,
    engine_config,
    gpu_ranks,
    shared_engine,
    thread_environment,
)
from meltcore.fleet.processes.engine_process import EngineProcess, LocalEngineProcess
from meltcore.fleet.processes.mps import MpsDaemon
from meltcore.fleet.processes.remote_engine import RemoteEngineProcess
from meltcore.fleet.ray.cluster_driver import ClusterDriver
from meltcore.fleet.run.logs import log_path
from meltcore.fleet.run.replica import Replica
from meltcore.protocol.cluster import ClusterNode, StartEngine
from meltcore.protocol.engines import FromEngine
from meltcore.settings.config import EngineConfig, PriorityClass, SharingSection
from meltcore.settings.fleet_checks import FleetError

if TYPE_CHECKING:
    from meltcore.fleet.plan.planned import FleetPlanner


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The settings with which all engines of a server are started."""

    command: Sequence[str]
    sockets: Path
    client_count: int
    fleet: Callable[[], PlacedFleet]  # as it is now: a reload changes its models
    cpu_engines: Callable[[str], int]  # that share the cores of a node
    on_moved: Callable[[], None]  # an engine of a cluster has another place
    held_places: Callable[[], dict[tuple[str, int], Place]]  # that a pending engine must leave free, by model, replica
    sharing: SharingSection  # of engines among each other

    def engine(self, replica: Replica) -> EngineConfig:
        """Return the settings of an engine, with the number of ranks that may compile concurrently on its node."""
        return msgspec.structs.replace(replica.engine, node_ranks=gpu_ranks(self.fleet(), replica.node))


def place_replicas(fleet: PlacedFleet, name: str, log_folder: Path | None = None) -> list[Replica]:
    """Return the replicas of a model, each with its place. A single replica chooses its own GPUs.

    Replicas of a model share no GPU. They get neighboring GPUs in the order of CUDA_VISIBLE_DEVICES. A CPU is not
    divided. Raises FleetError if there are too few GPUs, and ConfigError if CUDA_VISIBLE_DEVICES is invalid.
    """
    model = fleet.spec.models[name]
    engine, count, gpus_per_replica = engine_config(model), model.replicas, model.tensor_parallel_size
    logs = [log_folder and log_path(log_folder, name, index, count) for index in range(count)]
    replicas = [Replica(index=index, log=log, engine=engine, model=name) for index, log in enumerate(logs)]
    if places := fleet.on_nodes(name):
        for replica, place in zip(replicas, places, strict=True):
            replica.node, replica.gpus = place
        return replicas
    if not isinstance(model.device, str):
        gpus = visible_gpus()
        for replica, numbers in zip(replicas, model.replica_gpus, strict=True):
            if missing := [number for number in numbers if number >= len(gpus)]:
                raise FleetError(
                    f"models.{name}.device", f"got GPU {missing[0]}; {len(gpus)} are visible, numbered from 0"
                )
            replica.environment, replica.gpus = gpu_environment([gpus[number] for number in numbers]), numbers
        return replicas
    gpus = [] if engine.device == "cpu" else visible_gpus()  # raises for a GPU that cannot be counted
    if count == 1 or (not gpus and engine.device != "cuda"):
        return replicas
    if len(gpus) < count * gpus_per_replica:
        raise FleetError(
            f"models.{name}.replicas",
            f"got {count}, which needs {count * gpus_per_replica} GPUs ({gpus_per_replica} each); "
            f"{len(gpus)} are visible",
        )
    for replica in replicas:
        first = replica.index * gpus_per_replica
        # By name: an engine left to choose would silently use the CPU when its GPU cannot be used.
        replica.engine = msgspec.structs.replace(engine, device="cuda")
        replica.environment = gpu_environment(gpus[first : first + gpus_per_replica])
    return replicas


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
        exits_by_failed_node: Mapping[str, int],
        on_message: Callable[[FromEngine], None],
    ) -> EngineProcess:
        """Return an engine process that is not started yet.

        Args:
            replica: the replica, with the place of the engine.
            priority_class: class of the model's requests.
            exits_by_failed_node: number of the engine's exits by node. Nodes of a cluster with exits are avoided if
                others have memory.
            on_message: receives the engine's messages to the supervisor.
        """


MakeLauncher = Callable[[LaunchSettings, Callable[[str], None]], Launcher]  # with what prints a line


class LocalLauncher(Launcher):
    """Starts engines on this machine."""

    problem = ""

    def __init__(self, settings: LaunchSettings, report: Callable[[str], None]) -> None:
        """Create the launcher. Raises ConfigError if `sharing.means` needs a program that is not installed."""
        self._settings, self._report = settings, report
        self._cores: dict[str, list[tuple[int, ...]]] = {}  # near each GPU, by its name
        is_mps = settings.sharing.means == "mps" and visible_gpus()
        self._mps = MpsDaemon(settings.sockets / "mps") if is_mps else None

    async def connect(self) -> None:
        """Find the cores near each GPU, and start the MPS daemon if engines shall be its clients.

        Without these cores engines are not pinned. Raises ConfigError if the daemon does not start.
        """
        try:
            found = await asyncio.wrap_future(start_call(bus_ids)) if self._gpu_ranks() else {}
        except ConfigError as error:
            self._report(f"engines are not pinned to the cores near their GPUs: {error}")
        else:
            self._cores = {name: near_cores(bus_id) for name, bus_id in found.items()}
        if self._mps is not None:
            await asyncio.wrap_future(start_call(self._mps.start))

    async def stop(self) -> None:
        """End the MPS daemon. Each model has ended its own engines."""
        if self._mps is not None:
            await asyncio.wrap_future(start_call(self._mps.stop))

    async def read_nodes(self, checkpoints: Iterable[str]) -> list[ClusterNode]:  # noqa: ARG002 - there are no nodes
        """Return no nodes, because the plan knows the memory of this machine without the engines."""
        return []

    def new_engine(
        self,
        replica: Replica,
        priority_class: PriorityClass,
        exits_by_failed_node: Mapping[str, int],  # noqa: ARG002 - there is no other node
        on_message: Callable[[FromEngine], None],
    ) -> EngineProcess:
        """Return an engine process of this machine."""
        settings = self._settings
        engine = settings.engine(replica)
        mps, environment = self._mps if replica.gpu_names else None, self._threads(replica)
        if mps is not None:
            environment |= mps.client_environment(priority_class, settings.sharing.mps_sm_percent)
        return LocalEngineProcess(
            shared_engine(engine, replica.gpu_names, settings.sharing, priority_class, settings.sockets),
            settings.command,
            on_message,
            directory=replica.sockets or settings.sockets,
            client_count=settings.client_count,
            environment=replica.environment | environment,
            log=replica.log,
            mps=mps,
            cpus={cpu for share in self._core_shares(replica) for cpu in core_share(*share)},
        )

    def _threads(self, replica: Replica) -> dict[str, str]:
        """Return the environment variable that limits the threads of an engine to its part of the cores."""
        if not replica.gpu_names:
            return cpu_environment(self._settings.fleet().spec, replica.model)
        shares = self._core_shares(replica)
        return thread_environment(sum(sum(map(len, cores)) // count for cores, _, count in shares)) if shares else {}

    def _core_shares(self, replica: Replica) -> list[tuple[list[tuple[int, ...]], int, int]]:
        """Return for each rank of an engine the cores near its GPU, its index among the ranks there, and their number.

        The result is empty if the cores are not known.
        """
        shares = []
        for gpu in sorted(replica.gpu_names):
            cores, own = self._cores.get(gpu, []), (replica.model, replica.index, gpu)
            near = [rank for rank in self._gpu_ranks() if self._cores.get(rank[2]) == cores]
            if cores and own in near:
                shares.append((cores, near.index(own), len(near)))
        return shares

    def _gpu_ranks(self) -> list[tuple[str, int, str]]:
        """Return model, replica and GPU of each rank of the fleet, also of engines that sleep."""
        fleet = self._settings.fleet()
        return [
            (name, each.index, gpu)
            for name in fleet.spec.engines
            for each in place_replicas(fleet, name)
            for gpu in sorted(each.gpu_names)
        ]


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
        exits_by_failed_node: Mapping[str, int],
        on_message: Callable[[FromEngine], None],
    ) -> EngineProcess:
        """Return an engine process on the node of its replica."""
        directory = replica.sockets or self._settings.sockets
        return RemoteEngineProcess(
            self,
            self._order(replica, directory.name, priority_class),
            on_message,
            directory,
            replica.log,
            on_place=partial(replica.move, self._settings.on_moved),
            exits_by_failed_node=exits_by_failed_node,
        )

    def _order(self, replica: Replica, number: str, priority_class: PriorityClass) -> StartEngine:
        """Return the message that starts an engine on its node. `number` names the folder of the engine's sockets."""
        settings = self._settings
        size_bytes = replica.engine.memory_bytes or 0
        return StartEngine(
            engine=int(number) if number.isdigit() else -1,
            node=replica.node,
            command=list(settings.command[1:]),
            config=settings.engine(replica),
            client_count=settings.client_count,
            client_key=self.keys.public,
            gpus=list(replica.gpus),
            gib=size_bytes / 2**30,
            cpu_engines=settings.cpu_engines(replica.node),
            fleet=self.name,
            sharing=settings.sharing,
            priority_class=priority_class,
            model=replica.model,
            replica=replica.index,
        )
