"""The result of `meltcore load --fleet`: levels per model and mixed, interference, and the health of each model."""

from __future__ import annotations

from typing import Any

import msgspec

from meltcore.measure.documents.schema import CheckResult, FleetLevel, RunEnvelope, StreamLoad


class ModelUnderLoad(msgspec.Struct, kw_only=True):
    """One model of the fleet: its name, its task, its workload, and facts of /v1/models such as `weights`."""

    name: str
    task: str
    workload: str
    share: float  # of the connections of a mixed level, 0 to 1
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Interference(msgspec.Struct, kw_only=True):
    """One pair of the matrix: the victim alone, and beside an aggressor."""

    victim: str
    aggressor: str
    alone: StreamLoad
    beside: StreamLoad
    aggressor_load: StreamLoad


class FleetExperiment(msgspec.Struct, kw_only=True):
    """A named experiment: each stream alone, then all streams together, and the limits of the change as gates."""

    name: str
    send_s: float
    alone: list[StreamLoad]
    together: list[StreamLoad]
    gates: list[CheckResult]


class FleetLoad(RunEnvelope, kw_only=True, tag_field="document", tag="fleet-load"):
    """One run of `meltcore load --fleet`: the contents of its `result.json`.

    `health` has one line per model and one line for the fleet. `gpu_note` says how the GPUs were measured, or why not.
    """

    models: list[ModelUnderLoad]
    levels: list[FleetLevel] = msgspec.field(default_factory=list)
    interference: list[Interference] = msgspec.field(default_factory=list)
    experiment: FleetExperiment | None = None
    health: list[CheckResult] = msgspec.field(default_factory=list)
    gpu_note: str = ""
