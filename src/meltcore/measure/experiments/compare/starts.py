"""Runs fresh starts of servers, stores sets of starts as baselines, and compares two servers.

In one start, a server is started, loaded and ended. The starts of two servers alternate on one machine.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.files import write_atomic, write_document
from meltcore.common.process import ProcessError
from meltcore.measure.documents.comparison import (
    COMPARISON_FILE,
    ComparisonResult,
    Limits,
    StartSet,
    is_start_set,
    read_start_set,
    write_start_set,
)
from meltcore.measure.documents.runfolder import RunFolder, read_result
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.verdicts import SCORED
from meltcore.measure.experiments.servers import START_LIMIT_S, ServerCommand, run_server, server_version
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import measure
from meltcore.measure.report.comparisons.compare_starts import compare_starts, find_metric
from meltcore.measure.report.comparisons.comparison import comparison_markdown, comparison_page
from meltcore.measure.report.page.html import write_page

MIN_BASELINE_STARTS = 6
MIN_CONTROL_STARTS = 3  # fewer do not show the noise of A
CONTROL, OLD, NEW = "control", "A", "B"
MARKDOWN_FILE = "comparison.md"
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Load settings that a stored set repeats; addresses and keys are not stored.
_STORED_SETTINGS = ("concurrency", "request_rate", "arrivals", "num_prompts", "num_warmups", "workload", "max_tokens",
           "model", "seed", "processes", "stream", "continuous_usage", "temperature", "extra_body")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The load of each start, and the time limit until the server is ready.

    `load` has no address, because each start has an address of its own. `arguments` is the command line that results
    store.
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
    """Plan each command `starts` times, in the mirrored order A B B A A B ...

    The order cancels a steady drift of the machine.
    """
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
    on_start: OnStart = lambda _start, _result: None,
) -> dict[str, StartSet]:
    """Run all starts and return the sets by name. Server logs go to `folder`, lines for the user to `report`.

    A set is written to `folder` each time it grows, so that an interruption loses no measured start. Raises
    MeltcoreError if a start fails: a set with a missing start would be judged as if it were complete.
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
        write_start_set(folder / start.set_name, start_set)
        on_start(start, result)
    return sets


def run_start(start: PlannedStart, options: StartOptions, folder: Path, *, report: Callable[[str], None]) -> RunResult:
    """Start, load and end one server, and return the result of the load.

    Raises MeltcoreError if the load stopped early.
    """
    label = f"start {start.number} of {start.set_name}"
    log_path = folder / f"server-{start.set_name}-{start.number}.log"
    try:
        with run_server(start.command, log_path, report=report, limit_s=options.start_limit_s) as server:
            result = measure(replace(options.load, url=server.url), options.arguments)
            result.settings["ready_s"] = round(server.ready_s, 3)
            if (version := server_version(server.url)) is not None:
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


# --- sets that are kept


def baseline_folder(root: Path, name: str, *, replace: bool) -> Path:
    """Return the folder of a baseline to be saved. Raises ConfigError for a bad name, or an existing one."""
    if not _NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{name!r} is not a baseline name: use letters, digits, dot, dash and underscore")
    folder = root / name
    if is_start_set(folder) and not replace:
        raise ConfigError(f"baseline {name} exists already: add --replace to overwrite it")
    return folder


def save_baseline(folder: Path, start_set: StartSet, logs: Path) -> Path:
    """Write the set and the server logs of its starts to `folder`; return the path of the set."""
    path = write_start_set(folder, start_set)
    for old_log in folder.glob("server-*.log"):
        old_log.unlink()
    for log in sorted(logs.glob("server-*.log")):
        shutil.copyfile(log, folder / log.name)
    return path


def list_baselines(root: str) -> list[StartSet]:
    """Return the baselines in `root`, sorted by name. Returns an empty list if the folder does not exist."""
    folders = sorted(Path(root).iterdir()) if Path(root).is_dir() else []
    return [read_start_set(folder) for folder in folders if is_start_set(folder)]


