"""`meltcore up`: serve all models of a fleet.yaml."""

import argparse

HELP = "serve all models of a fleet.yaml behind one address"
EXAMPLES = """\
  meltcore up                           ./fleet.yaml, until Ctrl-C
  meltcore up my-fleet.yaml --daemon    in the background; `meltcore down` ends it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the options of a fleet in the background."""
    from meltcore.cli.start_options import add_daemon_options

    parser.add_argument("file", nargs="?", default="fleet.yaml", metavar="FILE", help="default: fleet.yaml")
    add_daemon_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or start a fleet in the background: then 1 where a model has failed.

    Raises ConfigError, before anything starts, for a fleet that does not fit.
    """
    from pathlib import Path

    from meltcore.cli.start_options import start_daemon
    from meltcore.fleet.daemon import serve_recorded
    from meltcore.fleet.planned import planned_config

    path = Path(args.file).absolute()
    config = planned_config(path)
    if (status := start_daemon(args, config, path)) is not None:
        return status
    return serve_recorded(config, "", path)
