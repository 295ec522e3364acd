"""Describes to a plan the machines where engines run: nodes, GPUs, host memory, and which settings are refused there.

A single machine is a site of one node without a name. `fleet/plan/cluster.py` has the site of a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Self, TypeVar

import msgspec

from meltcore.common.gpus.machine import Machine, visible_gpus
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.machine import read_machine
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.plan.plan import Plan
from meltcore.protocol.cluster import ClusterNode
from meltcore.settings.fleet_spec import FleetSpec

_T = TypeVar("_T")


class Site(msgspec.Struct, frozen=True):
    """The nodes that can be used. All their GPUs have numbers from 0 on, in the order of the nodes' names.

    `known_gpus` are GPUs that got a number earlier, each as its node and its number on the node. Such a GPU keeps its
    number, also when it is gone, and new GPUs get the next numbers. `left_out` has the nodes with a problem.
    """

    nodes: tuple[ClusterNode, ...]
    known_gpus: tuple[tuple[str, int], ...] = ()
    left_out: tuple[ClusterNode, ...] = ()

    title: ClassVar[str]  # in messages

    @property
    def gpus(self) -> tuple[tuple[str, int], ...]:
        """All GPUs, each as (node, number on the node). The index of a GPU is its number in the fleet."""
        present_gpus = [(node.name, gpu.number) for node in self.nodes for gpu in node.machine.gpus]
        return tuple(dict.fromkeys([*self.known_gpus, *present_gpus]))

    @property
    def gpu_nodes(self) -> list[str]:
        """The name of the node of each GPU."""
        return [node for node, _ in self.gpus]

    @property
    def host_bytes(self) -> dict[str, int]:
        """The available bytes of host memory of each node."""
        return {node.name: node.machine.host_bytes for node in self.nodes}

    def nodes_without(self, checkpoint: str | None) -> list[ClusterNode]:
        """Return the nodes that cannot load a checkpoint, which is a path or a hub id.

        None is a checkpoint that all can load.
        """
        return [node for node in self.nodes if checkpoint in node.missing]

    def places(self, engines: Mapping[tuple[str, int], Place]) -> dict[tuple[str, int], Place]:
        """Return the places of the engines whose GPUs still exist. GPUs have their numbers in the fleet."""
        numbers = {gpu: number for number, gpu in enumerate(self.gpus)}
        nodes = {node.name for node in self.nodes}
        found = {}
        for key, each in engines.items():
            gpus = [numbers.get((each.node, number)) for number in each.gpus]
            if each.node in nodes and None not in gpus:
                found[key] = Place(each.node, tuple(number for number in gpus if number is not None))
        return found


class OneMachine(Site, frozen=True, tag="machine"):
    """The site of this machine. Its memory counts as it was when the fleet was started."""

    title = "this machine"

    @classmethod
    def of(cls, machine: Machine) -> Self:
        """Return the site of a machine."""
        return cls((ClusterNode("", "", "", machine),))

    @classmethod
    def read(cls, _spec: FleetSpec) -> Self:
        """Return the site of this machine as it is now."""
        return cls.of(read_machine())

    @property
    def machine(self) -> Machine:
        """The machine, even if its GPUs cannot be used."""
        return self.nodes[0].machine

    @property
    def gpu_names(self) -> list[str]:
        """The name of each GPU in CUDA_VISIBLE_DEVICES."""
        return visible_gpus() if self.machine.gpus else []

    def launched_by(self, local: _T, _on_ray: Callable[[str], _T]) -> _T:
        """Return `local`, because this machine starts its engines itself."""
        return local

    def with_current_nodes(self, _nodes: Sequence[ClusterNode], _places: Mapping[tuple[str, int], Place]) -> Self:
        """Return this site unchanged, because its memory was read before the fleet had engines."""
        return self

    def taking_turns(self, sleepable: tuple[str, ...]) -> tuple[str, ...]:
        """Return all of these models, because on one machine a sleeping model leaves its memory to others."""
        return sleepable

    def why_no_turns(self, _spec: FleetSpec) -> tuple[str, ...]:
        """Return no reasons, because sleepable models take turns on this machine."""
        return ()

    def check_numbers(self, _spec: FleetSpec, _kept: Collection[str]) -> None:
        """Do nothing, because the GPUs of one machine do not change while a fleet runs."""

    def check(self, _spec: FleetSpec, _excluded_nodes: Mapping[str, Sequence[ClusterNode]]) -> None:
        """Do nothing, because all engines are on one node, which is checked when they start."""

    def place_fleet(self, spec: FleetSpec, plan: Plan, kept: Mapping[str, tuple[Place, ...]]) -> PlacedFleet:
        """Return a planned fleet with the place of each replica. Models in `kept` stay where they are."""
        replicas = {name: plan.replicas(name) or ((),) * spec.models[name].replicas for name in plan.needs}
        places = {name: tuple(Place("", numbers) for numbers in groups) for name, groups in replicas.items()}
        return PlacedFleet(spec, {**places, **kept})