def find_start_set(text: str, root: str) -> StartSet | None:
    """Return the set at the path `text`, or the baseline of this name in `root`. Returns None if neither exists."""
    return next((read_start_set(folder) for folder in (Path(text), Path(root, text)) if is_start_set(folder)), None)


def read_side(text: str, root: str) -> StartSet:
    """Return a set as `find_start_set` does. A single run becomes a set of one start, which gets no verdict."""
    start_set = find_start_set(text, root)
    if start_set is not None:
        return start_set
    result = read_result(text)
    return StartSet(name=Path(text).name, command="", taken=result.started, starts=[result])


def stored_load(load: dict[str, Any], *, workload: str | None = None) -> LoadConfig:
    """Return the load settings of a stored set, to apply the same load to another server.

    `workload` is the path of the workload file, since a set stores only the file's name.
    """
    stored_settings = {name: load[name] for name in _STORED_SETTINGS if name in load}
    stored_settings |= {name: tuple(value) for name, value in stored_settings.items() if isinstance(value, list)}
    if workload is not None:
        stored_settings["workload"] = workload
    return LoadConfig(url="", **stored_settings)


# --- a comparison of two servers


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings of a comparison: `starts` starts of the new server, and as many of the old server or a stored set.

    The starts of the two servers alternate, after `control` starts of the old server alone. The verdict judges `metric`
    at `concurrency`. The defaults are the throughput of the load's task and the highest concurrency. With `force`, sets
    that are not comparable get a verdict too.
    """

    old: ServerCommand | StartSet
    new: ServerCommand
    starts: int = 6
    control: int = 6
    metric: str | None = None
    concurrency: int | None = None
    limits: Limits = field(default_factory=Limits)
    force: bool = False

    def __post_init__(self) -> None:
        if self.metric is not None:
            find_metric(self.metric)  # refuse a wrong name now, not after an hour of starts
        if isinstance(self.old, ServerCommand) and (self.starts < 1 or self.control < MIN_CONTROL_STARTS):
            raise ConfigError(
                f"a comparison takes at least 1 start per side and {MIN_CONTROL_STARTS} of A against A; "
                f"got {self.starts} and {self.control}"
            )


def run_comparison(
    comparison: Comparison,
    options: StartOptions,
    folder: RunFolder,
    *,
    report: Callable[[str], None],
    on_start: OnStart,
) -> ComparisonResult:
    """Run all starts, write each set to `folder` as it grows, and then write and return the comparison.

    Raises MeltcoreError if a start fails. Without `force`, raises ConfigError if the sets are not comparable.
    """
    if comparison.concurrency is not None and comparison.concurrency not in options.load.concurrency:
        raise ConfigError(
            f"concurrency {comparison.concurrency} is to be judged but not measured: add it to --concurrency"
        )
    sets: dict[str, StartSet] = {}
    commands = {NEW: comparison.new}
    if isinstance(comparison.old, StartSet):
        sets[OLD] = comparison.old
    else:
        commands = {OLD: comparison.old, NEW: comparison.new}
        control_starts = interleave({CONTROL: comparison.old}, comparison.control)
        sets |= run_starts(control_starts, options, folder.path, report=report, on_start=on_start)
    planned_starts = interleave(commands, comparison.starts)
    sets |= run_starts(planned_starts, options, folder.path, report=report, on_start=on_start)
    result = compare_starts(
        sets[OLD],
        sets[NEW],
        control=sets.get(CONTROL),
        order="".join(start.set_name for start in planned_starts) if CONTROL in sets else "",
        metric=comparison.metric,
        load=comparison.concurrency,
        limits=comparison.limits,
        force=comparison.force,
    )
    write_document(folder.path / COMPARISON_FILE, result)
    write_atomic(folder.path / MARKDOWN_FILE, comparison_markdown(result).encode())
    write_page(folder.report_path, comparison_page(result))
    return result
