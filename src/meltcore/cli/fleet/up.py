"""`meltcore up`: serve all models of a fleet.yaml."""

import argparse
from typing import Any

HELP = "Serve all models of a fleet.yaml behind one address."
EXAMPLES = """\
  meltcore up                           ./fleet.yaml, until Ctrl-C
  meltcore up my-fleet.yaml --daemon    in the background; `meltcore down` ends it
  meltcore up my-fleet.yaml --ray auto  with engines on all nodes of the Ray cluster that this machine belongs to
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the file, and the options for a fleet in the background."""
    from meltcore.cli.start_options import add_daemon_options
    from meltcore.common.options import ActOption, not_empty

    parser.add_argument("file", nargs="?", default="fleet.yaml", metavar="FILE", help="default: fleet.yaml")
    parser.add_argument(
        "--ray",
        action=ActOption,
        const=_run_on_ray,
        type=not_empty,
        metavar="ADDRESS",
        help="Start engines on a Ray cluster: auto, local or HOST:PORT.",
    )
    add_daemon_options(parser)


def _run_on_ray(args: argparse.Namespace) -> int:
    from meltcore.fleet.plan.cluster import cluster_reader

    return run(args, read=cluster_reader(args.ray))


def run(args: argparse.Namespace, **site: Any) -> int:
    """Serve until a signal, or start a fleet in the background.

    Returns 1 if a model of a fleet in the background has failed or is pending. `site` has the arguments of
    `FleetPlanner` that choose a cluster. By default the fleet runs on this machine. Raises ConfigError, before anything
    starts, if the fleet does not fit.
    """
    from pathlib import Path

    from meltcore.common.process import loading_modules

    with loading_modules():
        from meltcore.cli.start_options import start_daemon
        from meltcore.fleet.admin.operations import check_startable_fleet
        from meltcore.fleet.daemon import PlannedFleet, fleet_options, serve_recorded
        from meltcore.fleet.plan.planned import FleetPlanner, print_unplanned

    path = Path(args.file).absolute()
    planner = FleetPlanner(path, **site)
    fleet = planner.config(print_unplanned)
    check_startable_fleet(
        fleet.spec
    )  # also where a process in the background makes them again: its errors are in a log
    if (status := start_daemon(args, fleet, PlannedFleet.of(planner))) is not None:
        return status
    return serve_recorded(fleet, "", fleet_options(planner))
