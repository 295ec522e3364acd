"""Series of fresh starts: each starts a server, loads it and ends it. Two servers take turns on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.evals.server_process import ServerError
from meltcore.load.config import LoadConfig
from meltcore.load.run import measure, settings
from meltcore.results.schema import RunResult
from meltcore.results.starts import StartSet
from meltcore.trials.command import ServerCommand
from meltcore.trials.server import START_LIMIT_S, served_version, started

_USABLE = ("OK", "CLIENT_BOUND")  # what is left is partial or failed, and no observation


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every start is loaded (`load`, whose address is filled in) and how long it may take to become ready."""

    load: LoadConfig
    arguments: tuple[str, ...] = ()
    start_limit_s: float = START_LIMIT_S


@dataclass(frozen=True)
class Turn:
    """One start to come. `set_name`: the set it belongs to; its place in that set counts from 1."""

    set_name: str
    command: ServerCommand
    place: int


OnTurn = Callable[[Turn, RunResult], None]


def turns(commands: dict[str, ServerCommand], starts: int) -> list[Turn]:
    """`starts` of each, in turns that mirror each other: A B, B A, A B ... A drift of the machine cancels out."""
    if starts < 1:
        raise ConfigError(f"starts must be at least 1; got {starts}")
    names = list(commands)
    return [
        Turn(name, commands[name], place + 1)
        for place in range(starts)
        for name in (names if place % 2 == 0 else names[::-1])
    ]


def run_turns(
    planned: Sequence[Turn],
    plan: Plan,
    folder: Path,
    *,
    say: Callable[[str], None],
    on_turn: OnTurn | None = None,
    on_set: Callable[[StartSet], None] | None = None,
) -> dict[str, StartSet]:
    """Run every turn; the sets by name, each start's server log in `folder`.

    `on_set` is given a turn's set as it grows, so that an interruption costs no start that was measured.

    Raises MeltcoreError where a start fails: a set with a hole in it would be judged as if it were whole.
    """
    taken = datetime.now(UTC).isoformat(timespec="seconds")
    sets: dict[str, StartSet] = {}
    for turn in planned:
        result = run_turn(turn, plan, folder, say=say)
        kept = sets.setdefault(
            turn.set_name,
            StartSet(
                name=turn.set_name,
                command=turn.command.published,
                taken=taken,
                load=settings(plan.load),
                starts=[],
            ),
        )
        kept.starts.append(result)
        if on_set is not None:
            on_set(kept)
        if on_turn is not None:
            on_turn(turn, result)
    return sets


def run_turn(turn: Turn, plan: Plan, folder: Path, *, say: Callable[[str], None]) -> RunResult:
    """One start, loaded and ended. Raises MeltcoreError where it was not measured to the end."""
    log_path = folder / f"server-{turn.set_name}-{turn.place}.log"
    try:
        with started(turn.command, log_path, say=say, limit_s=plan.start_limit_s) as server:
            result = measure(replace(plan.load, url=server.url), plan.arguments)
            result.settings["ready_s"] = round(server.ready_s, 3)
            version = served_version(server.url)
            if version is not None:
                result.settings["server_version"] = version
    except ServerError as error:
        raise ServerError(f"start {turn.place} of {turn.set_name}: {str(error).rstrip()}") from error
    if result.verdict == "PARTIAL":
        raise KeyboardInterrupt  # the load generator took the Ctrl-C and ended its level in order
    if result.verdict not in _USABLE:
        reasons = [*result.reasons, *(reason for level in result.levels for reason in level.reasons)]
        why = "; ".join(dict.fromkeys(reasons)) or "requests failed"
        raise MeltcoreError(f"start {turn.place} of {turn.set_name} ended {result.verdict}: {why}; its log: {log_path}")
    return result
