"""`meltcore down`: drain and end a fleet."""

import argparse

HELP = "Drain and end a fleet."
EXAMPLES = """\
  meltcore down                  the only fleet that runs
  meltcore down --port 8080      one of several
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the fleet and set the time limit."""
    from meltcore.common.options import number

    parser.add_argument("--port", type=number(int), help="The fleet on this port.")
    parser.add_argument(
        "--timeout", type=number(float), default=60.0, metavar="S", help="Time for it to drain and exit (default: 60)."
    )


def run(args: argparse.Namespace) -> int:
    """End the fleet. Returns 1 if the fleet has not ended within the limit, else 0.

    Raises ConfigError if no fleet or several fleets match.
    """
    from meltcore.fleet.daemon import find_fleet, stop

    return stop([find_fleet(args.port)], args.timeout)
