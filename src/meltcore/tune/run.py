"""Puts what was tried and found into one result, and that into the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from meltcore.load.config import LoadConfig
from meltcore.load.run import settings
from meltcore.report.tune_page import render_tuning
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.runfolder import RunFolder, write_whole
from meltcore.results.tuning import TUNING_FILE, Fact, Tuning, TuningKind, TuningPoint
from meltcore.tune.attempt import Bench
from meltcore.tune.batching import WITHIN_LIMITS, best_and_knee

ONE_START = "One start a point: confirm a gain with `meltcore compare --run` before relying on it."
MONOTONE = "The search takes it that what is smaller than a value that works, works too."


def tuning(
    kind: TuningKind,
    bench: Bench,
    load: LoadConfig,
    points: Sequence[TuningPoint],
    finding: str,
    facts: Sequence[Fact] = (),
) -> Tuning:
    """The whole result. The knee is marked where there is a sweep."""
    best, knee = best_and_knee(points) if kind == "batching" else (None, None)
    notes = [MONOTONE if kind == "context" else ONE_START]
    if load.slo_ms:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in load.slo_ms.items())
        share = f"{100 * WITHIN_LIMITS:.0f} %"
        notes.append(f"Limits: {limits}; a point counts where {share} of its requests meet them all.")
    return Tuning(
        kind=kind,
        finding=finding,
        command=bench.command.published,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=take_fingerprint(bench.arguments, load.seed),
        load={} if kind == "context" else settings(load),  # the search has loads of its own, one a try
        limits_ms=dict(load.slo_ms),
        points=list(points),
        best=best,
        knee=knee,
        facts=list(facts),
        notes=notes,
    )


def save_tuning(folder: RunFolder, found: Tuning) -> None:
    """As JSON and as a page."""
    write_whole(folder.path / TUNING_FILE, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    folder.write_report(render_tuning(found))
