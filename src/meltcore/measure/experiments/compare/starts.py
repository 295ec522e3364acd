"""Series of fresh starts. Each starts a server, loads it and ends it; two servers alternate on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.process import ProcessError
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.starts import StartSet
from meltcore.measure.documents.verdicts import SCORED
from meltcore.measure.experiments.servers.command import ServerCommand
from meltcore.measure.experiments.servers.process import START_LIMIT_S, run_server, server_version
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.run import measure


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The load of each start, and the time limit until the server is ready.

    `load` lacks the address, which each start fills in. `arguments` is the command line that results store.
    """

    load: LoadConfig
    arguments: tuple[str, ...] = ()
    start_limit_s: float = START_LIMIT_S


@dataclass(frozen=True)
class PlannedStart:
    """A planned start. Its result becomes start `number`, counted from 1, of the set `set_name`."""

    set_name: str
    command: ServerCommand
    number: int


OnStart = Callable[[PlannedStart, RunResult], None]


def interleave(commands: dict[str, ServerCommand], starts: int) -> list[PlannedStart]:
    """Plan `starts` of each command in mirrored order, A B B A A B ..., which cancels a steady drift of the machine."""
    if starts < 1:
        raise ConfigError(f"starts must be at least 1; got {starts}")
    names = list(commands)
    return [
        PlannedStart(name, commands[name], index + 1)
        for index in range(starts)
        for name in (names if index % 2 == 0 else names[::-1])
    ]


def run_starts(
    planned_starts: Sequence[PlannedStart],
    options: StartOptions,
    folder: Path,
    *,
    report: Callable[[str], None],
    on_start: OnStart | None = None,
    on_set: Callable[[StartSet], None] | None = None,
) -> dict[str, StartSet]:
    """Run all starts and return the sets by name. Server logs go to `folder`, lines for the user to `report`.

    `on_set` receives a set each time it grows, so that an interruption loses no measured start. Raises MeltcoreError
    if a start fails: a set with a missing start would be judged as if it were complete.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    sets: dict[str, StartSet] = {}
    for start in planned_starts:
        result = run_start(start, options, folder, report=report)
        new_set = StartSet(
            name=start.set_name, command=start.command.redacted, taken=started_at, load=options.load.settings, starts=[]
        )
        start_set = sets.setdefault(start.set_name, new_set)
        start_set.starts.append(result)
        if on_set is not None:
            on_set(start_set)
        if on_start is not None:
            on_start(start, result)
    return sets


def run_start(start: PlannedStart, options: StartOptions, folder: Path, *, report: Callable[[str], None]) -> RunResult:
    """Start, load and end one server. Raises MeltcoreError if the load was not measured to its end."""
    label = f"start {start.number} of {start.set_name}"
    log_path = folder / f"server-{start.set_name}-{start.number}.log"
    try:
        with run_server(start.command, log_path, report=report, limit_s=options.start_limit_s) as server:
            result = measure(replace(options.load, url=server.url), options.arguments)
            result.settings["ready_s"] = round(server.ready_s, 3)
            version = server_version(server.url)
            if version is not None:
                result.settings["server_version"] = version
    except ProcessError as error:
        raise ProcessError(f"{label}: {str(error).rstrip()}") from error
    if result.verdict == "PARTIAL":
        raise KeyboardInterrupt  # the load generator handled the Ctrl-C to end its level in order
    if result.verdict not in SCORED:  # partial or failed: no observation
        reasons = [*result.reasons, *(reason for level in result.levels for reason in level.reasons)]
        reason = "; ".join(dict.fromkeys(reasons)) or "requests failed"
        raise MeltcoreError(f"{label} ended {result.verdict}: {reason}; its log: {log_path}")
    return result
