"""Options that verbs which start servers share: how each start is loaded, and how long it may take."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.results.schema import RunResult
    from meltcore.trials.series import OnTurn, Plan, Turn


def add_load_options(parser: argparse.ArgumentParser, concurrency: str = "1,32") -> None:
    group = parser.add_argument_group("how each start is loaded")
    group.add_argument(
        "--concurrency", default=concurrency, metavar="N,...", help=f"closed-loop levels (default: {concurrency})"
    )
    group.add_argument("--requests", metavar="N,...", help="requests a level: one number for all, or one each")
    group.add_argument("--workload", metavar="WHAT", help="as of meltcore load (default: problems:short)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="output limit of prompts that name none")
    group.add_argument("--model", help="default: the first one in /v1/models")
    group.add_argument("--seed", type=int, default=0, help="of prompts, the same at every start (default: 0)")
    group.add_argument(
        "--no-continuous-usage", action="store_true", help="do not ask for token counts with every chunk"
    )
    group.add_argument("--start-timeout", type=float, default=900.0, metavar="S", help="for a server to become ready")


def plan_of(args: argparse.Namespace, arguments: tuple[str, ...]) -> "Plan":
    """Raises ConfigError for a value out of its form or range."""
    from meltcore.errors import ConfigError
    from meltcore.load.config import LoadConfig, parse_numbers
    from meltcore.load.workload import check_workload
    from meltcore.trials.series import Plan

    requests = None if args.requests is None else parse_numbers(args.requests, "--requests", int)
    load = LoadConfig(
        url="",
        concurrency=parse_numbers(args.concurrency, "--concurrency", int),
        requests=requests[0] if requests is not None and len(requests) == 1 else requests,
        workload=args.workload or "problems:short",
        max_tokens=args.max_tokens,
        model=args.model,
        seed=args.seed,
        continuous_usage=not args.no_continuous_usage,
    )
    check_workload(load.workload, max_tokens=load.max_tokens)
    if not args.start_timeout > 0:
        raise ConfigError(f"--start-timeout must be more than 0 seconds; got {args.start_timeout:g}")
    return Plan(load=load, arguments=arguments, start_limit_s=args.start_timeout)


def turn_printer(console: "Console", totals: Mapping[str, int]) -> "tuple[Callable[[str], None], OnTurn]":
    """What says a server's troubles, and what prints a line a start. `totals`: starts of each set."""
    from rich.markup import escape

    from meltcore.results.wording import load_of, number

    def say(text: str) -> None:
        console.print(escape(text), style="yellow", highlight=False)

    def on_turn(turn: "Turn", result: "RunResult") -> None:
        rates = ", ".join(f"{number(level.output_tokens_per_s)} tok/s {load_of(level)}" for level in result.levels)
        ready_s = result.settings["ready_s"]
        place = f"{turn.set_name} {turn.place} of {totals[turn.set_name]}"
        console.print(f"{place}: ready after {ready_s:.1f} s, {rates}", highlight=False)

    return say, on_turn
