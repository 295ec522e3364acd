"""`meltcore restart`: replace the engines of a fleet one after another."""

import argparse

HELP = "Replace the engines of a fleet one after another."
EXAMPLES = """\
  meltcore restart           all models, in their order
  meltcore restart gemma     one model, also one that has failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the option that selects the fleet."""
    from meltcore.common.options import number

    parser.add_argument("model", nargs="?", metavar="MODEL", help="Its name or an alias (default: all)")
    parser.add_argument("--port", type=number(int), help="The fleet on this port (default: the only one).")


def run(args: argparse.Namespace) -> int:
    """Restart the engines, and wait until each is ready. Raises ConfigError if an engine does not come back."""
    from meltcore.fleet.admin.admin import change_fleet
    from meltcore.fleet.daemon import find_fleet

    query = {} if args.model is None else {"model": args.model}
    names = change_fleet(find_fleet(args.port).admin, "/restart", **query)
    print(f"meltcore: restarted {', '.join(names)}")
    return 0
