"""Plans a fleet for `meltcore plan`, `up` and `reload`.

Each engine gets its GPUs and its budget before any engine starts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.sizes import size_text
from meltcore.engine.memory.memory_needs import PlannedEngine, UnknownSizesError, forget_failures
from meltcore.fleet.plan.cluster import (
    Cluster,
    lacking_nodes,
    lacking_text,
    left_out_text,
    model_lacking_text,
    node_checkpoints,
)
from meltcore.fleet.plan.context_memory import ContextMemory, find_contexts
from meltcore.fleet.plan.first_fit import Host, Place
from meltcore.fleet.plan.nearest import SEARCH_LIMIT_S
from meltcore.fleet.plan.needs import fleet_needs, host_needs, named_needs, read_fleet_sizes
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.plan.plan import Plan, empty_gpus, plan_fleet, with_needs, with_plan
from meltcore.fleet.plan.running_fleet import Running, place_engine, unchanged_models
from meltcore.fleet.plan.site import OneMachine
from meltcore.protocol.cluster import ClusterNode, StartEngine
from meltcore.protocol.fleet_plan import other_changes_text
from meltcore.settings.fleet_file import load_fleet
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

_MAX_SIZES_SHOWN = 16


class PlannerSource(NamedTuple):
    """The inputs of a plan: a fleet.yaml, its contents, and the machine or the cluster as it was read."""

    path: str
    spec: FleetSpec
    site: OneMachine | Cluster


class FleetPlanner:
    """Plans the fleet of a fleet.yaml, again each time that the file changes.

    Memory counts as it was before the fleet had engines there. On this machine the memory was read when the fleet was
    started. On a node of a cluster it was read when the node got its first engine.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[FleetSpec], OneMachine | Cluster] = OneMachine.read,
        spec: FleetSpec | None = None,
    ) -> None:
        """Create a planner. `read` returns the machine or the cluster that the fleet may use.

        `spec` has the contents of the file if they have been read already. Raises ConfigError if the file is not valid,
        or if the machine or the cluster cannot be read.
        """
        self.path = path
        self._running_spec = self.spec = load_fleet(path) if spec is None else spec  # as it runs, and as last planned
        self._site = read(self.spec)
        self._looking = threading.Lock()  # `config` of a reload runs in a thread, beside `elsewhere`

    @classmethod
    def of(cls, planned: PlannerSource) -> FleetPlanner:
        """Return a planner with the same inputs as `planned`, which a planner in another process has."""
        return cls(Path(planned.path), lambda _spec: planned.site, planned.spec)

    @property
    def planned_from(self) -> PlannerSource:
        """The inputs of the planner. Another process that gets them gives the GPUs of a cluster the same numbers."""
        return PlannerSource(str(self.path), self.spec, self._site)

    @property
    def site(self) -> OneMachine | Cluster:
        """The machine or the cluster on which the engines run."""
        return self._site

    @property
    def node_names(self) -> dict[str, str]:
        """The names of the nodes by their ids, including nodes that are left out."""
        return {node.node_id: node.name for node in (*self._site.nodes, *self._site.left_out)}

    def checkpoints(self) -> list[str]:
        """Return the checkpoints of the file that nodes must have. Raises ConfigError if the file is not valid."""
        return node_checkpoints(load_fleet(self.path))

    def config(self, report: Callable[[str], None] = lambda _line: None, running: Running | None = None) -> PlacedFleet:
        """Return the planned fleet. `report` gets a line for each model that is not in the plan.

        Unchanged models of the fleet `running` stay as they are, and other models are planned beside them. Raises
        ConfigError if the file is not valid, or if the fleet does not fit. The error then has the nearest plan.
        """
        self.spec = load_fleet(self.path)
        site = self._site if running is None else self._look(running.nodes, running.places)
        found = find_plan(self.spec, site, report, running)
        if found.plan is None or found.placed is None:
            raise ConfigError(does_not_fit(found, site.machine))
        return msgspec.structs.replace(found.placed, room_bytes=_room(found.spec, found.plan, site.gpu_names))

    def accept(self) -> None:
        """Note that the fleet now runs by the plan that `config` has returned last."""
        self._running_spec = self.spec

    def _look(self, nodes: Sequence[ClusterNode], places: Mapping[tuple[str, int], Place]) -> OneMachine | Cluster:
        """Return the nodes as they are now, without the memory of the fleet's engines at `places`."""
        with self._looking:
            self._site = site = self._site.with_current_nodes(nodes, places)
        return site

    def read_sizes(self) -> None:
        """Read the sizes of the models on GPUs and on the CPU, so that `elsewhere` does not wait for them."""
        read_fleet_sizes(self._running_spec)

    def elsewhere(
        self,
        start: StartEngine,
        nodes: Sequence[ClusterNode],
        places: Mapping[tuple[str, int], Place],
        failed_nodes: Collection[str] = (),
    ) -> Place | None:
        """Return another place for an engine that cannot start at its planned place, or None if there is none.

        The rules of the plan hold. GPUs are numbered on their nodes.

        Args:
            start: the message that starts the engine.
            nodes: the nodes as they are now.
            places: the places of the other engines.
            failed_nodes: nodes on which the engine must not be placed either.
        """
        site, spec, key = self._look(nodes, places), self._running_spec, (start.model, start.replica)
        on_cpu = {name for (name, _), place in places.items() if not place.gpus}
        on_cpu |= set() if start.gpus else {start.model}
        models = {
            name: msgspec.structs.replace(model, device="cpu", residency="always_on") if name in on_cpu else model
            for name, model in spec.models.items()
        }
        spec = msgspec.structs.replace(spec, models=models)
        machine = site.machine
        contexts = _measured_contexts(machine)
        excluded_nodes = {
            node.name
            for node in site.nodes
            if node.name in failed_nodes
            or start.config.model in node.missing
            or (start.gpus and len(node.gib) < len(node.machine.gpus))
        }
        gpu_bytes = _free_bytes(_usable(spec, machine), contexts)
        gpus = empty_gpus(spec, gpu_bytes, contexts, site.gpu_nodes)
        kept = {
            other: place
            for other, place in site.places(places).items()
            if other != key and place.node not in excluded_nodes
        }
        place = place_engine(
            spec,
            key,
            [gpu for gpu in gpus if gpu.node not in excluded_nodes],
            [Host(node, total) for node, total in site.host_bytes.items() if node not in excluded_nodes],
            kept,
            contexts,
        )
        return place and Place(place.node, tuple(site.gpus[number][1] for number in place.gpus))

    def why_nowhere(self, start: StartEngine) -> str:
        """Return why `elsewhere` has just found no place: no node has free memory, or the model's `device` has none."""
        spec, site = self._running_spec, self._site
        model, size = spec.models.get(start.model), f"{size_text(start.config.memory_bytes or 0)} free for it"
        groups = [] if model is None or model.kind == "url" else model.replica_gpus
        pinned = groups[start.replica] if start.replica < len(groups) else ()
        if not pinned:
            lacking = lacking_text(start.config.model, site.nodes_without(start.config.model))
            return f"no other node has {size}" + (lacking and f"; {lacking}")
        there = site.machine.gpus
        for number in pinned:
            if there[number].total_bytes == 0:
                is_left_out = site.gpu_nodes[number] in {node.name for node in site.left_out}
                return f"device: GPU {number} is " + ("on a node that is left out" if is_left_out else "gone")
        return f"device: GPU {', '.join(map(str, pinned))} has not {size}"


