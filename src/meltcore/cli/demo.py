"""`meltcore demo`: the main job end to end."""

import argparse
import sys

HELP = (
    "Serve a model on what this machine has, check the API, ask 200 held-out problems, load it at each level, "
    "and report. Exits 0 only if every request got its whole answer and the answers stayed right under load."
)
EXAMPLES = """\
  meltcore demo
  meltcore demo --levels 10,100
  meltcore demo --out results --levels 1000
"""
METRICS = ("succeeded", "accuracy", "peak_in_flight", "output_tokens_per_s", "ttft_ms", "itl_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--levels", type=_levels, default=None, metavar="N,N", help="requests at once (default: 10,100,400,1000,10000)"
    )
    parser.add_argument("--model", default="meltcore/sums", help="what to serve (default: the bundled meltcore/sums)")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (default: runs)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the problems of the levels (default: 0)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.demo import DEFAULT_LEVELS, DemoConfig, run_demo
    from meltcore.demo.outcome import print_outcome

    config = DemoConfig(
        model=args.model,
        levels=args.levels or DEFAULT_LEVELS,
        out=Path(args.out),
        seed=args.seed,
        arguments=tuple(sys.argv[1:]),
    )
    console = Console()
    with signals_as_ctrl_c():
        folder, result = run_demo(config, console)
    return print_outcome(console, folder, result)


def _levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 10,100") from error
