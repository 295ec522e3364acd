"""Places engines on GPUs and on the CPUs of hosts by first fit, beside engines that stay where they are."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from meltcore.engine.memory.memory_needs import PlannedEngine
from meltcore.fleet.plan.context_memory import ASSUMED


def awake_bytes(engines: Iterable[PlannedEngine]) -> int:
    """Return the bytes that the largest of the models that take turns frees while it sleeps, with all its replicas.

    Only one of these models is awake at a time, and all replicas of a model are awake together.
    """
    by_model: Counter[str] = Counter()
    for engine in engines:
        by_model[engine.model] += engine.awake_bytes
    return max(by_model.values(), default=0)


class FilledGpu(NamedTuple):
    """A GPU and the engines on it."""

    number: int
    total_bytes: int
    engines: tuple[PlannedEngine, ...] = ()
    driver_bytes: int = ASSUMED.driver_bytes
    node: str = ""  # of a cluster; "": this machine

    @property
    def used_bytes(self) -> int:
        """The bytes of the driver and of all engines on the GPU.

        A model that takes turns counts with the bytes that it holds while it sleeps. The largest of these models counts
        with its whole size.
        """
        resident = sum(engine.size_bytes - engine.awake_bytes for engine in self.engines)
        return self.driver_bytes + resident + awake_bytes(self.engines)


class Place(NamedTuple):
    """The place of an engine that stays: its node, and its GPUs on this node. The node is "" for this machine.

    An engine on the CPU has no GPUs.
    """

    node: str
    gpus: tuple[int, ...]


Kept = Mapping[tuple[str, int], Place | None]  # by model and replica; None: that one is in no place, and gets none


class Host(NamedTuple):
    """The host memory of a node, and the engines on its CPU.

    If `total_bytes` is None, the memory is not limited. Engines on the node's GPUs keep `pinned_bytes` of their weights
    in host memory while they sleep.
    """

    node: str  # of a cluster; "": this machine
    total_bytes: int | None
    engines: tuple[PlannedEngine, ...] = ()
    pinned_bytes: int = 0

    @property
    def engine_bytes(self) -> int:
        """The bytes of the engines on the CPU.

        Models that take turns are awake together only where the largest of them has room for all. So their budgets
        count as the largest one, beside what each engine keeps asleep.
        """
        freed_bytes = sum(engine.budget_bytes - engine.asleep_bytes for engine in self.engines if engine.sleeps)
        saved_bytes = max(0, freed_bytes - awake_bytes(self.engines))
        return sum(engine.size_bytes for engine in self.engines) - saved_bytes

    @property
    def free_bytes(self) -> float:
        """The bytes of host memory that are left, or infinity if there is no limit."""
        total = float("inf") if self.total_bytes is None else self.total_bytes
        return total - self.pinned_bytes - self.engine_bytes


class _Room:
    """The state of a GPU while engines are placed on it."""

    def __init__(self, gpu: FilledGpu) -> None:
        self.gpu, self._engines = gpu, list(gpu.engines)
        self._awake_by_model = Counter[str]()  # with 0 for models that do not take turns
        for engine in gpu.engines:
            self._awake_by_model[engine.model] += engine.awake_bytes
        self._awake_bytes = max(self._awake_by_model.values(), default=0)
        self._resident_bytes = gpu.used_bytes - self._awake_bytes

    def fits(self, engine: PlannedEngine) -> bool:
        """Return whether one more engine fits on the GPU. Models that take turns count as in `FilledGpu.used_bytes`."""
        model_bytes = self._awake_by_model[engine.model] + engine.awake_bytes
        resident_bytes = self._resident_bytes + engine.size_bytes - engine.awake_bytes
        return resident_bytes + max(self._awake_bytes, model_bytes) <= self.gpu.total_bytes

    def has(self, model: str) -> bool:
        return model in self._awake_by_model

    def add(self, engine: PlannedEngine) -> None:
        self._engines.append(engine)
        self._awake_by_model[engine.model] += engine.awake_bytes
        self._resident_bytes += engine.size_bytes - engine.awake_bytes
        self._awake_bytes = max(self._awake_bytes, self._awake_by_model[engine.model])

    def filled(self) -> FilledGpu:
        return self.gpu._replace(engines=tuple(self._engines))


def place(engines: Sequence[PlannedEngine], gpus: Sequence[FilledGpu]) -> tuple[FilledGpu, ...] | None:
    """Place engines by first fit, the largest first. Replicas of a model go to different nodes and GPUs where possible.

    All GPUs of one engine are on one node. Returns the GPUs with their engines, or None if an engine does not fit.
    """
    rooms = [_Room(gpu) for gpu in gpus]
    there = {(gpu.node, engine.model, engine.replica) for gpu in gpus for engine in gpu.engines}
    replicas = Counter((node, model) for node, model, _ in there)
    ordered = sorted(engines, key=lambda each: (-each.size_bytes * each.gpus, each.model, each.replica))
    for _, alike in groupby(ordered, key=lambda each: each._replace(replica=0)):
        if not _place_alike(list(alike), rooms, replicas):
            return None
    return tuple(room.filled() for room in rooms)


def _place_alike(engines: Sequence[PlannedEngine], rooms: Sequence[_Room], replicas: Counter[tuple[str, str]]) -> bool:
    """Place engines that differ only in their replica. Return whether all of them fit.

    `replicas` has the number of replicas by node and model. Each GPU is examined once. After an engine is placed, only
    the GPUs of its node are examined again, because nothing has changed on other nodes.
    """
    first = engines[0]
    fitting: dict[str, list[int]] = {}  # by node: GPUs without the model first
    for index, room in enumerate(rooms):
        is_allowed = (not first.only or room.gpu.number in first.only) and room.gpu.node not in first.excluded_nodes
        if is_allowed and room.fits(first):
            fitting.setdefault(room.gpu.node, []).append(index)

    def order(index: int) -> tuple[bool, int]:
        return rooms[index].has(first.model), index

    def rank(node: str) -> tuple[int, tuple[bool, int], str]:
        return replicas[node, first.model], order(fitting[node][0]), node

    for indices in fitting.values():
        indices.sort(key=order)
    nodes = [rank(node) for node, indices in fitting.items() if len(indices) >= first.gpus]
    heapq.heapify(nodes)
    for engine in engines:
        if not nodes:
            return False
        node = nodes[0][-1]
        for index in fitting[node][: engine.gpus]:
            rooms[index].add(engine)
        replicas[node, engine.model] += 1
        fitting[node] = sorted((index for index in fitting[node] if rooms[index].fits(engine)), key=order)
        if len(fitting[node]) >= engine.gpus:
            heapq.heapreplace(nodes, rank(node))
        else:
            heapq.heappop(nodes)
    return True


def keep(
    engines: Iterable[PlannedEngine], gpus: Sequence[FilledGpu], hosts: Sequence[Host], kept: Kept
) -> tuple[list[PlannedEngine], list[FilledGpu], list[Host]]:
    """Return the engines that have to be placed, then the GPUs and the hosts with the engines that stay."""
    on_gpus: dict[int, list[PlannedEngine]] = {gpu.number: list(gpu.engines) for gpu in gpus}
    on_hosts: dict[str, list[PlannedEngine]] = {host.node: list(host.engines) for host in hosts}
    to_place = []
    for engine in engines:
        key = engine.model, engine.replica
        if key not in kept:
            to_place.append(engine)
        elif (place := kept[key]) is not None and engine.gpus:
            for number in on_gpus.keys() & place.gpus:  # it may be about to end on one that the file no longer allows
                on_gpus[number].append(engine)
        elif place is not None:
            on_hosts[place.node].append(engine)
    return (
        to_place,
        [gpu._replace(engines=tuple(on_gpus[gpu.number])) for gpu in gpus],
        [host._replace(engines=tuple(on_hosts[host.node])) for host in hosts],
    )


def place_on_hosts(engines: Iterable[PlannedEngine], hosts: Sequence[Host]) -> tuple[Host, ...] | None:
    """Place engines on CPUs, the largest first. Return the hosts with their engines.

    Returns None if an engine does not fit. Replicas of a model go to different nodes if possible, then to the node with
    the most free memory.
    """
    placed = list(hosts)
    free_bytes = [host.free_bytes for host in hosts]
    if any(size < 0 for size in free_bytes):
        return None

    def left_bytes(at: int, engine: PlannedEngine) -> float:
        if not engine.sleeps:
            return free_bytes[at] - engine.size_bytes
        return placed[at]._replace(engines=(*placed[at].engines, engine)).free_bytes

    replicas = Counter((at, engine.model) for at, host in enumerate(hosts) for engine in host.engines)
    for engine in sorted(engines, key=lambda each: (-each.size_bytes, each.model, each.replica)):
        fitting = [
            at
            for at, host in enumerate(hosts)
            if host.node not in engine.excluded_nodes and left_bytes(at, engine) >= 0
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda at: (replicas[at, engine.model], -free_bytes[at]))
        free_bytes[best] = left_bytes(best, engine)
        placed[best] = placed[best]._replace(engines=(*placed[best].engines, engine))
        replicas[best, engine.model] += 1
    return tuple(placed)
