"""Options of the verbs that start servers: how each start is loaded and how long the server may take."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.compare.starts import OnStart, PlannedStart, StartOptions
    from meltcore.results.schema import RunResult


def add_start_options(parser: argparse.ArgumentParser, concurrency: str = "1,32") -> None:
    """Add the options that `start_options` reads; `concurrency` is the default of --concurrency."""
    from meltcore.load.config import LoadConfig, parse_numbers
    from meltcore.options import add_options

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
        group="Load of each start",
        defaults={"concurrency": parse_numbers(concurrency, "--concurrency", int), "workload": None},
    )
    group = parser.add_argument_group("Start")
    group.add_argument(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="Time limit for a server to become ready (default: 900).",
    )


def start_options(args: argparse.Namespace, arguments: tuple[str, ...]) -> "StartOptions":
    """Read the options of `add_start_options`. Raises ConfigError for a value out of its form or range."""
    from meltcore.compare.starts import StartOptions
    from meltcore.errors import ConfigError
    from meltcore.load.config import LoadConfig
    from meltcore.load.workloads import check_workload
    from meltcore.options import from_options

    load = from_options(LoadConfig, args, url="", workload=args.workload or LoadConfig.workload)
    check_workload(load)
    if not args.start_timeout > 0:
        raise ConfigError(f"--start-timeout must be more than 0 seconds; got {args.start_timeout:g}")
    return StartOptions(load=load, arguments=arguments, start_limit_s=args.start_timeout)


def start_printers(console: "Console", totals: Mapping[str, int]) -> "tuple[Callable[[str], None], OnStart]":
    """Return two callbacks (report, on_start): one prints a server's messages, the other a line per start.

    `totals` holds the number of starts of each set.
    """
    from rich.markup import escape

    from meltcore.results.throughput import throughput_text

    def report(text: str) -> None:
        console.print(escape(text), style="yellow", highlight=False)

    def on_start(start: "PlannedStart", result: "RunResult") -> None:
        rates = "; ".join(map(throughput_text, result.levels))
        label = f"{start.set_name} {start.number} of {totals[start.set_name]}"
        console.print(f"{label}: ready after {result.settings['ready_s']:.1f} s, {rates}", highlight=False)

    return report, on_start
