"""`meltcore snapshot`: what this machine is, or what changed since it was last looked at."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.results.snapshot import Snapshot

HELP = (
    "Print what this machine is: host, driver, versions, and of every GPU the job may use its firmware, limits, "
    "clocks, PCIe and NVLinks, ECC, remapped rows, and topology. No host name, no path. With --diff: what changed."
)
EXAMPLES = """\
  meltcore snapshot
  meltcore snapshot --json > machine.json
  meltcore snapshot --diff machine.json
  meltcore snapshot --diff runs/20261121T120000Z-certify/certificate.json

exit status of --diff: 0 nothing drifted, 1 something did, 2 could not
"""
EXIT_DRIFTED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON, as --diff reads it")
    form.add_argument(
        "--diff", metavar="OLD.json", help="say what changed since that snapshot or certificate; GPUs match by UUID"
    )
    parser.add_argument(
        "--gpu", metavar="ID,...", help="indices or UUIDs (default: CUDA_VISIBLE_DEVICES, or all of them)"
    )


def run(args: argparse.Namespace) -> int:
    import msgspec

    from meltcore.hardware.snapshot_lines import snapshot_lines

    now = _take(args.gpu)
    if args.diff:
        return _diff(args.diff, now)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(now), indent=2).decode())
    else:
        print("\n".join(snapshot_lines(now)))
    return 0


def _take(wanted: str | None) -> "Snapshot":
    """A machine without a driver has a snapshot too: one without GPUs, which says so."""
    from contextlib import suppress

    from pynvml import NVMLError

    from meltcore.errors import MeltcoreError
    from meltcore.hardware.node import Node
    from meltcore.hardware.nvml import NoDriverError, Nvml
    from meltcore.hardware.patient import patiently
    from meltcore.hardware.select import select_gpus
    from meltcore.hardware.snapshot import take_snapshot
    from meltcore.results.fingerprint import take_fingerprint
    from meltcore.results.snapshot import Snapshot

    try:
        nvml = patiently(Nvml)
    except NoDriverError as error:
        if wanted is not None:
            raise
        return Snapshot(fingerprint=take_fingerprint(), notes=[str(error)])
    try:
        return take_snapshot(Node(nvml), select_gpus(nvml, wanted))
    except NVMLError as error:
        raise MeltcoreError(f"the NVIDIA driver does not say which GPUs there are: {error}") from error
    finally:
        with suppress(NVMLError):  # the process ends soon, with the driver or without it
            nvml.close()


def _diff(path: str, now: "Snapshot") -> int:
    from meltcore.hardware.drift import drift

    changes = drift(_snapshot_of(path), now)
    print("\n".join(changes) if changes else "nothing drifted")
    return EXIT_DRIFTED if changes else 0


def _snapshot_of(path: str) -> "Snapshot":
    """Of a snapshot's file, or of a certificate's, which holds one. Raises ConfigError."""
    from pathlib import Path

    from meltcore.errors import ConfigError
    from meltcore.report.documents import read_document
    from meltcore.results.certificate import Certificate
    from meltcore.results.snapshot import Snapshot

    content = read_document(Path(path)).content
    if isinstance(content, Certificate):
        return content.snapshot
    if not isinstance(content, Snapshot):
        raise ConfigError(f"{path} holds no snapshot: give what meltcore snapshot --json printed, or a certificate")
    return content
