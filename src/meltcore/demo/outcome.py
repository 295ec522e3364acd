"""What the demo says last, and its exit code."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from meltcore.demo.gates import passed
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import RunResult
from meltcore.results.tables import levels_table
from meltcore.results.wording import duration, percent

EXIT_PASSED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def print_outcome(console: Console, folder: RunFolder, result: RunResult) -> int:
    """The table, the verdict with every reason, where the report is. Returns the exit code."""
    if result.levels:
        console.print(levels_table(result.levels))
    good = passed(result.verdict)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {escape(reason)}", highlight=False, soft_wrap=True)
    if good:
        total = sum(level.requests for level in result.levels)
        console.print(
            f"[green]passed[/]: all {total:,} requests got their whole answer, "
            f"{percent(result.accuracy)} right unloaded, in {duration(result.duration_s)}",
            highlight=False,
            soft_wrap=True,
        )
    if result.verdict == "CLIENT_BOUND":
        console.print(
            "[yellow]CLIENT_BOUND[/]: the load generator was at its limit; its latencies are not the server's alone"
        )
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    if result.verdict == "PARTIAL":
        return EXIT_INTERRUPTED
    return EXIT_PASSED if good else EXIT_FAILED
