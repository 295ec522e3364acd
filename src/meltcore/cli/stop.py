"""`meltcore stop`: end servers started with `serve --daemon`."""

import argparse

HELP = "End a server started with serve --daemon."
EXAMPLES = """\
  meltcore stop                  the only one that runs
  meltcore stop --port 8080      one of several
  meltcore stop --all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select servers."""
    from meltcore.common.options import number

    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--port", type=number(int), help="The server on this port.")
    selection.add_argument("--all", action="store_true", help="Every server.")
    parser.add_argument(
        "--timeout", type=number(float), default=60.0, metavar="S", help="Time for it to drain and exit (default: 60)."
    )


def run(args: argparse.Namespace) -> int:
    """End the selected servers. Returns 1 if a server has not ended, else 0.

    Raises ConfigError if no server matches, or if several match without --all.
    """
    from meltcore.common.errors import ConfigError
    from meltcore.fleet.daemon import OneModel, running, stop

    servers = running(OneModel.command)
    if args.port is not None:
        servers = [server for server in servers if server.port == args.port]
    if not servers:
        port_note = "" if args.port is None else f" on port {args.port}"
        raise ConfigError(f"no server started with --daemon is running{port_note}")
    if len(servers) > 1 and not args.all:
        ports = ", ".join(str(server.port) for server in servers)
        raise ConfigError(f"{len(servers)} servers are running, on ports {ports}; name one with --port, or --all")
    return stop(servers, args.timeout)
