"""Describes a running fleet to the plan of a reload: the places of its engines, and the unchanged models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from meltcore.fleet.plan.cluster import absolute_path
from meltcore.fleet.plan.context_memory import ContextMemory
from meltcore.fleet.plan.first_fit import FilledGpu, Host, Place, keep, place, place_on_hosts
from meltcore.fleet.plan.needs import fleet_needs, pinned_bytes, planned_engines
from meltcore.fleet.plan.placement import PlacedFleet, loaded_section
from meltcore.protocol.cluster import ClusterNode
from meltcore.settings.fleet_spec import FleetSpec, ModelSection


class Running(NamedTuple):
    """A running fleet as it was placed, and the current place of each engine, by model and replica.

    GPUs are numbered on their node. `nodes` are the nodes of the fleet's cluster as they are now.
    """

    fleet: PlacedFleet
    places: Mapping[tuple[str, int], Place]
    nodes: Sequence[ClusterNode] = ()


def unchanged_models(
    spec: FleetSpec, running: Running, places: Mapping[tuple[str, int], Place]
) -> dict[str, ModelSection]:
    """Return the models of the new fleet `spec` that already run with the same settings, by name.

    `places` are the places of running engines, with the GPU numbers of the fleet. A model counts as changed if the file
    no longer allows its GPUs.
    """
    before = running.fleet.spec.engines
    return {
        name: before[name]
        for name, model in spec.engines.items()
        if name in before
        and _without_place(loaded_section(model)) == _without_place(before[name])
        and all(
            not (pinned := model.replica_gpus[replica]) or set(place.gpus) <= set(pinned)
            for (of_model, replica), place in places.items()
            if of_model == name
        )
    }


def place_engine(
    spec: FleetSpec,
    engine: tuple[str, int],
    gpus: Sequence[FilledGpu],
    hosts: Sequence[Host],
    kept: Mapping[tuple[str, int], Place],
    contexts: ContextMemory,
) -> Place | None:
    """Return a place for one engine (model, replica) beside engines that stay. Returns None if the engine fits nowhere.

    All engines count as awake. Memory in which models take turns exists only on the GPUs that the plan has chosen.
    """
    needs = fleet_needs(spec)
    engines = {(each.model, each.replica): each for each in planned_engines(spec, needs, (), contexts)}
    if (wanted := engines.get(engine)) is None:  # the file that runs has it no more
        return None
    _, beside, with_kept = keep([each for key, each in engines.items() if key in kept], gpus, hosts, kept)
    if wanted.gpus:
        found = [gpu for gpu in place([wanted], beside) or () if wanted in gpu.engines]
        return Place(found[0].node, tuple(gpu.number for gpu in found)) if found else None
    there = [
        host._replace(
            pinned_bytes=sum(
                pinned_bytes(spec, needs, each.model)
                for gpu in beside
                for each in gpu.engines
                if gpu.node == host.node and spec.models[each.model].residency == "sleepable"
            ),
        )
        for host in with_kept
    ]
    placed_hosts = place_on_hosts([wanted], [host for host in there if host.free_bytes >= 0]) or ()
    return next((Place(host.node, ()) for host in placed_hosts if wanted in host.engines), None)


def _without_place(model: ModelSection) -> ModelSection:
    device: Literal["cpu", "cuda"] = "cpu" if model.device == "cpu" else "cuda"
    return msgspec.structs.replace(model, device=device, checkpoint=absolute_path(model.model) or model.model)
