"""Measures what the steps of a model cost, from the server's metrics while the model has the GPU to itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from meltcore.common.files import read_document
from meltcore.measure.documents.schema import StreamLoad, VersionedDocument
from meltcore.measure.documents.step_costs import UNLIMITED, GpuStepCosts, Points, StepCosts
from meltcore.measure.load.fleet.simulation import Job
from meltcore.measure.load.wire.connection import HttpRequestError, Target, get
from meltcore.measure.load.wire.probe import PROBE_TIMEOUT_S
from meltcore.protocol.step_sums import STEP_KINDS, StepKind, StepSums, total_steps

# Fewer steps of a kind tell little of their cost, unless the kind is the only one.
MIN_STEPS = 5
# What the server counted of a model alone may differ by this share from what this client sent and got.
MAX_COUNT_ERROR = 0.05
_KINDS = {(kind.phase, str(kind.size)): kind for kind in STEP_KINDS}
_LINE = re.compile(
    r"^meltcore:engine_(steps|step_seconds|step_rows|step_prompt_tokens)_total"
    r'\{model_name="((?:[^"\\]|\\.)*)",phase="(\w+)",size="(\d+)"\} (\S+)$',
    re.MULTILINE,
)
_COUNTER = re.compile(
    r"^meltcore:(requests_accepted|prompt_tokens|generation_tokens)_total"
    r'\{model_name="((?:[^"\\]|\\.)*)"\} (\S+)$',
    re.MULTILINE,
)
_NAMES = ("steps", "step_seconds", "step_rows", "step_prompt_tokens")  # as the fields of StepSums
SumsByKind = Mapping[StepKind, StepSums]


@dataclass
class ModelCounters:
    """What a server has counted of one model: its steps by kind, and its requests and tokens.

    A request of several sentences counts as many, also where one text has them. A server without these counters has no
    requests.
    """

    steps: dict[StepKind, StepSums] = field(default_factory=dict)
    requests_accepted: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0


class StepCostsFile(VersionedDocument, kw_only=True, tag_field="document", tag="step-costs"):
    """The step costs that runs have measured, by the type of their GPU as the server names it."""

    gpus: dict[str, GpuStepCosts] = msgspec.field(default_factory=dict)


@dataclass
class AloneSteps:
    """The steps of a model while it was alone, by kind, and what its clients sent meanwhile."""

    sums: dict[StepKind, StepSums] = field(default_factory=dict)
    row_tokens: int = 0  # output tokens of all rows; a row without any counts as one
    units: float = 0.0

    def add(self, sums: SumsByKind, jobs: Sequence[Job]) -> None:
        """Add the steps of one level and the requests that its clients have sent."""
        for kind, each in sums.items():
            self.sums[kind] = StepSums(*np.add(each, self.sums.get(kind, StepSums())).tolist())
        self.row_tokens += sum(job.rows * job.steps for job in jobs)
        self.units += sum(job.units for job in jobs)


def parse_counters(text: str) -> dict[str, ModelCounters]:
    """Return the counters of a Prometheus page by model. Kinds of steps of other servers are ignored."""
    found: dict[str, dict[StepKind, dict[str, float]]] = {}
    for name, model, phase, size, value in _LINE.findall(text):
        kind = _KINDS.get((phase, size))
        if kind is not None:
            by_kind = found.setdefault(re.sub(r"\\(.)", r"\1", model), {})
            by_kind.setdefault(kind, {})[name] = float(value)
    counters = {
        model: ModelCounters({kind: StepSums(*(sums.get(name, 0.0) for name in _NAMES)) for kind, sums in each.items()})
        for model, each in found.items()
    }
    for name, model, value in _COUNTER.findall(text):
        setattr(counters.setdefault(re.sub(r"\\(.)", r"\1", model), ModelCounters()), name, float(value))
    return counters


async def read_counters(target: Target) -> dict[str, ModelCounters]:
    """Return the counters of a server by model. A server without these metrics gives none."""
    try:
        status, body = await get(target, "/metrics", PROBE_TIMEOUT_S)
    except HttpRequestError:
        return {}  # the requests themselves show whether the server is alive
    return parse_counters(body.decode("utf-8", "replace")) if status == 200 else {}


def counted_between(earlier: ModelCounters, later: ModelCounters) -> ModelCounters | None:
    """Return what a server counted of a model between two readings, without kinds of steps that had none.

    Return None if a counter fell, as after the restart of an engine.
    """
    names = ("requests_accepted", "prompt_tokens", "generation_tokens")
    values = [getattr(later, name) - getattr(earlier, name) for name in names]
    steps = {
        kind: StepSums(*np.subtract(later.steps.get(kind, StepSums()), earlier.steps.get(kind, StepSums())).tolist())
        for kind in {**earlier.steps, **later.steps}
    }
    if min(itertools.chain(values, *steps.values())) < 0:
        return None
    return ModelCounters({kind: each for kind, each in steps.items() if each.steps > 0}, *values)


def alone_error(load: StreamLoad, jobs: Sequence[Job], counted: Mapping[str, ModelCounters | None]) -> str:
    """Say why a level of one model gives no step costs, or return an empty text.

    The server's steps are divided by what this client got, so both must be the same work. `counted` is what the server
    counted of each model during the level, and None where a counter fell.
    """
    level, own = load.level, counted.get(load.model, ModelCounters())
    if level.failed:
        return f"{level.failed:,} of {level.requests:,} requests failed"
    if own is None:
        return "a counter of the server fell, so an engine has restarted"
    others_s = {name: total_steps(each.steps).seconds for name, each in counted.items() if each and name != load.model}
    busiest = max(others_s, key=others_s.__getitem__, default="")
    if busiest and others_s[busiest] > MAX_COUNT_ERROR * total_steps(own.steps).seconds:
        return f"{busiest} ran steps of {others_s[busiest]:.2g} s meanwhile"
    pairs = [("requests", sum(job.rows for job in jobs), own.requests_accepted)]
    if level.task is None:
        pairs.append(("prompt tokens", level.prompt_tokens, own.prompt_tokens))
        pairs.append(("output tokens", level.output_tokens, own.generation_tokens))
    for name, expected, found in pairs:
        if abs(found - expected) > MAX_COUNT_ERROR * expected:
            texts = "" if level.task is None else ", or texts had several sentences"
            return f"the server counted {found:,.0f} {name}, and this client {expected:,.0f}: others sent some{texts}"
    return ""


def fit_step_costs(alone: AloneSteps) -> StepCosts | None:
    """Return the costs of a model's steps, or None if it had none.

    A decode step costs the mean of its kind. What a step with prompts costs more than the decode step of its rows is
    the cost of its units. Raises ValueError if the sums contradict each other.
    """
    if not alone.sums:
        return None
    total = total_steps(alone.sums)
    tokens_per_unit = total.prompt_tokens / alone.units if alone.units and total.prompt_tokens else 1.0
    decode = _means({kind: sums for kind, sums in alone.sums.items() if kind.phase == "decode"})
    costs = StepCosts(decode_s=[(mean.rows, mean.seconds) for mean in decode])
    prompt_s: Points = []
    prompt = {kind: sums for kind, sums in alone.sums.items() if kind.phase == "prompt"}
    for mean in _means(prompt):
        units, added_s = mean.prompt_tokens / tokens_per_unit, max(0.0, mean.seconds - costs.step_s(mean.rows, 0.0))
        # A step of a new shape may take longer by far. An ideal scheduler would take its units in several steps.
        added_s = min([added_s, *(smaller_s * units / smaller for smaller, smaller_s in prompt_s[-1:])])
        prompt_s.append((units, added_s))
    return StepCosts(
        decode_s=costs.decode_s,
        prompt_s=prompt_s,
        # At most twice the largest kind that was seen: costs of larger steps are unknown.
        max_units=2 * max(kind.size for kind in prompt) / tokens_per_unit if prompt else UNLIMITED,
        row_steps=total.rows / max(1, alone.row_tokens),
    )


def _means(sums: SumsByKind) -> list[StepSums]:
    """Return the mean step of each kind that had enough steps, by ascending size."""
    kept = {kind: each for kind, each in sums.items() if each.steps >= MIN_STEPS} or sums
    return [StepSums(*(value / each.steps for value in each)) for _, each in sorted(kept.items())]


def merge_step_costs(known: StepCosts | None, measured: StepCosts) -> StepCosts:
    """Return the measured costs, with the known ones of batch sizes that were not measured now."""
    if known is None:
        return measured
    measured = msgspec.structs.replace(
        measured,
        weight_bytes=known.weight_bytes,
        context_bytes=known.context_bytes,
        unit_flops=known.unit_flops,
    )
    if not known.is_measured:  # its bytes and operations alone
        return measured
    return msgspec.structs.replace(
        measured,
        decode_s=_merge_points(known.decode_s, measured.decode_s),
        prompt_s=_merge_points(known.prompt_s, measured.prompt_s),
        max_units=measured.max_units if known.max_units == UNLIMITED else max(measured.max_units, known.max_units),
    )


def _merge_points(known: Points, measured: Points) -> Points:
    """Return the measured points, and the known ones of other powers of two."""
    sizes = {int(np.log2(max(1.0, size))) for size, _ in measured}
    return sorted([*(each for each in known if int(np.log2(max(1.0, each[0]))) not in sizes), *measured])


def read_step_costs(path: Path) -> StepCostsFile:
    """Return the content of a file of step costs. A missing file has none. Raises ConfigError for another content."""
    return read_document(path, StepCostsFile) if path.exists() else StepCostsFile()
