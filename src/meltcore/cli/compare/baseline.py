"""`meltcore baseline`: measure several starts of a server and save the results under a name, or show saved results."""

import argparse

HELP = (
    "Keep a control set: fresh starts of a server, each loaded at concurrency 1 and 32, with the fingerprint of the "
    "machine. `meltcore compare NAME --run B.cmd` judges another server against it."
)
EXAMPLES = """\
  meltcore baseline save main --run A.cmd
  meltcore baseline save main --run A.cmd --starts 8 --concurrency 1,64 --replace
  meltcore baseline list
  meltcore baseline show main
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the action and the baseline's name, and the options for starts and load of a server."""
    from meltcore.cli.start_options import add_start_options
    from meltcore.common.options import number

    parser.add_argument("action", choices=("save", "list", "show"), help="Save, list or show baselines.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="Name of the baseline to save or show.")
    parser.add_argument("--run", metavar="FILE", help="Command file of the server to start, with {port} in it.")
    parser.add_argument(
        "--starts", type=number(int), default=6, metavar="N", help="Number of fresh starts, at least 6 (default: 6)."
    )
    parser.add_argument("--replace", action="store_true", help="Replace an existing baseline of this name.")
    parser.add_argument(
        "--baselines", default="baselines", metavar="DIR", help="Folder of the baselines (default: baselines)."
    )
    parser.add_argument("--json", action="store_true", help="With show: print the whole set as JSON.")
    add_start_options(parser)


def run(args: argparse.Namespace) -> int:
    """Save, list or show baselines, and return the exit code.

    Raises ConfigError for a missing name or command file, too few starts, or an unknown baseline.
    """
    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError
    from meltcore.measure.experiments.compare.starts import find_start_set, list_baselines
    from meltcore.measure.report.comparisons.compare_starts import print_start_set, print_start_sets

    console = Console()
    if args.action == "list":
        print_start_sets(list_baselines(args.baselines), console)
        return 0
    if args.name is None:
        raise ConfigError(f"baseline {args.action} needs a NAME")
    if args.action == "save":
        with signals_as_ctrl_c():
            return _save_baseline(args)
    start_set = find_start_set(args.name, args.baselines)
    if start_set is None:
        raise ConfigError(f"there is no baseline {args.name} in {args.baselines}; see meltcore baseline list")
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(start_set), indent=2).decode())
    else:
        print_start_set(start_set, console)
    return 0


def _save_baseline(args: argparse.Namespace) -> int:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from meltcore.cli.start_options import start_options, start_printers
    from meltcore.common.errors import ConfigError
    from meltcore.measure.experiments.compare.starts import (
        MIN_BASELINE_STARTS,
        baseline_folder,
        interleave,
        run_starts,
        save_baseline,
    )
    from meltcore.measure.experiments.servers import read_command
    from meltcore.measure.report.comparisons.compare_starts import print_start_set

    if args.run is None:
        raise ConfigError("baseline save needs --run FILE, the command of the server to start")
    if args.starts < MIN_BASELINE_STARTS:
        raise ConfigError(f"a baseline is of at least {MIN_BASELINE_STARTS} starts; got {args.starts}")
    folder = baseline_folder(Path(args.baselines), args.name, replace=args.replace)
    command, plan = read_command(args.run), start_options(args)
    console = Console()
    report, on_start = start_printers(console, {args.name: args.starts})
    with TemporaryDirectory() as logs:
        planned_starts = interleave({args.name: command}, args.starts)
        start_set = run_starts(planned_starts, plan, Path(logs), report=report, on_start=on_start)[args.name]
        path = save_baseline(folder, start_set, Path(logs))
    print_start_set(start_set, console)
    console.print(f"saved: {path}", highlight=False, soft_wrap=True)
    return 0
