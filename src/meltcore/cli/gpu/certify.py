"""`meltcore certify`: verify the hardware of this node, or name its faults."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

HELP = (
    "Check this node's GPUs: state, speed, links, collectives, sustained load, silent errors, inference. Each metric "
    "is compared with the topology, shipped values of the GPU type and a baseline of your own; the strictest counts. "
    "What is unreadable, zero or hangs is UNKNOWN and never passes. Changes no setting; needs no root, no compiler and "
    "no container."
)
EXAMPLES = """\
  meltcore certify                                   about a minute: quick
  meltcore certify --tier full
  meltcore certify --tier full --baseline runs/20261121T120000Z-certify/certificate.json
  meltcore certify --tier soak --hours 72
  meltcore certify --sign ~/.ssh/id_ed25519          `meltcore report --verify runs/...-certify` verifies it
  meltcore certify --gpu 0,3
  meltcore certify --ray auto                        all nodes of the Ray cluster that this machine belongs to

tiers and the checks that each requires:
  quick      60 s    state, gemm (bf16, one size), memory (copy), host, collectives (one all-reduce), system
  standard    5 min  state, gemm, memory, host, host_load, peers, collectives, sustained, corruption, pulse,
                     patterns, inference, system
  full       20 min  the same, with every dtype, shape and size, and longer
  soak      --hours  the same as full, with sustained and corruption for that long
What system cannot read without rights on the host makes the certificate UNKNOWN from full on.

exit status, as Nagios defines it: 0 PASS, 1 WARN, 2 FAIL, 3 UNKNOWN, interrupted, nothing to check, wrong usage
with --ray: that of the worst node; 1 also where a node is slow or unlike the others, 3 where one failed or was late
"""
EXIT_UNKNOWN = EXIT_ERROR = 3
# What a node may take at most: a probe on a slow GPU takes three times as long, and torch has to load.
_NODE_LIMITS_S = {"quick": 600.0, "standard": 1800.0, "full": 5400.0, "soak": 5400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meltcore certify`."""
    from meltcore.cli.all_nodes import add_ray_options
    from meltcore.common.options import number

    def exit_unknown(message: str) -> NoReturn:
        """Exit with UNKNOWN. argparse would exit with status 2, which a monitor reads as FAIL."""
        parser.print_usage(sys.stderr)
        parser.exit(EXIT_UNKNOWN, f"{parser.prog}: UNKNOWN: {message}\n")

    parser.error = exit_unknown  # type: ignore[method-assign]
    parser.add_argument(
        "--tier",
        choices=("quick", "standard", "full", "soak"),
        default="quick",
        help="Set of checks and their duration (default: quick).",
    )
    parser.add_argument(
        "--hours",
        type=number(float, exclusive_minimum=0, maximum=24 * 365),
        default=0.0,
        metavar="H",
        help="Duration of a soak.",
    )
    parser.add_argument(
        "--gpu", metavar="ID,...", help="GPU indices or UUIDs (default: CUDA_VISIBLE_DEVICES, or all GPUs)."
    )
    parser.add_argument(
        "--baseline",
        metavar="CERTIFICATE",
        help="Earlier certificate.json, or its folder, whose values become expectations.",
    )
    parser.add_argument(
        "--sign",
        metavar="KEY",
        help="SSH key that signs the certificate: a file without passphrase, or the public half of a key in the agent.",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="Parent of the run folder (default: runs).")
    parser.add_argument("--json", action="store_true", help="Print the certificate as JSON.")
    add_ray_options(
        parser, "600, 1800 and 5400 by tier; soak: 5400 and its hours", partial(run, certify=_certify_nodes)
    )


def _certify_nodes(args: argparse.Namespace) -> int:
    from meltcore.cli.all_nodes import certificate_status, refuse_with_ray, run_on_all_nodes
    from meltcore.measure.node.certify.checks.run import check_hours

    check_hours(args.tier, args.hours)
    refuse_with_ray(args, "gpu", "baseline", "sign")
    hours = ["--hours", f"{args.hours!r}"] if args.hours else []
    limit_s = _NODE_LIMITS_S[args.tier] + 3600 * args.hours
    command = ["certify", "--json", "--tier", args.tier, *hours]
    return certificate_status(
        run_on_all_nodes(args, command, limit_s=limit_s, needs_gpu=True, takes_gpus=True, out=args.out)
    )


