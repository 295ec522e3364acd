"""`meltcore wake`: wake a sleeping model before a request needs it."""

import argparse

HELP = "Wake a model of a fleet before its turn."
EXAMPLES = """\
  meltcore wake gemma        others are put to sleep for it where needed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the option that selects the fleet."""
    from meltcore.common.options import number

    parser.add_argument("model", metavar="MODEL", help="Its name or an alias")
    parser.add_argument("--port", type=number(int), help="The fleet on this port (default: the only one).")


def run(args: argparse.Namespace) -> int:
    """Wake the model, and wait until it can serve. Raises ConfigError if the model does not wake."""
    from meltcore.fleet.admin.admin import change_fleet
    from meltcore.fleet.daemon import find_fleet

    name = change_fleet(find_fleet(args.port).admin, "/wake_up", model=args.model)
    print(f"meltcore: awake: {name}")
    return 0
