"""`meltcore ps`: list the engines of a fleet, with their states, memory and GPUs."""

import argparse
from typing import Any

_WIDTH = 240  # outside a terminal: a line per engine, for other programs
HELP = "List the engines of a fleet."
EXAMPLES = """\
  meltcore ps
  meltcore ps --nvml                    planned bytes beside those that NVML reports
  meltcore ps --json | jq '.[] | select(.state == "failed")'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the fleet and the format."""
    from meltcore.common.options import number

    parser.add_argument("--port", type=number(int), help="The fleet on this port (default: the only one).")
    parser.add_argument(
        "--nvml", action="store_true", help="Also what NVML reports of each engine, and of all GPUs against the plan."
    )
    parser.add_argument("--json", action="store_true", help="One JSON list, with an object per engine.")


def run(args: argparse.Namespace) -> int:
    """Print a line per engine. Returns 1 if a model cannot serve, else 0.

    Raises ConfigError if no fleet runs, and for --nvml if the engines are on the nodes of a cluster.
    """
    import json

    from meltcore.common.errors import ConfigError
    from meltcore.fleet.admin.admin import call_admin
    from meltcore.fleet.daemon import find_fleet

    rows = call_admin(find_fleet(args.port).admin, "GET", "/ps")
    total = None
    if args.nvml:
        if any(row["node"] is not None for row in rows):
            raise ConfigError("--nvml: NVML here shows this machine alone, and engines of the fleet run on other nodes")
        from meltcore.fleet.plan.measured import add_measured

        total = add_measured(rows)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    if total is not None and not args.json:
        print(total)
    return 1 if any(row["status"] != "ready" for row in rows) else 0


def _print_table(rows: list[dict[str, Any]]) -> None:
    import sys

    from rich.console import Console

    from meltcore.common.sizes import size_text
    from meltcore.measure.report.page.console import print_table
    from meltcore.measure.report.page.page import Cell, Column, Row, Table, numeric_columns

    measured = [name for name in ("with context", "NVML") if name in rows[0]] if rows else []
    on_nodes = any(row["node"] is not None for row in rows)
    columns = [Column(name, align="text") for name in ("model", "task", "state", *(["node"] if on_nodes else []))]
    columns += numeric_columns("pid", "memory", *measured, "restarts", "open requests", "port")
    lines = []
    for row in rows:
        num_replicas = sum(each["model"] == row["model"] for each in rows)
        model = f"{row['model']} ({row['replica']})" if num_replicas > 1 else row["model"]
        cells = [model, row["task"], row["state"], *([row["node"] or "-"] if on_nodes else [])]
        cells += [str(row["pid"] or "-"), size_text(row["memory_bytes"])]
        cells += ["-" if row[name] is None else size_text(row[name]) for name in measured]
        cells += [str(row[name]) for name in ("restarts", "open_requests", "port")]
        lines.append(Row([Cell(cell) for cell in cells]))
    width = None if sys.stdout.isatty() else _WIDTH
    print_table(Table(columns, lines), Console(highlight=False, width=width))
    for name, reason in dict.fromkeys((row["model"], row["reason"]) for row in rows if row["reason"]):
        print(reason if name in reason.split() else f"{name}: {reason}")
