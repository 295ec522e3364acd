"""Plans which models of a fleet go to which GPU, which sleep, and which go to the CPU.

If the fleet does not fit, the nearest plan that fits is found. Nothing is started and no weights are read, because the
needs of engines are computed from the sizes of their models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from meltcore.common.options import Size
from meltcore.engine.memory.memory_needs import PlannedEngine
from meltcore.fleet.plan.context_memory import ASSUMED, ContextMemory
from meltcore.fleet.plan.first_fit import FilledGpu, Host, Kept, awake_bytes, keep, place, place_on_hosts
from meltcore.fleet.plan.nearest import nearest
from meltcore.fleet.plan.needs import fleet_needs, pinned_bytes, planned_engines, read_fleet_sizes
from meltcore.protocol.fleet_plan import FleetPlan, PlannedGpu, PlannedHost, PlannedModel, PlannedPart
from meltcore.settings.fleet_spec import FleetSpec

# Share of memory and compute slices of MIG profiles, in eighths and sevenths, and the usual layouts of a GPU.
MIG_PROFILES = {"1g": (1, 1), "2g": (2, 2), "3g": (4, 3), "4g": (4, 4), "7g": (8, 7)}
MIG_LAYOUTS = (("7g",), ("4g", "3g"), ("3g", "2g", "1g", "1g"), ("2g", "2g", "2g"), ("1g",) * 7)


class Plan(NamedTuple):
    """The result of a plan: GPUs and hosts with their engines, and the memory that each model needs.

    Args:
        changes: the changes to the file with which the fleet fits. No changes mean that the file fits as it is.
        sleeping: the models that take turns.
        other_changes: alternative changes with which the fleet fits too. They either keep the file's concurrency and
            contexts, or make them smaller so that fewer models take turns.
        is_cut: whether the search ran out of time. Fewer changes may then be enough.
    """

    gpus: tuple[FilledGpu, ...]
    needs: dict[str, PlannedEngine]
    sleeping: tuple[str, ...]
    contexts: ContextMemory
    hosts: tuple[Host, ...]
    changes: tuple[str, ...] = ()
    other_changes: tuple[str, ...] = ()
    is_cut: bool = False

    def replicas(self, model: str) -> tuple[tuple[int, ...], ...]:
        """Return the GPU numbers of each replica of a model. A replica on the CPU has an empty tuple."""
        placed: dict[int, list[int]] = {}
        for gpu in self.gpus:
            for engine in gpu.engines:
                if engine.model == model:
                    placed.setdefault(engine.replica, []).append(gpu.number)
        return tuple(tuple(sorted(placed[replica])) for replica in sorted(placed))

    def nodes(self, model: str) -> tuple[str, ...]:
        """Return the node of each replica of a model.

        The node is "" for this machine. An upstream model has no nodes.
        """
        found = {engine.replica: gpu.node for gpu in self.gpus for engine in gpu.engines if engine.model == model}
        found |= {each.replica: host.node for host in self.hosts for each in host.engines if each.model == model}
        return tuple(found[replica] for replica in sorted(found))


def plan_fleet(
    spec: FleetSpec,
    gpu_bytes: Sequence[int],
    *,
    contexts: ContextMemory = ASSUMED,
    host_bytes: int | Mapping[str, int] | None = None,
    gpu_nodes: Sequence[str] | None = None,
    in_turns: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple,
    kept: Kept | None = None,
    excluded_nodes: Mapping[str, frozenset[str]] | None = None,
) -> tuple[Plan | None, Plan | None]:
    """Return the plan of the file as it is, or else the nearest plan that fits.

    Returns (plan, None) if the file fits as it is, (None, nearest plan) if a changed fleet fits, and (None, None) if
    none fits. Models at a URL take no memory here. Raises ConfigError if the memory of a model cannot be computed, and
    for tensor parallelism over several nodes.

    Args:
        spec: the contents of the file.
        gpu_bytes: bytes of each GPU, 0 for a GPU that is gone.
        contexts: memory of CUDA contexts.
        host_bytes: bytes of host memory for models on the CPU, in a cluster by node. None is no limit.
        gpu_nodes: the node of each GPU of a cluster.
        in_turns: returns which of the sleepable models take turns. By default all do.
        kept: engines that stay where they are.
        excluded_nodes: nodes that cannot load a model, by model.
    """
    read_fleet_sizes(spec)
    gpus = empty_gpus(spec, gpu_bytes, contexts, gpu_nodes)
    by_node = host_bytes if isinstance(host_bytes, Mapping) else {"": host_bytes}
    hosts = [Host(node, total) for node, total in by_node.items()]
    known: dict[str, PlannedEngine] = {}

    def try_plan(changed: FleetSpec) -> Plan | None:
        return _try(changed, gpus, contexts, hosts, known, kept or {}, excluded_nodes or {}, in_turns=in_turns)

    if (plan := try_plan(spec)) is not None:
        return plan, None
    found, other_changes = nearest(spec, try_plan, known)
    if found is None:
        return None, None
    return None, found.plan._replace(changes=found.changes, other_changes=other_changes, is_cut=found.is_cut)


def empty_gpus(
    spec: FleetSpec, gpu_bytes: Sequence[int], contexts: ContextMemory, gpu_nodes: Sequence[str] | None = None
) -> list[FilledGpu]:
    """Return the GPUs that a fleet may use, within the fleet's limits. GPUs that are gone are left out."""
    numbers = [gpu.id for gpu in spec.gpus][: len(gpu_bytes)] or list(range(len(gpu_bytes)))
    limits = {gpu.id: gpu.memory for gpu in spec.gpus}
    nodes = dict.fromkeys(numbers, "") if gpu_nodes is None else dict(enumerate(gpu_nodes))
    return [
        FilledGpu(number, min(total, limits.get(number) or total), (), contexts.driver_bytes, nodes[number])
        for number, total in zip(numbers, gpu_bytes, strict=False)
        if total > 0
    ]


