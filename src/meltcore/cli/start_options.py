"""Options of commands that start servers: starts in the background, the load of each start, and its time limit."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.fleet.daemon import OneModel, PlannedFleet
    from meltcore.fleet.plan.placement import PlacedFleet
    from meltcore.measure.documents.schema import RunResult
    from meltcore.measure.experiments.compare.starts import OnStart, PlannedStart, StartOptions


def add_daemon_options(parser: argparse.ArgumentParser) -> None:
    """Add --daemon, --log and --start-timeout, which `start_daemon` reads."""
    from meltcore.common.options import number

    group = parser.add_argument_group("background")
    group.add_argument("--daemon", action="store_true", help="Start, wait until ready, and leave it running.")
    group.add_argument(
        "--log",
        metavar="FILE",
        help="Output of a --daemon (default: a new file, printed). It may replace an older log, and no other file.",
    )
    group.add_argument(
        "--start-timeout",
        type=number(float, exclusive_minimum=0),
        metavar="S",
        help="Time for a --daemon to become ready, else it is ended (default: no limit).",
    )


def start_daemon(args: argparse.Namespace, fleet: "PlacedFleet", source: "OneModel | PlannedFleet") -> int | None:
    """Start a server in the background if --daemon is given. Return its exit status, or None without --daemon.

    Raises ConfigError for options that require --daemon.
    """
    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError
    from meltcore.fleet.daemon import start

    if args.daemon:
        with signals_as_ctrl_c():  # or a half-started server would be left, in a session of its own
            return start(fleet, source, log=args.log, limit_s=args.start_timeout)
    if args.log is not None or args.start_timeout is not None:
        raise ConfigError("--log and --start-timeout are for a server in the background: add --daemon")
    return None


def add_start_options(parser: argparse.ArgumentParser, concurrency: str = "1,32") -> None:
    """Add the options that `start_options` reads. `concurrency` is the default of the option --concurrency."""
    from meltcore.common.options import add_options, number
    from meltcore.measure.load.config import LoadConfig, parse_numbers

    add_options(
        parser,
        LoadConfig,
        "concurrency",
        "num_prompts",
        "workload",
        "max_tokens",
        "model",
        "seed",
        "continuous_usage",
        group="load of each start",
        defaults={"concurrency": parse_numbers(concurrency, "--concurrency", int), "workload": None},
    )
    group = parser.add_argument_group("start")
    group.add_argument(
        "--start-timeout",
        type=number(float, exclusive_minimum=0),
        default=900.0,
        metavar="S",
        help="Time limit for a server to become ready (default: 900).",
    )


def start_options(args: argparse.Namespace) -> "StartOptions":
    """Read the options of `add_start_options`. Raises ConfigError if a value is malformed or out of range."""
    from meltcore.common.options import from_options
    from meltcore.measure.experiments.compare.starts import StartOptions
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.tasks.task import check_workload

    load = from_options(LoadConfig, args, url="", workload=args.workload or LoadConfig.workload)
    check_workload(load)
    return StartOptions(load=load, arguments=tuple(sys.argv[1:]), start_limit_s=args.start_timeout)


def start_printers(console: "Console", totals: Mapping[str, int]) -> "tuple[Callable[[str], None], OnStart]":
    """Return two callbacks (report, on_start).

    `report` prints a message of a server, and `on_start` prints a line for each start. `totals` has the number of
    starts of each set.
    """
    from meltcore.measure.documents.values.progress import warning_printer
    from meltcore.measure.load.tasks.task import throughput_text

    def on_start(start: "PlannedStart", result: "RunResult") -> None:
        rates = "; ".join(map(throughput_text, result.levels))
        label = f"{start.set_name} {start.number} of {totals[start.set_name]}"
        console.print(f"{label}: ready after {result.settings['ready_s']:.1f} s, {rates}", highlight=False)

    return warning_printer(console), on_start
