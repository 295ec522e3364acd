"""Compare two servers by alternating fresh starts, after starts of the first against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meltcore.common.errors import ConfigError
from meltcore.common.files import write_atomic, write_document
from meltcore.measure.documents.comparison import COMPARISON_FILE, ComparisonResult, Limits
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.starts import StartSet, write_start_set
from meltcore.measure.experiments.compare.starts import OnStart, StartOptions, interleave, run_starts
from meltcore.measure.experiments.servers.command import ServerCommand
from meltcore.measure.report.comparisons.compare_starts import compare_starts, find_metric
from meltcore.measure.report.comparisons.comparison import comparison_markdown, comparison_page
from meltcore.measure.report.page.html import write_page

MARKDOWN_FILE = "comparison.md"
MIN_CONTROL_STARTS = 3  # fewer do not show the noise of A
CONTROL, OLD, NEW = "control", "A", "B"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Settings of an A/B comparison: `starts` per side, after `control` starts of the old server alone.

    The verdict judges `metric` at `concurrency`. The defaults are the throughput of the load's task and the highest
    concurrency. With `force`, sets that are not comparable get a verdict too.
    """

    old: ServerCommand
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
        if self.starts < 1 or self.control < MIN_CONTROL_STARTS:
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
    on_start: OnStart | None = None,
) -> ComparisonResult:
    """Run all starts, write each set to `folder` as it grows, then write the comparison.

    Raises MeltcoreError if a start fails, and ConfigError if the sets are not comparable, unless `force` is set.
    """
    if comparison.concurrency is not None and comparison.concurrency not in options.load.concurrency:
        raise ConfigError(
            f"concurrency {comparison.concurrency} is to be judged but not measured: add it to --concurrency"
        )

    def save(start_set: StartSet) -> None:
        write_start_set(folder.path / start_set.name, start_set)

    control_starts = interleave({CONTROL: comparison.old}, comparison.control)
    control = run_starts(control_starts, options, folder.path, report=report, on_start=on_start, on_set=save)
    planned_starts = interleave({OLD: comparison.old, NEW: comparison.new}, comparison.starts)
    start_sets = run_starts(planned_starts, options, folder.path, report=report, on_start=on_start, on_set=save)
    result = compare_starts(
        start_sets[OLD],
        start_sets[NEW],
        control=control[CONTROL],
        order="".join(start.set_name for start in planned_starts),
        metric=comparison.metric,
        load=comparison.concurrency,
        limits=comparison.limits,
        force=comparison.force,
    )
    save_comparison(folder, result)
    return result


def save_comparison(folder: RunFolder, result: ComparisonResult) -> None:
    """Write a comparison as JSON, as Markdown for a pull request, and as an HTML page."""
    write_document(folder.path / COMPARISON_FILE, result)
    write_atomic(folder.path / MARKDOWN_FILE, comparison_markdown(result).encode())
    write_page(folder.report_path, comparison_page(result))
