"""Starts two servers in turns and judges them; before that, the first against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from meltcore.errors import ConfigError
from meltcore.report.judge import PRIMARY_METRIC, find_metric, judge
from meltcore.report.judge_output import as_markdown
from meltcore.report.judge_page import render_judgement
from meltcore.results.judgement import JUDGEMENT_FILE, Judgement, Limits
from meltcore.results.runfolder import RunFolder, write_whole
from meltcore.results.starts import StartSet, write_set
from meltcore.trials.command import ServerCommand
from meltcore.trials.series import OnTurn, Plan, run_turns, turns

MARKDOWN_FILE = "comparison.md"
LEAST_CONTROL = 3  # fewer have no spread to speak of
CONTROL, OLD, NEW = "control", "A", "B"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`starts` a side, after `control` starts of the old server alone. `metric` at `load` gives the verdict."""

    old: ServerCommand
    new: ServerCommand
    starts: int = 6
    control: int = 6
    metric: str = PRIMARY_METRIC
    load: int | None = None
    limits: Limits = field(default_factory=Limits)
    force: bool = False

    def __post_init__(self) -> None:
        find_metric(self.metric)  # a name that is wrong should not be found out after an hour of starts
        if self.starts < 1 or self.control < LEAST_CONTROL:
            raise ConfigError(
                f"a comparison takes at least 1 start a side and {LEAST_CONTROL} of A against A; "
                f"got {self.starts} and {self.control}"
            )


def run_trial(
    trial: Trial, plan: Plan, folder: RunFolder, *, say: Callable[[str], None], on_turn: OnTurn | None = None
) -> Judgement:
    """Every set is written to `folder` as it grows, then what is judged of them.

    Raises MeltcoreError where a start fails, ConfigError where the sets do not compare (and `force` is off).
    """
    if trial.load is not None and trial.load not in plan.load.concurrency:
        raise ConfigError(f"{trial.load} at once is judged and not measured: add it to --concurrency")

    def keep(found: StartSet) -> None:
        write_set(folder.path / found.name, found)

    alone = turns({CONTROL: trial.old}, trial.control)
    control = run_turns(alone, plan, folder.path, say=say, on_turn=on_turn, on_set=keep)
    planned = turns({OLD: trial.old, NEW: trial.new}, trial.starts)
    sets = run_turns(planned, plan, folder.path, say=say, on_turn=on_turn, on_set=keep)
    found = judge(
        sets[OLD],
        sets[NEW],
        control=control[CONTROL],
        order="".join(turn.set_name for turn in planned),
        metric=trial.metric,
        load=trial.load,
        limits=trial.limits,
        force=trial.force,
    )
    save_judgement(folder, found)
    return found


def save_judgement(folder: RunFolder, found: Judgement) -> None:
    """As JSON, as Markdown for a pull request, and as a page."""
    write_whole(folder.path / JUDGEMENT_FILE, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    write_whole(folder.path / MARKDOWN_FILE, as_markdown(found).encode())
    folder.write_report(render_judgement(found))
