"""`meltcore leaderboard`: rank GPU scores."""

import argparse

_RUNS_FOLDER = "runs"  # the folder that runs go to
HELP = (
    "A leaderboard of GPU scores of meltcore bench, as a table and a page. Refuses results of different workload "
    "versions, engine versions, precisions or weights. Without results: your newest runs among the references that the "
    "package ships. Nothing is uploaded."
)
EXAMPLES = """\
  meltcore leaderboard                          your newest runs in runs/ among the shipped references
  meltcore leaderboard h200/result.json rtx4090/result.json
  meltcore leaderboard runs/*-bench --output scores.html
  meltcore leaderboard --export scores.png      its charts as a picture; .svg needs no package
  meltcore leaderboard A.json B.json --force    ranks different results too, and marks the charts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "results",
        nargs="*",
        metavar="RESULT",
        help="Files result.json or run folders of meltcore bench (default: the newest runs and the shipped references)",
    )
    parser.add_argument(
        "--runs", default=_RUNS_FOLDER, metavar="DIR", help="Folder of the newest runs, without RESULT (default: runs)"
    )
    parser.add_argument(
        "--output", default="leaderboard.html", metavar="FILE", help="The page's file (default: leaderboard.html)"
    )
    parser.add_argument(
        "--export", metavar="FILE", help="Also write the charts into one .svg or .png file (PNG: meltcore[png])"
    )
    parser.add_argument("--force", action="store_true", help="Rank results that do not compare, marked as such")
    parser.add_argument("--json", action="store_true", help="Print rows as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Rank the results, write the page, print the table, and return the exit status."""
    from pathlib import Path

    from rich.console import Console

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.values.scores import read_score
    from meltcore.measure.report.page.charts_export import check_export, export_page
    from meltcore.measure.report.page.console import print_page
    from meltcore.measure.report.page.html import write_page
    from meltcore.measure.report.scores.leaderboard import (
        leaderboard_json,
        leaderboard_notes,
        leaderboard_page,
        newest_runs_and_references,
        ranking_notes,
        sort_by_score,
    )

    if args.export:
        check_export(Path(args.export))  # before the page is written
    if args.runs != _RUNS_FOLDER and not Path(args.runs).is_dir():
        raise ConfigError(f"--runs {args.runs}: there is no such folder")
    left_out_notes: list[str] = []
    if args.results:
        entries = [read_score(path) for path in args.results]
    else:
        entries, left_out_notes = newest_runs_and_references(Path(args.runs))
    ranked_entries = sort_by_score(entries, force=args.force)
    reasons, notes = ranking_notes(entries), [*leaderboard_notes(entries), *left_out_notes]
    page = leaderboard_page(ranked_entries, reasons, notes)
    write_page(Path(args.output), page)
    if args.export:
        export_page(page, Path(args.export))
    console = Console(stderr=args.json, highlight=False)
    if args.json:
        print(leaderboard_json(ranked_entries, reasons, notes))
    else:
        print_page(page, console)
    console.print(f"page: {args.output}", soft_wrap=True)
    return 0
