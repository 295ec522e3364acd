"""`meltcore baseline`: keep a control set of fresh starts under a name, and look at what is kept."""

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
    from meltcore.cli.trial_options import add_load_options

    parser.add_argument("action", choices=("save", "list", "show"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the baseline to save or show")
    parser.add_argument("--run", metavar="FILE", help="command file of the server, with {port} in it")
    parser.add_argument("--starts", type=int, default=6, metavar="N", help="fresh starts, at least 6 (default: 6)")
    parser.add_argument("--replace", action="store_true", help="take the place of a baseline of that name")
    parser.add_argument("--baselines", default="baselines", metavar="DIR", help="where baselines lie")
    parser.add_argument("--json", action="store_true", help="of show: the whole set as JSON")
    add_load_options(parser)


def run(args: argparse.Namespace) -> int:
    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.errors import ConfigError

    if args.action == "list":
        return _list(args)
    if args.name is None:
        raise ConfigError(f"baseline {args.action} needs a NAME")
    if args.action == "show":
        return _show(args)
    with signals_as_ctrl_c():
        return _save(args)


def _save(args: argparse.Namespace) -> int:
    import sys
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from meltcore.cli.trial_options import plan_of, turn_printer
    from meltcore.errors import ConfigError
    from meltcore.report.baseline_output import print_set
    from meltcore.trials.baseline import LEAST_STARTS, free_place, save_baseline
    from meltcore.trials.command import read_command
    from meltcore.trials.series import run_turns, turns

    if args.run is None:
        raise ConfigError("baseline save needs --run FILE, the command of the server to start")
    if args.starts < LEAST_STARTS:
        raise ConfigError(f"a baseline is of at least {LEAST_STARTS} starts; got {args.starts}")
    place = free_place(Path(args.baselines), args.name, replace=args.replace)
    command, plan = read_command(args.run), plan_of(args, tuple(sys.argv[1:]))
    console = Console()
    say, on_turn = turn_printer(console, {args.name: args.starts})
    with TemporaryDirectory() as logs:
        planned = turns({args.name: command}, args.starts)
        found = run_turns(planned, plan, Path(logs), say=say, on_turn=on_turn)[args.name]
        path = save_baseline(place, found, Path(logs))
    print_set(found, console)
    console.print(f"saved: {path}", highlight=False, soft_wrap=True)
    return 0


def _list(args: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from meltcore.report.baseline_output import print_list
    from meltcore.trials.baseline import baselines

    print_list(baselines(Path(args.baselines)), Console())
    return 0


def _show(args: argparse.Namespace) -> int:
    from pathlib import Path

    import msgspec
    from rich.console import Console

    from meltcore.errors import ConfigError
    from meltcore.report.baseline_output import print_set
    from meltcore.trials.baseline import find_set

    found = find_set(args.name, Path(args.baselines))
    if found is None:
        raise ConfigError(f"there is no baseline {args.name} in {args.baselines}; see meltcore baseline list")
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print_set(found, Console())
    return 0