def _try(
    spec: FleetSpec,
    gpus: Sequence[FilledGpu],
    contexts: ContextMemory,
    hosts: Sequence[Host],
    known: dict[str, PlannedEngine],
    kept: Kept,
    excluded_nodes: Mapping[str, frozenset[str]],
    *,
    in_turns: Callable[[tuple[str, ...]], tuple[str, ...]],
) -> Plan | None:
    """Return the plan with all models awake. If it does not fit, return the plan in which sleepable models take turns.

    Returns None if neither plan fits. `known` has the memory of models that was computed before, and gets new models.
    """
    needs = fleet_needs(spec, known)
    sleepable = tuple(name for name, model in spec.models.items() if model.residency == "sleepable")
    for sleeping in dict.fromkeys(((), in_turns(sleepable))):
        engines = planned_engines(spec, needs, sleeping, contexts, excluded_nodes)
        to_place, beside, with_kept = keep(engines, gpus, hosts, kept)
        if sleeping == sleepable:  # what runs there does so: only others may lack room
            beside = [gpu._replace(total_bytes=max(gpu.total_bytes, gpu.used_bytes)) for gpu in beside]
        if any(gpu.used_bytes > gpu.total_bytes for gpu in beside):
            continue
        if (placed := place([each for each in to_place if each.gpus], beside)) is None:
            continue
        pinned: Counter[str] = Counter()  # by node
        for gpu in placed:
            for engine in gpu.engines:
                pinned[gpu.node] += pinned_bytes(spec, needs, engine.model) if engine.sleeps else 0
        with_pinned = [host._replace(pinned_bytes=pinned[host.node]) for host in with_kept]
        placed_hosts = place_on_hosts([each for each in to_place if not each.gpus], with_pinned)
        if placed_hosts is not None:
            return Plan(placed, needs, sleeping, contexts, placed_hosts)
    return None


