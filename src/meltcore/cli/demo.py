"""`meltcore demo`: serve, check, load and report in one command."""

import argparse
import sys

HELP = (
    "Serve a model on what this machine has, check the API, ask 200 held-out problems, load it at each level, "
    "translate and transcribe problems whose answers are known, and report. Exits 0 only if every request got its "
    "complete answer and accuracy held under load."
)
EXAMPLES = """\
  meltcore demo
  meltcore demo --levels 10,100
  meltcore demo --out results --levels 1000
"""
METRICS = ("succeeded", "accuracy", "peak_in_flight", "output_tokens_per_s", "ttft_ms", "itl_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from meltcore.common.options import add_options
    from meltcore.measure.experiments.demo.config import DemoConfig

    add_options(parser, DemoConfig)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.options import from_options
    from meltcore.measure.experiments.demo.config import DemoConfig
    from meltcore.measure.experiments.demo.run import print_outcome, run_demo

    console = Console()
    with signals_as_ctrl_c():
        folder, result = run_demo(from_options(DemoConfig, args, arguments=tuple(sys.argv[1:])), console)
    return print_outcome(console, folder, result)