def no_planner() -> FleetPlanner:
    """Raise ConfigError, because a server without a fleet.yaml has no file to read again, and ends with its engine."""
    raise ConfigError("this server was started without a fleet.yaml: end it, and start it with other options")


def print_unplanned(line: str) -> None:
    """Print a line about a model that is not in the plan."""
    print(f"meltcore: {line}", file=sys.stderr, flush=True)


class FoundPlan(NamedTuple):
    """The plan of a fleet for a machine or a cluster, and the nearest plan that fits. A plan that does not fit is None.

    Args:
        spec: the fleet as it is planned, with all its models.
        known: the models in the plan, as in the file.
        left_out: the other models by name, each with the reason.
        placed: the fleet as it would start, without the memory of models that take turns.
        gpus: the GPUs that the fleet may use.
        gpu_bytes: bytes of each GPU that other processes do not use.
        kept: models that run and stay as they are, by name.
        obstacles: reasons why a cluster has less memory than its nodes seem to have. Examples are models that take no
            turns, nodes that cannot load a model, and nodes that are left out.
    """

    spec: FleetSpec
    known: FleetSpec
    left_out: dict[str, str]
    plan: Plan | None
    nearest: Plan | None
    placed: PlacedFleet | None
    gpus: tuple[VisibleGpu, ...]
    gpu_bytes: list[int]
    kept: Mapping[str, ModelSection]
    obstacles: tuple[str, ...] = ()

    @property
    def others_bytes(self) -> dict[int, int]:
        """The bytes that other processes use of each GPU, by the number of the GPU."""
        return {gpu.number: gpu.total_bytes - left for gpu, left in zip(self.gpus, self.gpu_bytes, strict=True)}


