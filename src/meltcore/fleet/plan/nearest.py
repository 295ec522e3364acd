"""Finds the smallest changes with which a fleet fits: sleep, fewer sequences, shorter contexts, and the CPU.

The search begins with all changes. It then tries to undo one change after another, the most important first. A change
stays undone if the fleet still fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from meltcore.engine.memory.memory_needs import PlannedEngine
from meltcore.fleet.plan.needs import known_needs
from meltcore.protocol.fleet_plan import has_smaller_settings
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

SEARCH_LIMIT_S = 20.0  # for taking changes back: of fleets with hundreds of different models
_LEAST_CONTEXT = 2048  # tokens below which a plan does not shorten a context
_PRIORITIES = ("batch", "standard", "interactive")
# What counts most is first: what is taken back while the others are still changed.
_SIZES_FIRST = ("device", "max_model_len", "max_num_seqs", "residency")
_AWAKE_FIRST = ("device", "residency", "max_model_len", "max_num_seqs")
_P = TypeVar("_P")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes the value of each YAML alias in full, because models that shared a mapping may now differ."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


class Fitting(NamedTuple):
    """A changed fleet that fits, its plan, and the changes as lines `models.NAME.KEY: VALUE`.

    `is_cut` says that the search ran out of time. Fewer changes may then be enough.
    """

    spec: FleetSpec
    plan: Any
    changes: tuple[str, ...]
    is_cut: bool = False


def nearest(
    spec: FleetSpec, try_plan: Callable[[FleetSpec], _P | None], known: dict[str, PlannedEngine]
) -> tuple[Fitting, tuple[str, ...]] | tuple[None, tuple[()]]:
    """Return the nearest fleet that fits, and the changes of an alternative. Returns (None, ()) if no fleet fits.

    The nearest fleet keeps models on GPUs first, then contexts, then concurrency, then models awake. The alternative
    leaves contexts and concurrency unchanged. If the nearest fleet leaves them unchanged too, the alternative has
    smaller contexts and more models that stay awake. If the search runs out of time, there is no alternative.

    Args:
        spec: the fleet.
        try_plan: returns the plan of a fleet that fits, and None for any other fleet.
        known: the needs of engines that were computed before. New needs are added.
    """
    deadline_s = time.monotonic() + SEARCH_LIMIT_S
    found = _nearest(spec, try_plan, known, _SIZES_FIRST, deadline_s, may_shrink=True)
    if found is None:
        return None, ()
    if found.is_cut:
        return found, ()
    if has_smaller_settings(found.changes):
        other = _nearest(spec, try_plan, known, _SIZES_FIRST, deadline_s, may_shrink=False)
    else:
        other = _nearest(spec, try_plan, known, _AWAKE_FIRST, deadline_s, may_shrink=True)
    if other is not None and other.is_cut:
        other = None
    return found, other.changes if other is not None and other.changes != found.changes else ()


def apply_changes(fleet: dict[str, Any], changes: Sequence[str]) -> None:
    """Write lines `models.NAME.KEY: VALUE (was VALUE)` into the contents of a fleet.yaml."""
    for line in changes:
        path, _, value = line.partition(" (was ")[0].partition(": ")
        section, _, key = path.rpartition(".")
        parent, _, name = section.partition(".")  # a model's name may have dots
        target = fleet.setdefault(parent, {}) if name else fleet
        target[name or parent] = {**(target.get(name or parent) or {}), key: yaml.safe_load(value)}


def changed_text(text: str, changes: Sequence[str]) -> str:
    """Return the text of a fleet.yaml with changes. A comment lists the changes; the comments of the file are lost."""
    fleet = yaml.safe_load(text)
    apply_changes(fleet, changes)
    head = "".join(f"# changed by `meltcore plan --write`: {line}\n" for line in changes)
    return head + str(yaml.dump(fleet, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _nearest(
    spec: FleetSpec,
    try_plan: Callable[[FleetSpec], _P | None],
    known: dict[str, PlannedEngine],
    order: Sequence[str],
    deadline_s: float,
    *,
    may_shrink: bool,
) -> Fitting | None:
    """Return the fleet that fits with the fewest changes, or None if no fleet fits.

    Changes are undone field by field in the order `order`. After `deadline_s` no more changes are undone. With
    `may_shrink`, concurrency and contexts may be changed too.
    """
    steps = reversed(
        list(_steps(spec, known, may_shrink))
    )  # all changes; where the host has too little for them, fewer
    found = next(((each, plan) for each in steps if (plan := try_plan(each)) is not None), None)
    if found is None:
        return None
    changed, plan = found
    is_cut = False

    def timed_plan(candidate: FleetSpec) -> _P | None:
        nonlocal is_cut
        is_cut = is_cut or time.monotonic() > deadline_s
        return None if is_cut else try_plan(candidate)

    for each in _restored(spec, changed, timed_plan, order):
        changed, plan = each
    return Fitting(changed, plan, tuple(_differences(spec, changed)), is_cut)


def _steps(spec: FleetSpec, known: dict[str, PlannedEngine], may_shrink: bool) -> Iterator[FleetSpec]:
    """Yield fleets that need less and less memory. Concurrency is lowered first, then contexts.

    After that models sleep, and last they move to the CPU.
    """
    models = dict(spec.models)
    engines = [name for name, model in models.items() if model.kind == "engine" and model.memory is None]
    by_priority = sorted(engines, key=lambda name: _PRIORITIES.index(models[name].priority))
    with_context = [name for name in by_priority if models[name].has_context]

    def change(name: str, **fields: object) -> FleetSpec:
        models[name] = msgspec.structs.replace(models[name], **fields)
        return msgspec.structs.replace(spec, models=dict(models))

    for _ in range(3 if may_shrink else 0):  # to an eighth of the sequences, in turns
        for name in by_priority:
            seqs = known_needs(known, name, models[name]).concurrency
            if seqs > 1:
                yield change(name, max_num_seqs=max(1, seqs // 2))
    while may_shrink:  # the longest contexts first
        lengths = {
            name: models[name].max_model_len or known_needs(known, name, models[name]).max_model_len or 0
            for name in with_context
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
    small_first = sorted(by_priority, key=lambda name: models[name].has_context)  # those are slow on a CPU
    for name in small_first:
        if models[name].tensor_parallel_size == 1:
            yield change(name, device="cpu", residency="always_on")


def _restored(
    original: FleetSpec, changed: FleetSpec, try_plan: Callable[[FleetSpec], _P | None], order: Sequence[str]
) -> Iterator[tuple[FleetSpec, _P]]:
    """Undo one change after another, beginning with the models of urgent classes.

    Yield each fleet that fits, with its plan. Within a priority class language models come last, since one of them
    often takes as much memory as all others. A field is restored for several models together if that fits, because each
    plan of a large cluster takes long.
    """

    def fits(**fields: Any) -> Iterator[tuple[FleetSpec, _P]]:
        nonlocal changed
        candidate = msgspec.structs.replace(changed, **fields)
        if candidate != changed and (plan := try_plan(candidate)) is not None:
            changed = candidate
            yield candidate, plan

    def restored(field: str, names: Sequence[str]) -> Iterator[tuple[FleetSpec, _P]]:
        """Restore the old value of a field for all models if the fleet then fits.

        Otherwise try each half of the models. For a single model, a value between the old and the changed one is tried
        too.
        """
        values = {name: _between(original.models[name], changed.models[name], field) for name in names}
        as_it_was = {name: found[0] for name, found in values.items()}
        for models in [as_it_was] if len(names) > 1 else [{names[0]: value} for value in values[names[0]]]:
            if found := list(fits(models={**changed.models, **models})):
                yield from found
                return
        if len(names) > 1:
            for part in (names[: len(names) // 2], names[len(names) // 2 :]):
                yield from restored(field, part)

    def rank(name: str) -> tuple[int, bool]:
        model = original.models[name]
        return -_PRIORITIES.index(model.priority), model.has_context

    names = sorted(original.models, key=rank)
    for field in order:
        if differing := [name for name in names if _between(original.models[name], changed.models[name], field)]:
            yield from restored(field, differing)
    yield from fits(residency=original.residency)


def _between(before: ModelSection, after: ModelSection, field: str) -> list[ModelSection]:
    """Return variants of the changed model: with the old value of a field, then with smaller changes of this value.

    The smallest change comes first. The list is empty if the field was not changed.
    """
    old, new = getattr(before, field), getattr(after, field)
    if old == new:
        return []
    if field == "device":  # in its turn first, and all the time where room is left after other changes
        return [msgspec.structs.replace(after, device=old, residency="sleepable")]
    values = [old]
    while isinstance(old, int) and (old := old // 2) > new:
        values.append(old)
    return [msgspec.structs.replace(after, **{field: value}) for value in values]


def _differences(original: FleetSpec, changed: FleetSpec) -> Iterator[str]:
    if changed.residency.keep != original.residency.keep:
        yield f"residency.keep: {changed.residency.keep} (was {original.residency.keep})"
    for name, before in original.models.items():
        for field in ("max_num_seqs", "max_model_len", "residency", "device"):
            old, new = getattr(before, field), getattr(changed.models[name], field)
            if old != new:
                yield f"models.{name}.{field}: {new}" + ("" if old is None else f" (was {old})")
