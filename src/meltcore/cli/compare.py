"""`meltcore compare`: judge one server against another, by fresh starts of both or by what was stored."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.results.judgement import Judgement, Limits
    from meltcore.results.starts import StartSet

HELP = (
    "Judge a change: REGRESSION, IMPROVEMENT, NO EVIDENCE or UNDERPOWERED. With --run, two servers are started afresh, "
    "in turns, after the first was measured against itself; the unit is a start, so six a side are six observations. "
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

exit status of a judgement: 0 IMPROVEMENT or NO EVIDENCE, 1 REGRESSION, 3 UNDERPOWERED, 2 could not
"""
METRICS = ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "itl_ms", "e2e_ms", "accuracy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from meltcore.cli.trial_options import add_load_options

    parser.add_argument("stored", nargs="*", metavar="A B", help="run folders, sets of starts, or names of baselines")
    parser.add_argument("--run", nargs="+", metavar="FILE", help="command files of servers to start")
    parser.add_argument("--starts", type=int, default=6, metavar="N", help="fresh starts a side (default: 6)")
    parser.add_argument("--control", type=int, default=6, metavar="N", help="starts of A against A before (6)")
    parser.add_argument("--metric", default="output tok/s", metavar="NAME", help="what is judged (output tok/s)")
    parser.add_argument("--at", type=int, metavar="N", help="the concurrency that is judged (default: the highest)")
    parser.add_argument(
        "--least", type=float, default=2.0, metavar="PERCENT", help="smaller changes get no verdict (2)"
    )
    parser.add_argument(
        "--must-find", type=float, default=5.0, metavar="PERCENT", help="what NO EVIDENCE has to rule out (5)"
    )
    parser.add_argument("--force", action="store_true", help="judge what does not compare, with the reasons")
    parser.add_argument("--baselines", default="baselines", metavar="DIR", help="where baselines lie")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where the folder of --run goes (default: runs)")
    parser.add_argument("--page", metavar="FILE", help="write the page of stored sets there")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the judgement, or the rows of two runs, as JSON")
    form.add_argument("--markdown", action="store_true", help="the judgement as Markdown for a pull request")
    add_load_options(parser)


def run(args: argparse.Namespace) -> int:
    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.errors import ConfigError

    stored, fresh = len(args.stored), len(args.run or [])
    if (stored, fresh) in ((0, 2), (1, 1)):
        with signals_as_ctrl_c():
            return _run_against_stored(args) if stored else _run_both(args)
    if (stored, fresh) == (2, 0):
        return _stored(args)
    raise ConfigError("compare takes two sides: A B, or --run A.cmd B.cmd, or a baseline and --run B.cmd")


def _run_both(args: argparse.Namespace) -> int:
    import sys

    from rich.console import Console

    from meltcore.cli.trial_options import plan_of, turn_printer
    from meltcore.errors import MeltcoreError
    from meltcore.results.runfolder import RunFolder
    from meltcore.trials.command import read_command
    from meltcore.trials.compare import NEW, OLD, Trial, run_trial

    old, new = (read_command(path) for path in args.run)
    trial = Trial(
        old=old,
        new=new,
        starts=args.starts,
        control=args.control,
        metric=args.metric,
        load=args.at,
        limits=_limits(args),
        force=args.force,
    )
    plan = plan_of(args, tuple(sys.argv[1:]))
    console = Console(stderr=True)
    totals = {"control": trial.control, "A": trial.starts, "B": trial.starts}
    say, on_turn = turn_printer(console, totals)
    with RunFolder.kept_if_used(args.out, "compare") as folder:
        try:
            found = run_trial(trial, plan, folder, say=say, on_turn=on_turn)
        except (MeltcoreError, KeyboardInterrupt):
            if (folder.path / NEW).is_dir():
                kept = f"{folder.path / OLD} {folder.path / NEW}"
                console.print(f"what was measured until then: meltcore compare {kept}", highlight=False, soft_wrap=True)
            raise
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return _show(args, found)