def find_plan(
    spec: FleetSpec, site: OneMachine | Cluster, report: Callable[[str], None], running: Running | None = None
) -> FoundPlan:
    """Plan a fleet for the memory that other processes leave on a machine or on the nodes of a cluster.

    The models of the fleet `running` that have not changed stay where they are. `report` gets a line for each model
    that is not in the plan, and for nodes that are left out. Raises ConfigError if GPUs are missing, or if the cluster
    cannot run the plan.
    """
    machine, left_out = site.machine, left_out_text(site.left_out)
    if left_out:
        if running is None:
            _check_no_numbers(spec, left_out)
        report(left_out)
    spec = _on_this_machine(spec, machine)
    known, left_out_models = without_unknown(spec, report)
    contexts = _measured_contexts(machine)
    gpus = _usable(spec, machine)
    gpu_bytes = _free_bytes(gpus, contexts)
    places = {} if running is None else site.places(running.places)
    kept: dict[str, ModelSection] = {}
    kept_places: dict[str, tuple[Place, ...]] = {}
    if running is not None:
        kept = unchanged_models(with_needs(known, fleet_needs(known)), running, places)
        kept_places = {name: running.fleet.places[name] for name in kept}
    site.check_numbers(known, kept)
    lacking = lacking_nodes(known, site, kept)
    try:
        site.check(known, lacking)
        plan, nearest = plan_fleet(
            known,
            gpu_bytes,
            contexts=contexts,
            host_bytes=site.host_bytes,
            gpu_nodes=site.gpu_nodes,
            in_turns=site.taking_turns,
            kept={(name, at): places.get((name, at)) for name in kept for at in range(kept[name].replicas)},
            excluded_nodes={name: frozenset(node.name for node in nodes) for name, nodes in lacking.items()},
        )
    except ConfigError as error:  # a model that needs a larger node, which may be one that is left out
        raise ConfigError(f"{error}; {left_out}" if left_out else str(error)) from error
    if nearest is not None and nearest.is_cut:
        report(f"the search for the nearest plan was ended after {SEARCH_LIMIT_S:g} s: fewer changes may be enough")
    lacking_texts = tuple(model_lacking_text(spec, name, nodes) for name, nodes in lacking.items())
    placed = None
    if plan is not None:
        for text in lacking_texts:
            report(f"{text}; it is planned for other nodes")
        planned = with_plan(known, plan)
        models = {name: planned.models.get(name, spec.models[name]) for name in spec.models}
        spec = msgspec.structs.replace(spec, models=models)
        placed = site.place_fleet(msgspec.structs.replace(spec, models=models | kept), plan, kept_places)
    obstacles = (*site.why_no_turns(known), *lacking_texts, *filter(None, [left_out]))
    return FoundPlan(spec, known, left_out_models, plan, nearest, placed, gpus, gpu_bytes, kept, obstacles)


def _measured_contexts(machine: Machine) -> ContextMemory:
    first = next((gpu for gpu in machine.gpus if gpu.total_bytes), None)
    return find_contexts("" if first is None else first.name, machine.driver)


def _usable(spec: FleetSpec, machine: Machine) -> tuple[VisibleGpu, ...]:
    """Return the GPUs that fleet.yaml allows. Raises ConfigError if the memory of such a GPU is unknown."""
    limits = {gpu.id: gpu.memory or 0 for gpu in spec.gpus}
    gpus = tuple(machine.gpus[gpu.id] for gpu in spec.gpus) or machine.gpus
    return tuple(gpu.with_known_size(limits.get(gpu.number, 0)) for gpu in gpus)