def _certify(args: argparse.Namespace) -> int:
    from contextlib import suppress

    from pynvml import NVMLError
    from rich.console import Console

    from meltcore.cli.output import OutputError
    from meltcore.common.errors import MeltcoreError
    from meltcore.common.gpus.driver import Nvml, connect
    from meltcore.common.gpus.select import select_gpus
    from meltcore.measure.documents.node import CERTIFICATE_FILE, CheckReport, read_certificate
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.signature import check_key, sign
    from meltcore.measure.node.certify.checks.run import certify, check_hours
    from meltcore.measure.node.certify.expectations import make_baseline
    from meltcore.measure.node.node import Node
    from meltcore.measure.report.nodes.certificate import certificate_page, check_line
    from meltcore.measure.report.page.console import print_blocks, print_document, print_page
    from meltcore.measure.report.render import save_document

    check_hours(args.tier, args.hours)
    baseline = make_baseline(read_certificate(args.baseline)) if args.baseline else None
    if args.sign:
        check_key(args.sign)
    node = Node(connect(Nvml))
    gpus = select_gpus(node.nvml, args.gpu)
    if silent := [gpu.info.label for gpu in gpus if not gpu.info.answers]:
        others = ",".join(str(gpu.info.index) for gpu in gpus if gpu.info.answers)
        rest = f"; certify the others with --gpu {others}" if others else ""
        raise MeltcoreError(f"the driver does not answer about {', '.join(silent)}; look in the kernel log{rest}")
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False, soft_wrap=True)

    def print_report(report: CheckReport) -> None:
        with suppress(OutputError):  # the page below fails likewise, when the certificate is written
            print_blocks([check_line(report)], console)

    with RunFolder.create_or_remove(args.out, "certify") as folder:
        try:
            with console.status("reading the GPUs") as status:
                certificate = certify(
                    node,
                    gpus,
                    args.tier,
                    folder.path,
                    hours=args.hours,
                    baseline=baseline,
                    on_start=status.update,
                    on_report=print_report,
                )
        finally:
            with suppress(NVMLError):  # the process ends soon, whether the driver answers or not
                node.nvml.close()
    save_document(folder.path / CERTIFICATE_FILE, certificate)
    print_page(certificate_page(certificate, folder.path), console)
    if args.json:
        print_document(certificate)
    if args.sign:
        sign(folder.path / CERTIFICATE_FILE, args.sign)
    return certificate.exit_code


def run(args: argparse.Namespace, certify: Callable[[argparse.Namespace], int] = _certify) -> int:
    """Run the command. Every failure exits with UNKNOWN, because a monitor reads status 1 as WARN and 2 as FAIL."""
    import traceback

    from pynvml import NVMLError

    from meltcore.cli.output import OutputError
    from meltcore.cli.signals import drop_unfinished, signals_as_ctrl_c
    from meltcore.common.errors import MeltcoreError
    from meltcore.common.gpus.driver import GpuLostError
    from meltcore.measure.documents.verdicts import MEANINGS

    try:
        with signals_as_ctrl_c():
            return certify(args)
    except GpuLostError as error:
        print(f"meltcore certify: FAIL: {error}", file=sys.stderr)
        return MEANINGS["FAIL"].exit_code
    except (MeltcoreError, NVMLError) as error:
        print(f"meltcore certify: UNKNOWN: {error}", file=sys.stderr)
    except KeyboardInterrupt as interrupt:  # with --ray, or before anything was measured
        drop_unfinished(interrupt)
        print("meltcore certify: UNKNOWN: interrupted", file=sys.stderr)
    except OutputError:
        raise
    except Exception:
        traceback.print_exc()
    return EXIT_UNKNOWN
