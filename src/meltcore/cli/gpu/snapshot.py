"""`meltcore snapshot`: describe this machine, or list its changes since an earlier snapshot."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.measure.documents.node import Snapshot

HELP = (
    "Describe this machine: host, driver, versions, topology, and for every GPU of the job its firmware, limits, "
    "clocks, PCIe, NVLinks, ECC and remapped rows. No host name, no path. With --diff: what changed."
)
EXAMPLES = """\
  meltcore snapshot
  meltcore snapshot --json > machine.json
  meltcore snapshot --diff machine.json
  meltcore snapshot --diff runs/20261121T120000Z-certify/certificate.json
  meltcore snapshot --ray auto        all nodes of the Ray cluster that this machine belongs to

exit status of --diff: 0 no difference, 1 some, 2 error
exit status of --ray: 0 nodes with the same GPUs are alike, 1 some differ, 2 a node failed or was late, or error
"""
EXIT_CHANGED = 1
_NODE_LIMIT_S = 120.0  # NVML takes up to 60 s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meltcore snapshot`."""
    from meltcore.cli.all_nodes import add_ray_options

    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="Print JSON, which --diff reads.")
    form.add_argument(
        "--diff", metavar="OLD.json", help="Print what changed since that snapshot or certificate; GPUs match by UUID."
    )
    parser.add_argument(
        "--gpu", metavar="ID,...", help="GPU indices or UUIDs (default: CUDA_VISIBLE_DEVICES, or all GPUs)."
    )
    add_ray_options(parser, f"{_NODE_LIMIT_S:g}", _run_on_nodes)


def run(args: argparse.Namespace) -> int:
    """Print the snapshot, or the changes since an earlier snapshot, and return the exit code."""
    from meltcore.measure.node.snapshot import diff_snapshots, snapshot_lines
    from meltcore.measure.report.page.console import print_document

    snapshot = _take_snapshot(args.gpu)
    if args.diff:
        changes = diff_snapshots(_read_snapshot(args.diff), snapshot)
        print("\n".join(changes) if changes else "no difference")
        return EXIT_CHANGED if changes else 0
    if args.json:
        print_document(snapshot)
    else:
        print("\n".join(snapshot_lines(snapshot)))
    return 0


def _run_on_nodes(args: argparse.Namespace) -> int:
    from meltcore.cli.all_nodes import refuse_with_ray, run_on_all_nodes

    refuse_with_ray(args, "diff", "gpu")
    return run_on_all_nodes(args, ["snapshot", "--json"], limit_s=_NODE_LIMIT_S).exit_code


def _take_snapshot(requested: str | None) -> "Snapshot":
    """Take the snapshot. Without a driver it has no GPUs and a note that says so."""
    from contextlib import suppress

    from pynvml import NVMLError

    from meltcore.common.errors import MeltcoreError
    from meltcore.common.gpus.driver import NoDriverError, Nvml, connect
    from meltcore.common.gpus.select import select_gpus
    from meltcore.measure.documents.fingerprint import take_fingerprint
    from meltcore.measure.documents.node import Snapshot
    from meltcore.measure.node.node import Node
    from meltcore.measure.node.snapshot import take_snapshot

    try:
        nvml = connect(Nvml)
    except NoDriverError as error:
        if requested is not None:
            raise
        return Snapshot(fingerprint=take_fingerprint(), notes=[str(error)])
    try:
        return take_snapshot(Node(nvml), select_gpus(nvml, requested))
    except NVMLError as error:
        raise MeltcoreError(f"the NVIDIA driver does not list its GPUs: {error}") from error
    finally:
        with suppress(NVMLError):  # the process ends soon, whether the driver answers or not
            nvml.close()


def _read_snapshot(path: str) -> "Snapshot":
    """Read a snapshot from its own file, or from a certificate. Raises ConfigError if the file is neither of them."""
    from pathlib import Path

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.node import Certificate, Snapshot
    from meltcore.measure.documents.values.documents import open_document

    content = open_document(Path(path)).content
    if isinstance(content, Certificate):
        return content.snapshot
    if not isinstance(content, Snapshot):
        raise ConfigError(f"{path} holds no snapshot: pass the output of meltcore snapshot --json, or a certificate")
    return content
