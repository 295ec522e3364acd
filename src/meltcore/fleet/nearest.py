"""Finds the changes with which a fleet fits: fewer sequences, shorter contexts, sleep and the CPU, none in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from meltcore.fleet.needs import named_needs
from meltcore.protocol.fleet_spec import FleetSpec, ModelSection

_LEAST_CONTEXT = 2048  # tokens below which a plan does not shorten a context
_PRIORITIES = ("batch", "standard", "interactive")
_SIZES = (".max_num_seqs", ".max_model_len")
_P = TypeVar("_P")


class Fitting(NamedTuple):
    """A changed fleet, its plan, and the changes as lines `models.NAME.KEY: VALUE`."""

    spec: FleetSpec
    plan: Any
    changes: tuple[str, ...]

    @property
    def shrinks(self) -> bool:
        """Whether concurrency or contexts are changed."""
        return any(field in line.partition(":")[0] for line in self.changes for field in _SIZES)


def nearest(spec: FleetSpec, try_plan: Callable[[FleetSpec], _P | None], *, may_shrink: bool) -> Fitting | None:
    """Return the first fleet in the order of changes that fits, less the changes that it does not need; None for none.

    try_plan: returns the plan of a fleet that fits, else None. may_shrink: concurrency and contexts may be changed too.
    """
    steps = _steps(spec, may_shrink)
    found = next(((each, plan) for each in steps if (plan := try_plan(each)) is not None), None)
    if found is None:
        return None
    changed, plan = found
    for each in _restored(spec, changed, try_plan):
        changed, plan = each
    return Fitting(changed, plan, tuple(_differences(spec, changed)))


def _steps(spec: FleetSpec, may_shrink: bool) -> Iterator[FleetSpec]:
    """Yield fleets that need less and less memory: concurrency, context, sleep, then the CPU."""
    models = dict(spec.models)
    engines = [name for name, model in models.items() if model.kind == "engine" and model.memory is None]
    by_priority = sorted(engines, key=lambda name: _PRIORITIES.index(models[name].priority))
    generation = [name for name in by_priority if models[name].task == "generation"]

    def change(name: str, **fields: object) -> FleetSpec:
        models[name] = msgspec.structs.replace(models[name], **fields)
        return msgspec.structs.replace(spec, models=dict(models))

    for _ in range(3 if may_shrink else 0):  # to an eighth of the sequences, in turns
        for name in by_priority:
            seqs = named_needs(name, models[name]).concurrency
            if seqs > 1:
                yield change(name, max_num_seqs=max(1, seqs // 2))
    while may_shrink:  # the longest contexts first
        lengths = {
            name: models[name].max_model_len or named_needs(name, models[name]).max_model_len or 0
            for name in generation
        }
        longest = max(lengths, key=lambda name: lengths[name], default=None)
        if longest is None or lengths[longest] <= _LEAST_CONTEXT:
            break
        yield change(longest, max_model_len=max(_LEAST_CONTEXT, lengths[longest] // 2))
    by_priority = [name for name in by_priority if models[name].device != "cpu"]
    for name in by_priority:
        if models[name].residency == "always_on":
            yield change(name, residency="sleepable")
    if spec.residency.keep == "host":  # the host may have too little for weights that sleep
        spec = msgspec.structs.replace(spec, residency=msgspec.structs.replace(spec.residency, keep="disk"))
        yield msgspec.structs.replace(spec, models=dict(models))
    small_first = sorted(by_priority, key=lambda name: models[name].task == "generation")  # those are slow on a CPU
    for name in small_first:
        if models[name].tensor_parallel_size == 1:
            yield change(name, device="cpu", residency="always_on")


def _restored(
    original: FleetSpec, changed: FleetSpec, try_plan: Callable[[FleetSpec], _P | None]
) -> Iterator[tuple[FleetSpec, _P]]:
    """Yield fleets that fit with one change after another taken back, those of urgent models first."""

    def fits(**fields: Any) -> Iterator[tuple[FleetSpec, _P]]:
        nonlocal changed
        candidate = msgspec.structs.replace(changed, **fields)
        if candidate != changed and (plan := try_plan(candidate)) is not None:
            changed = candidate
            yield candidate, plan

    names = sorted(original.models, key=lambda name: -_PRIORITIES.index(original.models[name].priority))
    for field in ("device", "max_model_len", "residency", "max_num_seqs"):
        for name in names:
            for value in _between(original.models[name], changed.models[name], field):
                yield from fits(models={**changed.models, name: value})
    yield from fits(residency=original.residency)


def _between(before: ModelSection, after: ModelSection, field: str) -> list[ModelSection]:
    """Return the model with one field as it was, then with values on the way there, the nearest to it last."""
    old, new = getattr(before, field), getattr(after, field)
    if old == new:
        return []
    if field == "device":  # in its turn first, and all the time where room is left after other changes
        return [msgspec.structs.replace(after, device=old, residency="sleepable")]
    values = [old]
    while isinstance(old, int) and (old := old // 2) > new:
        values.insert(0, old)
    return [msgspec.structs.replace(after, **{field: value}) for value in values]


def _differences(original: FleetSpec, changed: FleetSpec) -> Iterator[str]:
    if changed.residency.keep != original.residency.keep:
        yield f"residency.keep: {changed.residency.keep} (was {original.residency.keep})"
    for name, before in original.models.items():
        for field in ("max_num_seqs", "max_model_len", "residency", "device"):
            old, new = getattr(before, field), getattr(changed.models[name], field)
            if old != new:
                yield f"models.{name}.{field}: {new}" + ("" if old is None else f" (was {old})")
