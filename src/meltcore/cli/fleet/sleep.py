"""`meltcore sleep`: put a sleepable model to sleep."""

import argparse

HELP = "Put a sleepable model of a fleet to sleep."
EXAMPLES = """\
  meltcore sleep gemma       its memory is free; the next request wakes it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the option that selects the fleet."""
    from meltcore.common.options import number

    parser.add_argument("model", metavar="MODEL", help="Its name or an alias")
    parser.add_argument("--port", type=number(int), help="The fleet on this port (default: the only one).")


def run(args: argparse.Namespace) -> int:
    """Put the model to sleep, and wait until it sleeps. Raises ConfigError if the model cannot sleep."""
    from meltcore.fleet.admin.admin import change_fleet
    from meltcore.fleet.daemon import find_fleet

    name = change_fleet(find_fleet(args.port).admin, "/sleep", model=args.model)
    print(f"meltcore: sleeps: {name}")
    return 0
