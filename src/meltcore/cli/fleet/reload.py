"""`meltcore reload`: let a fleet follow its changed fleet.yaml."""

import argparse

HELP = "Let a fleet follow its changed fleet.yaml."
EXAMPLES = """\
  meltcore reload     models that did not change keep running
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects the fleet."""
    from meltcore.common.options import number

    parser.add_argument("--port", type=number(int), help="The fleet on this port (default: the only one).")


def run(args: argparse.Namespace) -> int:
    """Let the fleet read its file again, and print which models have changed. Their loading is not awaited.

    Raises ConfigError if the file is invalid. No model has changed then.
    """
    from meltcore.fleet.admin.admin import change_fleet
    from meltcore.fleet.daemon import find_fleet

    changes = change_fleet(find_fleet(args.port).admin, "/reload")
    for what, names in changes.items():
        if names:
            print(f"meltcore: {what}: {', '.join(names)}")
    if changes["added"] or changes["changed"]:
        print("meltcore: models that were added or changed load now; `meltcore ps` shows when they are ready")
    return 0
