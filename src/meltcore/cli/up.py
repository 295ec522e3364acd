"""`meltcore up`: serve all models of a fleet.yaml."""

import argparse

HELP = "serve all models of a fleet.yaml behind one address"
EXAMPLES = """\
  meltcore up                           ./fleet.yaml, until Ctrl-C
  meltcore up my-fleet.yaml --daemon    in the background; `meltcore down` ends it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the options of a fleet in the background."""
    from meltcore.options import number

    parser.add_argument("file", nargs="?", default="fleet.yaml", metavar="FILE", help="default: fleet.yaml")
    parser.add_argument("--daemon", action="store_true", help="Start, wait until each model is ready or has failed.")
    parser.add_argument("--log", metavar="FILE", help="Output of a --daemon (default: a new file, printed).")
    parser.add_argument(
        "--start-timeout",
        type=number(float, exclusive_minimum=0),
        metavar="S",
        help="Time for a --daemon to become ready, else it is ended (default: no limit).",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or start a fleet in the background: then 1 where a model has failed.

    Raises ConfigError, before anything starts, for a fleet that does not fit.
    """
    from pathlib import Path

    from meltcore.errors import ConfigError
    from meltcore.fleet.daemon import serve_recorded, start
    from meltcore.fleet.planned import planned_config

    path = Path(args.file).absolute()
    config = planned_config(path)
    if args.daemon:
        from meltcore.cli.signals import signals_as_ctrl_c

        with signals_as_ctrl_c():  # or a half-started fleet would be left, in a session of its own
            return start(config, log=args.log, limit_s=args.start_timeout, fleet=path)
    if args.log is not None or args.start_timeout is not None:
        raise ConfigError("--log and --start-timeout are for a fleet in the background: add --daemon")
    return serve_recorded(config, "", path)
