"""`meltcore certify`: prove the hardware of this node, or name what is wrong with it."""

import argparse
import sys
from typing import NoReturn

HELP = (
    "Check this node's GPUs: state, speed, links, collectives, heat, silent errors, inference. Each figure is held "
    "against the topology, shipped figures of the product and your own baseline; the strictest counts. What cannot be "
    "read, or is zero, or hangs, is UNKNOWN and never passes. Changes no setting; needs no root, compiler or container."
)
EXAMPLES = """\
  meltcore certify                                   about a minute: quick
  meltcore certify --tier full
  meltcore certify --tier full --baseline runs/20261121T120000Z-certify/certificate.json
  meltcore certify --tier soak --hours 72
  meltcore certify --gpu 0,3

tiers and the checks that each requires:
  quick      60 s    state, product (bf16, one size), memory (copy), host, collectives (one all-reduce)
  standard    5 min  state, product, memory, host, peers, collectives, sustained, corruption, inference
  full       20 min  the same, with every type, shape and size, and longer
  soak      --hours  the same as full, with sustained and corruption for that long

exit status, as Nagios has it: 0 PASS, 1 WARN, 2 FAIL, 3 UNKNOWN, interrupted, nothing to check, wrong usage
"""
EXIT_UNKNOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def refuse(message: str) -> NoReturn:
        """In place of argparse's own, whose 2 a monitor would read as FAIL."""
        parser.print_usage(sys.stderr)
        parser.exit(EXIT_UNKNOWN, f"{parser.prog}: UNKNOWN: {message}\n")

    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--tier", choices=("quick", "standard", "full", "soak"), default="quick", help="default: quick")
    parser.add_argument("--hours", type=_positive, default=0.0, metavar="H", help="how long a soak takes")
    parser.add_argument(
        "--gpu", metavar="ID,...", help="indices or UUIDs (default: CUDA_VISIBLE_DEVICES, or all of them)"
    )
    parser.add_argument(
        "--baseline",
        metavar="CERTIFICATE",
        help="an earlier certificate.json or its folder: hold figures against its own",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="where the run folder goes (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")


def run(args: argparse.Namespace) -> int:
    """Whatever stops it is UNKNOWN: a monitor would read the 1 of a crash as WARN, and the 2 of an error as FAIL."""
    import traceback

    from pynvml import NVMLError

    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.errors import MeltcoreError
    from meltcore.hardware.nvml import GpuLostError
    from meltcore.results.certificate import EXIT_CODES

    try:
        with signals_as_ctrl_c():
            return _certify(args)
    except GpuLostError as error:
        print(f"meltcore certify: FAIL: {error}", file=sys.stderr)
        return EXIT_CODES["FAIL"]
    except (MeltcoreError, NVMLError) as error:
        print(f"meltcore certify: UNKNOWN: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return EXIT_UNKNOWN


def _certify(args: argparse.Namespace) -> int:
    from contextlib import suppress

    import msgspec
    from pynvml import NVMLError
    from rich.console import Console

    from meltcore.hardware.certify import certify, check_hours
    from meltcore.hardware.expect import make_baseline
    from meltcore.hardware.node import Node
    from meltcore.hardware.nvml import Nvml
    from meltcore.hardware.patient import patiently
    from meltcore.hardware.select import select_gpus
    from meltcore.report.certificate_output import print_certificate, print_report
    from meltcore.report.certificate_page import save_certificate
    from meltcore.results.certificate import read_certificate
    from meltcore.results.runfolder import RunFolder

    check_hours(args.tier, args.hours)
    baseline = make_baseline(read_certificate(args.baseline)) if args.baseline else None
    node = Node(patiently(Nvml))
    gpus = select_gpus(node.nvml, args.gpu)
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False, soft_wrap=True)
    with RunFolder.kept_if_used(args.out, "certify") as folder:
        try:
            with console.status("looking at the GPUs") as status:
                certificate = certify(
                    node,
                    gpus,
                    args.tier,
                    folder.path,
                    hours=args.hours,
                    baseline=baseline,
                    begun=status.update,
                    told=lambda report: print_report(report, console),
                )
        finally:
            with suppress(NVMLError):  # the process ends soon, with the driver or without it
                node.nvml.close()
    save_certificate(folder.path, certificate)
    print_certificate(certificate, folder.path, console)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(certificate), indent=2).decode())
    return certificate.exit_code


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 24 * 365:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours above 0")
    return number
