"""`meltcore stop`: end servers started with `serve --daemon`."""

import argparse

HELP = "end a server started with serve --daemon"
EXAMPLES = """\
  meltcore stop                  the one that runs
  meltcore stop --port 8080      one of several
  meltcore stop --all
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--port", type=int, help="the server on this port")
    which.add_argument("--all", action="store_true", help="every server")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="how long to wait for it to drain (60)"
    )


def run(args: argparse.Namespace) -> int:
    from meltcore.errors import ConfigError
    from meltcore.server.daemon import running, stop

    servers = running()
    if args.port is not None:
        servers = [server for server in servers if server.port == args.port]
    if not servers:
        where = "" if args.port is None else f" on port {args.port}"
        raise ConfigError(f"no server started with --daemon is running{where}")
    if len(servers) > 1 and not args.all:
        ports = ", ".join(str(server.port) for server in servers)
        raise ConfigError(f"{len(servers)} servers are running, on ports {ports}; name one with --port, or --all")
    return stop(servers, args.timeout)
