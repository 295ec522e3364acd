"""A whole run of `meltcore load`: the levels, and the RunResult that stands for them in the run folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import uvloop

from meltcore.load.config import LoadConfig
from meltcore.load.connection import resolve_target
from meltcore.load.probe import first_model, served_facts
from meltcore.load.runner import OnProgress, run_levels
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.schema import LevelResult, RunResult, Verdict
from meltcore.results.served import model_notes

# The gravest first: a run is as bad as its worst level.
_GRAVITY: tuple[Verdict, ...] = ("SERVER_DIED", "PARTIAL", "FAILED", "CLIENT_BOUND", "OK")


def measure(config: LoadConfig, arguments: Sequence[str], on_progress: OnProgress | None = None) -> RunResult:
    """Run `config` and sum it up; `arguments` is the command line to be kept. Raises ConfigError as `run_levels`."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    begun_s = time.monotonic()
    facts = uvloop.run(_served_facts(config))
    levels = run_levels(config, on_progress)
    verdict = overall_verdict(levels)
    return RunResult(
        command="load",
        status="partial" if verdict in ("PARTIAL", "SERVER_DIED") else "complete",
        started=started,
        duration_s=time.monotonic() - begun_s,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=settings(config) | facts,
        levels=levels,
        verdict=verdict,
        notes=[
            *model_notes(facts),
            "The client's event-loop lag and CPU share are taken after the release burst of a level, up to its end.",
            *(reason for level in levels if level.verdict == "OK" for reason in level.reasons),
        ],
    )


async def _served_facts(config: LoadConfig) -> dict[str, Any]:
    target = resolve_target(config.url, config.api_key)
    return await served_facts(target, config.model or await first_model(target))


def overall_verdict(levels: Sequence[LevelResult]) -> Verdict:
    """The gravest verdict among `levels`; PARTIAL where there is none."""
    return gravest(level.verdict for level in levels)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """PARTIAL where there is none."""
    return min(verdicts, key=_GRAVITY.index, default="PARTIAL")


def settings(config: LoadConfig) -> dict[str, Any]:
    """What the run was told, fit to publish: no key, no path of this machine."""
    hidden = {"api_key", "records_path", "tokenizer", "url"}
    told = {key: value for key, value in dataclasses.asdict(config).items() if key not in hidden}
    return {**told, "workload": config.workload.rpartition("/")[2]}
