"""`meltcore compare`: compare two servers by several starts of each, or by sets of starts that were stored before."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.measure.documents.comparison import ComparisonResult, Limits

HELP = (
    "Judge a change: REGRESSION, IMPROVEMENT, NO EVIDENCE or UNDERPOWERED. With --run, two servers are started afresh, "
    "in turns, after the first was measured against itself; the unit is a start, so six per side are six observations. "
    "Stored sets and baselines compare too, not interleaved. Two single runs get ratios and no verdict."
)
EXAMPLES = """\
  meltcore compare --run A.cmd B.cmd --starts 6
  meltcore compare --run A.cmd B.cmd --concurrency 32 --metric "TTFT p50 ms" --markdown
  meltcore compare main --run B.cmd      fresh starts of B against the baseline `main`
  meltcore compare main other            two baselines, or folders that hold a set.json
  meltcore compare runs/20261121T120000Z-load runs/20261121T130000Z-load

A.cmd holds a command line with {port} where the port goes, such as
  meltcore serve meltcore/sums --port {port}

exit status of a comparison: 0 IMPROVEMENT or NO EVIDENCE, 1 REGRESSION, 3 UNDERPOWERED, 2 could not
"""
METRICS = ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "itl_ms", "e2e_ms", "accuracy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the two sides, and the options for the verdict and for a server's starts and load."""
    from meltcore.cli.start_options import add_start_options
    from meltcore.common.options import number

    parser.add_argument(
        "stored", nargs="*", metavar="A B", help="Two run folders, sets of starts, or names of baselines."
    )
    parser.add_argument(
        "--run",
        nargs="+",
        metavar="FILE",
        help="Command files of the servers to start: two, or one against a stored set.",
    )
    parser.add_argument(
        "--starts", type=number(int), default=6, metavar="N", help="Number of fresh starts per side (default: 6)."
    )
    parser.add_argument(
        "--control",
        type=number(int),
        default=6,
        metavar="N",
        help="Number of starts of A before the comparison, which measure how much A differs from itself (default: 6).",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="Metric that decides the verdict (default: output tok/s, or the throughput of another task).",
    )
    parser.add_argument(
        "--at",
        type=number(int),
        metavar="N",
        help="Concurrency whose level decides the verdict (default: the highest).",
    )
    parser.add_argument(
        "--least",
        type=number(float),
        default=2.0,
        metavar="PERCENT",
        help="Smallest change in percent that can be a REGRESSION or an IMPROVEMENT (default: 2).",
    )
    parser.add_argument(
        "--must-find",
        type=number(float),
        default=5.0,
        metavar="PERCENT",
        help="Change in percent that NO EVIDENCE rules out; without that the verdict is UNDERPOWERED (default: 5).",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="Give a verdict also where the two sides do not compare; the reasons are shown.",
    )
    parser.add_argument(
        "--baselines", default="baselines", metavar="DIR", help="Folder of the baselines (default: baselines)."
    )
    parser.add_argument(
        "--out", default="runs", metavar="DIR", help="Folder for the run folder of --run (default: runs)."
    )
    parser.add_argument("--page", metavar="FILE", help="Write the page that compares stored sets into FILE.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="Print the comparison, or the rows of two runs, as JSON.")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="Print the comparison as Markdown for a pull request.",
    )
    add_start_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compare two sides, and return the exit code of the verdict. Two single runs get no verdict and return 0.

    Raises ConfigError if there are not exactly two sides, or if the limits are out of order.
    """
    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError

    num_stored, num_fresh = len(args.stored), len(args.run or [])
    if (num_stored, num_fresh) in ((0, 2), (1, 1)):
        with signals_as_ctrl_c():
            return _compare_fresh(args)
    if (num_stored, num_fresh) == (2, 0):
        return _compare_stored(args)
    raise ConfigError("compare takes two sides: A B, or --run A.cmd B.cmd, or a baseline and --run B.cmd")


def _compare_fresh(args: argparse.Namespace) -> int:
    """Start and measure the new server several times.

    If there is no stored set of the old server, do the same with it.
    """
    import dataclasses

    from rich.console import Console

    from meltcore.cli.start_options import start_options, start_printers
    from meltcore.common.errors import MeltcoreError
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.experiments.compare.starts import (
        NEW,
        OLD,
        Comparison,
        read_side,
        run_comparison,
        stored_load,
    )
    from meltcore.measure.experiments.servers import read_command
    from meltcore.measure.load.tasks.task import check_workload

    stored = read_side(args.stored[0], args.baselines) if args.stored else None
    comparison = Comparison(
        old=read_command(args.run[0]) if stored is None else stored,
        new=read_command(args.run[-1]),
        starts=args.starts,
        control=args.control,
        metric=args.metric,
        concurrency=args.at,
        limits=_limits(args),
        force=args.force,
    )
    plan = start_options(args)
    if stored is not None:
        plan = dataclasses.replace(plan, load=stored_load(stored.load, workload=args.workload))
        check_workload(plan.load)
    console = Console(stderr=True)
    report, on_start = start_printers(console, {"control": args.control, "A": args.starts, "B": args.starts})
    with RunFolder.create_or_remove(args.out, "compare") as folder:
        try:
            result = run_comparison(comparison, plan, folder, report=report, on_start=on_start)
        except (MeltcoreError, KeyboardInterrupt):
            if (folder.path / NEW).is_dir():
                old_set = folder.path / OLD if stored is None else args.stored[0]
                console.print(
                    f"what was measured until then: meltcore compare {old_set} {folder.path / NEW}",
                    highlight=False,
                    soft_wrap=True,
                )
            raise
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return _print_comparison(args, result)


def _compare_stored(args: argparse.Namespace) -> int:
    """Compare two stored sets, or print the ratios of two single runs."""
    from pathlib import Path

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.runfolder import read_result
    from meltcore.measure.experiments.compare.starts import find_start_set, read_side
    from meltcore.measure.report.comparisons.compare_runs import (
        comparability_notes,
        compare_runs,
        environment_changes,
        print_ratios,
        ratios_json,
    )
    from meltcore.measure.report.comparisons.compare_starts import compare_starts
    from meltcore.measure.report.comparisons.comparison import comparison_page
    from meltcore.measure.report.page.html import write_page

    if any(find_start_set(text, args.baselines) for text in args.stored):
        old, new = (read_side(text, args.baselines) for text in args.stored)
        result = compare_starts(old, new, metric=args.metric, load=args.at, limits=_limits(args), force=args.force)
        if args.page:
            write_page(Path(args.page), comparison_page(result))
        return _print_comparison(args, result)
    if args.markdown or args.page:
        raise ConfigError("two single runs get ratios and no verdict: --markdown and --page need sets of starts")
    first, second = (read_result(path) for path in args.stored)
    rows = compare_runs(first, second, force=args.force)
    reasons, changes = comparability_notes(first, second), environment_changes(first, second)
    if args.json:
        print(ratios_json(rows, reasons, changes))
    else:
        print_ratios(rows, reasons, changes)
    return 0


def _limits(args: argparse.Namespace) -> "Limits":
    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.comparison import Limits

    if not 0 <= args.least < args.must_find:
        raise ConfigError(f"--least {args.least:g} must be at least 0 and below --must-find {args.must_find:g}")
    return Limits(least_effect=args.least / 100, must_find=args.must_find / 100)


def _print_comparison(args: argparse.Namespace, result: "ComparisonResult") -> int:
    import msgspec
    from rich.console import Console

    from meltcore.measure.documents.verdicts import MEANINGS
    from meltcore.measure.report.comparisons.comparison import comparison_markdown, comparison_page
    from meltcore.measure.report.page.console import print_page

    if args.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    elif args.markdown:
        print(comparison_markdown(result), end="")
    else:
        print_page(comparison_page(result), Console())
    return MEANINGS[result.verdict].exit_code
