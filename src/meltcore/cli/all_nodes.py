"""Runs `meltcore snapshot`, `certify` or `bench` on all nodes of a Ray cluster, and reports on the nodes together."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.measure.documents.values.nodes import NodesReport


def add_ray_options(
    parser: argparse.ArgumentParser, default_limit: str, act: Callable[[argparse.Namespace], int]
) -> None:
    """Add the options `--ray` and `--node-limit`.

    Args:
        parser: the parser of the command.
        default_limit: text for the help that states the default time limit of a node.
        act: function that the command calls instead of its own `run` if --ray is given.
    """
    from meltcore.common.options import ActOption, not_empty, number

    group = parser.add_argument_group("several nodes")
    group.add_argument(
        "--ray",
        action=ActOption,
        const=act,
        type=not_empty,
        metavar="ADDRESS",
        help="Run on all nodes of a Ray cluster and compare them: auto, local or HOST:PORT.",
    )
    group.add_argument(
        "--node-limit",
        type=number(float, exclusive_minimum=0, maximum=3600 * 24 * 400),
        metavar="S",
        help=f"Seconds that a node may take (default: {default_limit}).",
    )


def refuse_with_ray(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if an option of `names` was given together with --ray, because it concerns a single node."""
    from meltcore.common.errors import ConfigError

    for name in names:
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for one node; it excludes --ray")


def run_on_all_nodes(
    args: argparse.Namespace,
    command: Sequence[str],
    *,
    limit_s: float,
    needs_gpu: bool = False,
    takes_gpus: bool = False,
    out: str | None = None,
) -> "NodesReport":
    """Run a command that prints one JSON document on all nodes. Print the report on the nodes, and return it.

    The report is also written to a run folder in `out`, as nodes.json and report.html. If `out` is None, no file is
    written. Raises ConfigError if the cluster cannot be reached, or if the command needs a GPU and no node has one.
    """
    import time
    from datetime import UTC, datetime

    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError
    from meltcore.common.files import write_document
    from meltcore.common.process import describe_exit
    from meltcore.fleet.ray.client import run_on_nodes
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.values.nodes import NODES_FILE, make_report
    from meltcore.measure.node.certify.judge import straggler_fraction
    from meltcore.measure.node.snapshot import shared_facts
    from meltcore.measure.report.nodes.nodes import nodes_page
    from meltcore.measure.report.page.console import print_document, print_page
    from meltcore.measure.report.page.html import write_page
    from meltcore.protocol.cluster import CommandEnded, RunOnNodes

    console = Console(stderr=args.json, highlight=False, soft_wrap=True)

    def announce(ended: CommandEnded) -> None:
        result = ended.reason if ended.returncode is None else describe_exit(ended.returncode)
        console.print(f"{ended.node}: {ended.status}, {result}", markup=False)

    request = RunOnNodes(
        list(command),
        args.node_limit or limit_s,
        needs_gpu=needs_gpu,
        takes_gpus=takes_gpus,
        has_folder=out is not None,
    )
    started, began_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    with signals_as_ctrl_c():
        ended = run_on_nodes(args.ray, request, announce)
    if all(each.status == "no GPU" for each in ended):
        raise ConfigError(f"--ray {args.ray}: no node of the cluster has an NVIDIA GPU")
    report = make_report(
        command[0], ended, shared_facts, straggler_fraction, started=started, duration_s=time.monotonic() - began_s
    )
    print_page(nodes_page(report), console)
    if out is not None:
        folder = RunFolder.create(out, f"{command[0]}-nodes")
        write_document(folder.path / NODES_FILE, report)
        console.print(f"report: {write_page(folder.report_path, nodes_page(report))}")
    if args.json:
        print_document(report)
    return report


def certificate_status(report: "NodesReport") -> int:
    """Return the exit status of the worst certificate: 0 PASS, 1 WARN, 2 FAIL or 3 UNKNOWN, as Nagios defines them.

    A node without a certificate counts as UNKNOWN, or as FAIL if its command has exited with FAIL. A node that is
    slower than the others, or differs from them, counts as WARN.
    """
    from meltcore.measure.documents.node import Certificate
    from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, worst_verdict

    verdicts: list[CheckVerdict] = [
        node.document.verdict for node in report.nodes if isinstance(node.document, Certificate)
    ]
    # A command whose GPU was lost before it could write a certificate says FAIL by its exit status.
    verdicts += ["FAIL" if node.returncode == MEANINGS["FAIL"].exit_code else "UNKNOWN" for node in report.failed]
    if report.slow or report.differences:
        verdicts.append("WARN")
    return MEANINGS[worst_verdict(verdicts, "UNKNOWN")].exit_code
