"""`meltcore rank`: GPU scores side by side."""

import argparse

HELP = (
    "GPU scores of meltcore bench side by side, best first, as a table and a page. Refuses unlike workload versions, "
    "engine versions, precisions or weights. Nothing is uploaded."
)
EXAMPLES = """\
  meltcore rank h200/result.json rtx4090/result.json
  meltcore rank runs/*-bench --output ranking.html
  meltcore rank A.json B.json --force    draws unlike results too, and marks the chart
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", nargs="+", metavar="RESULT", help="result.json files or run folders of meltcore bench"
    )
    parser.add_argument(
        "--output", default="rank.html", metavar="FILE", help="where the page goes (default: rank.html)"
    )
    parser.add_argument("--force", action="store_true", help="draw results that do not rank, marked as such")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from meltcore.report.rank import cautions, ranked, read_entry, reasons_not_to_rank
    from meltcore.report.rank_output import as_json, print_rank
    from meltcore.report.rank_page import render_rank
    from meltcore.results.runfolder import write_whole

    entries = [read_entry(path) for path in args.results]
    order = ranked(entries, force=args.force)
    reasons, notes = reasons_not_to_rank(entries), cautions(entries)
    output = Path(args.output)
    write_whole(output, render_rank(order, reasons, notes).encode())
    console = Console(stderr=args.json, highlight=False)
    if args.json:
        print(as_json(order, reasons, notes))
    else:
        print_rank(order, reasons, notes, console)
    console.print(f"page: {output}", soft_wrap=True)
    return 0