def _free_bytes(gpus: Sequence[VisibleGpu], contexts: ContextMemory) -> list[int]:
    """Return the bytes of each GPU that other processes do not use. They include the bytes of the driver."""
    return [gpu.total_bytes - max(0, gpu.used_bytes - contexts.driver_bytes) for gpu in gpus]


def _room(spec: FleetSpec, plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each GPU, by name, that sleepable models share. Other engines need the rest."""
    room = {}
    for gpu, name in zip(plan.gpus, [names[gpu.number] for gpu in plan.gpus], strict=True):
        resident = sum(
            engine.resident_bytes if spec.models[engine.model].residency == "sleepable" else engine.size_bytes
            for engine in gpu.engines
        )
        room[name] = gpu.total_bytes - gpu.driver_bytes - resident
    return room


def check_gpus(spec: FleetSpec, count: int) -> None:
    """Raise ConfigError if `gpus` names a GPU beyond the `count` GPUs of the machine."""
    visible = f"{count} {'is' if count == 1 else 'are'} visible"
    for index, gpu in enumerate(spec.gpus):
        if gpu.id >= count:
            raise ConfigError(f"gpus[{index}].id: got {gpu.id}; {visible}, numbered from 0")


def check_devices(spec: FleetSpec, count: int) -> None:
    """Raise ConfigError if a model's `device` names a GPU beyond the `count` GPUs of the machine."""
    for name, model in spec.models.items():
        if model.kind != "url" and not isinstance(model.device, str):
            for number in model.device:
                if number >= count:
                    visible = f"{count} {'is' if count == 1 else 'are'} visible"
                    raise ConfigError(f"models.{name}.device: got GPU {number}; {visible}, numbered from 0")


def _check_no_numbers(spec: FleetSpec, left_out: str) -> None:
    """Raise ConfigError if the file names GPUs by number while a node is left out, whose GPUs have no numbers."""
    keys = ["gpus"] if spec.gpus else []
    keys += [
        f"models.{name}.device"
        for name, model in spec.models.items()
        if model.kind != "url" and not isinstance(model.device, str)
    ]
    if keys:
        raise ConfigError(f"{keys[0]}: numbers of GPUs count those of all nodes, and {left_out}")


def _on_this_machine(spec: FleetSpec, machine: Machine) -> FleetSpec:
    """Check the GPUs that a file names. Return the fleet, whose models move to the CPU if this machine has no GPU.

    Raises ConfigError for a model that needs a GPU then. Raises ConfigError also for GPUs that exist and cannot be
    used, because a fault must not move a model to the CPU.
    """
    if any(model.kind != "url" and model.device != "cpu" for model in spec.models.values()):
        machine.checked()
    count = len(machine.gpus)
    check_gpus(spec, count)
    check_devices(spec, count)
    models = dict(spec.models)
    for name, model in models.items():
        if model.kind == "url" or model.device == "cpu":
            continue
        if count == 0 and model.kind == "engine":
            if model.device == "cuda":
                raise ConfigError(f"models.{name}.device: got cuda; this machine has no GPU")
            if model.tensor_parallel_size > 1:
                raise ConfigError(
                    f"models.{name}.tensor_parallel_size: got {model.tensor_parallel_size}; this machine has no GPU"
                )
            models[name] = msgspec.structs.replace(model, device="cpu", residency="always_on")
    return msgspec.structs.replace(spec, models=models)


def without_unknown(spec: FleetSpec, report: Callable[[str], None]) -> tuple[FleetSpec, dict[str, str]]:
    """Return the fleet without models whose sizes cannot be read here, and the reasons by the names of these models.

    `report` gets a line for each of them.
    """
    forget_failures()
    read_fleet_sizes(spec, report)
    unknown = dict(_unknown(spec))
    for name, reason in unknown.items():
        report(f"models.{name} is not in the plan: {reason}")
    models = {name: model for name, model in spec.models.items() if name not in unknown}
    return msgspec.structs.replace(spec, models=models), unknown


def _unknown(spec: FleetSpec) -> list[tuple[str, str]]:
    """Return the models without `memory` in the file whose sizes cannot be read here, each with the reason."""
    found = []
    for name, model in spec.models.items():
        if model.memory is None and model.kind == "engine":
            try:
                named_needs(name, model)
            except UnknownSizesError as error:
                found.append((name, str(error).removeprefix(f"models.{name}: ")))
        elif model.memory is None and model.kind == "command" and model.device != "cpu":
            found.append((name, "a command takes memory that only its `memory` tells"))
    return found


def _memory_text(gpu: VisibleGpu, free_bytes: int, limit_bytes: int | None) -> str:
    """Return a text that says how much of a GPU a fleet may use, and why not more."""
    if limit_bytes is not None and limit_bytes < free_bytes:
        return f"{size_text(limit_bytes)} (its `memory` under `gpus` is the limit)"
    used_bytes = gpu.total_bytes - free_bytes
    others = f" (others use {size_text(used_bytes)} more)" if used_bytes > 0 else ""
    return f"{size_text(free_bytes)}{others}"


def _gpus_text(spec: FleetSpec, gpus: Sequence[VisibleGpu], gpu_bytes: Sequence[int]) -> str:
    """Return a text that says which GPUs a fleet may use.

    Equal GPUs are counted; a single GPU is named by its number.
    """
    limits = {gpu.id: gpu.memory for gpu in spec.gpus}
    numbers: dict[str, list[int]] = {}  # by what there is
    for gpu, size in zip(gpus, gpu_bytes, strict=True):
        if gpu.total_bytes > 0:
            numbers.setdefault(_memory_text(gpu, size, limits.get(gpu.number)), []).append(gpu.number)
    texts = [
        f"GPU {found[0]} {text}" if len(found) == 1 else f"{len(found)} GPUs of {text}"
        for text, found in numbers.items()
    ]
    if len(texts) > _MAX_SIZES_SHOWN + 1:
        num_more = sum(map(len, numbers.values())) - sum(map(len, list(numbers.values())[:_MAX_SIZES_SHOWN]))
        texts = [*texts[:_MAX_SIZES_SHOWN], f"{num_more} more GPUs"]
    return ", ".join(texts)


def _engines_text(spec: FleetSpec, needs: Mapping[str, PlannedEngine]) -> str:
    """Return a text that says how much GPU memory the models need. Returns "" if all models are on the CPU."""
    texts = []
    for name, model in spec.models.items():
        if model.device != "cpu" and model.kind != "url":
            size = needs[name].budget_bytes if name in needs else int(model.memory or 0)
            count = model.replicas * model.tensor_parallel_size
            texts.append(f"{name} {f'{count} x ' if count > 1 else ''}{size_text(size)}")
    return ", ".join(texts)


def does_not_fit(found: FoundPlan, machine: Machine) -> str:
    """Return the error of a fleet that does not fit.

    Its text has the needed and the free memory, and helpful changes.
    """
    spec, nearest = found.known, found.nearest
    needs = fleet_needs(spec)
    parts = []
    if on_gpus := _engines_text(spec, needs):
        there = _gpus_text(spec, found.gpus, found.gpu_bytes)
        parts.append(f"on GPUs it needs {on_gpus}, and there {'are' if there[:1].isdigit() else 'is'} {there}")
    cpu_bytes, pinned_bytes = host_needs(spec, needs)
    if cpu_bytes + pinned_bytes > machine.host_bytes or not parts:
        pinned = f", and weights of models that sleep {size_text(pinned_bytes)} pinned" if pinned_bytes else ""
        has_turns = any(model.residency == "sleepable" and model.device == "cpu" for model in spec.models.values())
        in_turns = " in turns" if has_turns else ""
        drop = "; with `residency: {keep: disk}` those are read again instead" if pinned_bytes else ""
        parts.append(
            f"its models on the CPU need {size_text(cpu_bytes)} of host memory{in_turns}{pinned}, "
            f"and {size_text(machine.host_bytes)} are available{drop}"
        )
    if nearest is None:
        advice = "No plan fits, also with one sequence, short contexts, sleep and the CPU: remove a model or add a GPU."
    else:
        cut = f", as far as a search of {SEARCH_LIMIT_S:g} s has found it" if nearest.is_cut else ""
        advice = f"The nearest plan that fits{cut}: {'; '.join(nearest.changes)}"
        if nearest.other_changes:
            advice += f". Or, {other_changes_text(nearest.other_changes)}: {'; '.join(nearest.other_changes)}"
    if found.kept:
        advice = f"Models that did not change stay where they are ({', '.join(found.kept)}). {advice}"
    parts += found.obstacles
    return f"the fleet does not fit: {'; '.join(parts)}. {advice}"
