"""`meltcore logs`: print the output of a fleet's engines."""

import argparse

HELP = "Print or follow the logs of a fleet's engines."
EXAMPLES = """\
  meltcore logs              all engines and the server
  meltcore logs gemma -f     those of one model, until Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the options that select the fleet and the lines."""
    from meltcore.common.options import number

    parser.add_argument("model", nargs="?", metavar="MODEL", help="Its name or an alias (default: all)")
    parser.add_argument("-f", "--follow", action="store_true", help="Print new lines until Ctrl-C.")
    parser.add_argument(
        "-n", "--lines", type=number(int, minimum=0), metavar="N", help="The last N lines of each file (default: all)."
    )
    parser.add_argument("--port", type=number(int), help="The fleet on this port, also one that has ended.")


def run(args: argparse.Namespace) -> int:
    """Print the logs. Raises ConfigError if there is no log."""
    from meltcore.fleet.daemon import PlannedFleet, engine_rows, find_fleet, running, state_dir
    from meltcore.fleet.run.logs import find_logs, log_folder, print_logs

    port, server_log, aliases = args.port, "", dict[str, list[str]]()
    if port is None or any(record.port == port for record in running(PlannedFleet.command)):
        record = find_fleet(port)
        port, server_log = record.port, record.log
        aliases = {row["model"]: row["aliases"] for row in engine_rows(record)}
    logs = find_logs(log_folder(state_dir(), port), server_log, args.model, aliases)
    print_logs(logs, args.lines, follow=args.follow, out=lambda line: print(line, flush=args.follow))
    return 0