def mig_layouts(plan: Plan, total_bytes: int) -> list[tuple[str, bool]]:
    """Return (layout, fits) for each MIG layout of a GPU of this size: whether the engines of a plan fit into it.

    An engine with several ranks fits no layout, because a process sees only one MIG device, without peer access and
    NCCL to another one.
    """
    by_replica = {(each.model, each.replica): each for gpu in plan.gpus for each in gpu.engines}
    engines = [engine._replace(only=(), sleeps=False) for engine in by_replica.values()]
    found = []
    for layout in MIG_LAYOUTS:
        slices = [
            FilledGpu(index, total_bytes * MIG_PROFILES[name][0] // 8, (), plan.contexts.driver_bytes)
            for index, name in enumerate(layout)
        ]
        is_alone = all(engine.gpus == 1 for engine in engines)
        found.append((" + ".join(layout), is_alone and place(engines, slices) is not None))
    return found


def with_plan(spec: FleetSpec, plan: Plan) -> FleetSpec:
    """Return the fleet with the budget and the GPUs that the plan gives to each model of Meltcore's own engines.

    A model's `device` then lists the GPUs of its first replica, followed by the GPUs of the other replicas.
    """
    spec = with_needs(spec, plan.needs)
    models = dict(spec.models)
    for name in plan.needs:
        if numbers := [number for replica in plan.replicas(name) for number in replica]:
            models[name] = msgspec.structs.replace(models[name], device=tuple(numbers))
    return msgspec.structs.replace(spec, models=models)


def with_needs(spec: FleetSpec, needs_by_name: Mapping[str, PlannedEngine]) -> FleetSpec:
    """Return the fleet with the memory that each model needs.

    Models with a context length and a concurrency get these from their needs too.
    """
    models = dict(spec.models)
    for name, needs in needs_by_name.items():
        model = models[name]
        changes: dict[str, object] = {"memory": Size(needs.budget_bytes)}
        if model.has_context and model.memory is None:
            changes |= {
                "max_model_len": needs.max_model_len,
                "max_num_seqs": needs.concurrency,
                "max_num_batched_tokens": needs.max_num_batched_tokens,
            }
        models[name] = msgspec.structs.replace(model, **changes)
    return msgspec.structs.replace(spec, models=models)


def describe_plan(
    spec: FleetSpec,
    plan: Plan | None,
    *,
    source: str,
    fits: bool,
    reason: str = "",
    others_bytes: Mapping[int, int] | None = None,
) -> FleetPlan:
    """Return the document of a plan. If no fleet fits, it has only the reason.

    Args:
        spec: the fleet.
        plan: the plan, or None if no fleet fits.
        source: name of the file.
        fits: whether the file fits as it is.
        reason: why there is no plan.
        others_bytes: bytes that other processes use of each GPU, by number.
    """
    if plan is None:
        return FleetPlan(
            source=source, fits=False, reason=reason, gpus=[], models=[], changes=[], mig=[], context_note=""
        )
    gpus = [
        PlannedGpu(
            number=gpu.number,
            total_bytes=gpu.total_bytes,
            used_bytes=gpu.used_bytes,
            parts=list(_parts(gpu)),
            node=gpu.node,
            others_bytes=(others_bytes or {}).get(gpu.number, 0),
        )
        for gpu in plan.gpus
    ]
    has_ranks = any(engine.gpus > 1 for gpu in plan.gpus for engine in gpu.engines)
    return FleetPlan(
        source=source,
        fits=fits,
        gpus=gpus,
        models=[_describe_model(spec, plan, name) for name in spec.models],
        changes=list(plan.changes),
        other_changes=list(plan.other_changes),
        mig=mig_layouts(plan, plan.gpus[0].total_bytes) if plan.gpus else [],
        context_note=f"{plan.contexts.note} {plan.contexts.nccl_note}" if has_ranks else plan.contexts.note,
        hosts=[
            PlannedHost(
                node=host.node,
                total_bytes=host.total_bytes,
                engine_bytes=host.engine_bytes,
                pinned_bytes=host.pinned_bytes,
            )
            for host in plan.hosts
        ],
    )


def _parts(gpu: FilledGpu) -> Iterator[PlannedPart]:
    yield PlannedPart(name="driver", size_bytes=gpu.driver_bytes)
    for engine in gpu.engines:
        if not engine.sleeps:
            yield PlannedPart(name=engine.model, size_bytes=engine.size_bytes)
    asleep = [engine for engine in gpu.engines if engine.sleeps]
    if asleep:
        names = " or ".join(dict.fromkeys(engine.model for engine in asleep))
        yield PlannedPart(
            name=names,
            size_bytes=awake_bytes(asleep) + sum(engine.resident_bytes for engine in asleep),
            note="take turns",
        )


def _describe_model(spec: FleetSpec, plan: Plan, name: str) -> PlannedModel:
    needs, model = plan.needs.get(name), spec.models[name]
    rows = needs.rows if needs else []
    # On the CPU the largest of them sets the memory, so two take turns even where the plan has space for both.
    on_cpu = [each for each, other in spec.models.items() if other.residency == "sleepable" and other.device == "cpu"]
    return PlannedModel(
        name=name,
        task=model.task,
        place=_place_text(plan, name),
        takes_turns=name in plan.sleeping or (name in on_cpu and len(on_cpu) > 1),
        max_model_len=needs.max_model_len if needs else None,
        concurrency=needs.concurrency if needs else None,
        budget_bytes=needs.budget_bytes if needs else int(model.memory or 0),
        parts=[PlannedPart(name=row.name, size_bytes=row.size_bytes, note=row.note) for row in rows],
        source=needs.source if needs else model.kind,
        max_num_seqs=model.max_num_seqs if needs and (model.max_num_seqs or 0) > needs.concurrency else None,
    )


def _place_text(plan: Plan, model: str) -> str:
    nodes = sorted(set(plan.nodes(model)))
    numbers: dict[str, list[int]] = {node: [] for node in nodes}
    for gpu in plan.gpus:
        if any(engine.model == model for engine in gpu.engines):
            numbers[gpu.node].append(gpu.number)
    gpu_texts = [f"GPU {', '.join(map(str, numbers[node]))}" if numbers[node] else "CPU" for node in nodes]
    return "; ".join(f"{node} {text}".strip() for node, text in zip(nodes, gpu_texts, strict=True)) or "another server"
