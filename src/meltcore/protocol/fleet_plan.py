"""Describes the plan of a fleet as a document for the console and the page: GPUs, models and memory in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class PlannedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a memory budget: its purpose, its bytes, and a note."""

    name: str
    size_bytes: int
    note: str = ""


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a plan: its place, its context and concurrency, and the parts of its engine's memory budget.

    Args:
        place: "GPU 0", "CPU" or "another server". In a cluster the node's name comes first.
        budget_bytes: Budget of one engine on each of its GPUs, or 0 for another server.
        max_num_seqs: The concurrency in fleet.yaml, if a step is full with fewer sequences.
    """

    name: str
    task: str
    place: str
    takes_turns: bool
    max_model_len: int | None
    concurrency: int | None
    budget_bytes: int
    parts: list[PlannedPart]
    source: str
    max_num_seqs: int | None = None


class PlannedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and the bytes that each model takes on it, including CUDA contexts.

    Of the models that take turns, only the largest counts. The fleet may use `total_bytes`, which exclude the
    `others_bytes` of other processes.
    """

    number: int
    total_bytes: int
    used_bytes: int
    parts: list[PlannedPart]
    node: str = ""  # of a cluster
    others_bytes: int = 0


class PlannedHost(msgspec.Struct, frozen=True, kw_only=True):
    """The host memory of one machine: for engines on its CPU, and for the pinned weights of sleeping models.

    `total_bytes` is the memory for both, or None if it is not known.
    """

    node: str = ""
    total_bytes: int | None
    engine_bytes: int
    pinned_bytes: int


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a fleet, or the reason why there is none.

    Args:
        fits: True if the fleet fits as fleet.yaml describes it.
        changes: The changes to fleet.yaml that this plan makes, because only the nearest plan with changes fits.
        reason: What the fleet needs and which memory exists, if nothing fits. Such a plan has no GPUs and models.
        other_changes: Other changes that are sufficient too: with unchanged concurrency and context, or with
            smaller ones.
        mig: Each layout of MIG slices of the first GPU, and whether the engines fit into it.
        context_note: What is known about the memory of CUDA contexts and of the driver.
        left_out: The models that are not in this plan, because their sizes are unknown, each with the reason.
    """

    source: str
    fits: bool
    reason: str = ""
    gpus: list[PlannedGpu]
    models: list[PlannedModel]
    changes: list[str]
    other_changes: list[str] = []
    mig: list[tuple[str, bool]]
    context_note: str
    hosts: list[PlannedHost] = []
    left_out: dict[str, str] = {}


def has_smaller_settings(changes: Sequence[str]) -> bool:
    """Return whether the lines `models.NAME.KEY: VALUE` change concurrency or context of any model."""
    keys = [line.partition(": ")[0].rpartition(".")[2] for line in changes]
    return "max_num_seqs" in keys or "max_model_len" in keys


def other_changes_text(changes: Sequence[str]) -> str:
    """Return a text that says what the other changes of a plan would achieve."""
    if has_smaller_settings(changes):
        return "with smaller settings, and fewer models that take turns"
    return "with context and concurrency as they are"