def _run_against_stored(args: argparse.Namespace) -> int:
    import dataclasses
    import sys
    from pathlib import Path

    from rich.console import Console

    from meltcore.cli.trial_options import plan_of, turn_printer
    from meltcore.load.workload import check_workload
    from meltcore.report.judge import judge
    from meltcore.results.runfolder import RunFolder
    from meltcore.results.starts import write_set
    from meltcore.trials.baseline import load_again
    from meltcore.trials.command import read_command
    from meltcore.trials.compare import save_judgement
    from meltcore.trials.series import run_turns, turns

    old = _set(args.stored[0], args.baselines)
    plan = plan_of(args, tuple(sys.argv[1:]))
    plan = dataclasses.replace(plan, load=load_again(old.load, workload=args.workload))
    check_workload(plan.load.workload, max_tokens=plan.load.max_tokens)
    console = Console(stderr=True)
    say, on_turn = turn_printer(console, {"B": args.starts})
    planned = turns({"B": read_command(Path(args.run[0]))}, args.starts)
    with RunFolder.kept_if_used(args.out, "compare") as folder:
        new = run_turns(planned, plan, folder.path, say=say, on_turn=on_turn)["B"]
        write_set(folder.path / "B", new)
    found = judge(old, new, metric=args.metric, load=args.at, limits=_limits(args), force=args.force)
    save_judgement(folder, found)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return _show(args, found)


def _stored(args: argparse.Namespace) -> int:
    from pathlib import Path

    from meltcore.errors import ConfigError
    from meltcore.report.judge import judge
    from meltcore.report.judge_page import render_judgement
    from meltcore.results.runfolder import write_whole
    from meltcore.trials.baseline import find_set

    if not any(find_set(text, Path(args.baselines)) for text in args.stored):
        if args.markdown or args.page:
            raise ConfigError("two single runs get ratios and no judgement: --markdown and --page need sets of starts")
        return _two_runs(args)
    old, new = (_set(text, args.baselines) for text in args.stored)
    found = judge(old, new, metric=args.metric, load=args.at, limits=_limits(args), force=args.force)
    if args.page:
        write_whole(Path(args.page), render_judgement(found).encode())
    return _show(args, found)


def _two_runs(args: argparse.Namespace) -> int:
    from meltcore.report.compare import compare, environment_changes, reasons_not_to_compare
    from meltcore.report.compare_output import as_json, print_comparison
    from meltcore.results.runfolder import read_result

    first, second = (read_result(path) for path in args.stored)
    rows = compare(first, second, force=args.force)
    doubts, changes = reasons_not_to_compare(first, second), environment_changes(first, second)
    if args.json:
        print(as_json(rows, doubts, changes))
    else:
        print_comparison(rows, doubts, changes)
    return 0


def _set(text: str, baselines: str) -> "StartSet":
    """A set by path or name; a single run becomes a set of one, which no verdict comes of."""
    from pathlib import Path

    from meltcore.results.runfolder import read_result
    from meltcore.results.starts import StartSet
    from meltcore.trials.baseline import find_set

    found = find_set(text, Path(baselines))
    if found is not None:
        return found
    result = read_result(text)
    return StartSet(name=Path(text).name, command="", taken=result.started, starts=[result])


def _limits(args: argparse.Namespace) -> "Limits":
    from meltcore.errors import ConfigError
    from meltcore.results.judgement import Limits

    if not 0 <= args.least < args.must_find:
        raise ConfigError(f"--least {args.least:g} must be at least 0 and below --must-find {args.must_find:g}")
    return Limits(least_effect=args.least / 100, must_find=args.must_find / 100)


def _show(args: argparse.Namespace, found: "Judgement") -> int:
    import msgspec
    from rich.console import Console

    from meltcore.report.judge_output import EXIT_CODES, as_markdown, print_judgement

    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    elif args.markdown:
        print(as_markdown(found), end="")
    else:
        print_judgement(found, Console())
    return EXIT_CODES[found.verdict]
