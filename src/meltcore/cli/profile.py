"""`meltcore profile`: where a GPU was idle, and why, from a profiler's trace."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HELP = (
    "Read a trace of the torch profiler, or an SQLite export of Nsight Systems, and say where the GPU was not "
    "computing, and why: host late, synchronisation, copy, collective wait, no work; by size, between which kernels, "
    "and what of a step each group of kernels takes. With --url it first records a live server."
)
EXAMPLES = """\
  meltcore profile trace.json.gz
  meltcore profile report.nsys-rep                             where nsys is installed; elsewhere its export, .sqlite
  meltcore profile trace.json --from-ms 200 --to-ms 800 --page gaps.html
  meltcore profile trace.json --step _first_maximum_kernel     one of these kernels is one step
  meltcore profile --url http://127.0.0.1:8000 --seconds 5     a server started with --profile-dir, under load
  meltcore profile --url http://127.0.0.1:8000 --gpu 0         checked by the GPU's own counters

exit status: 0 done, 1 the trace holds less than the GPU did
"""

EXIT_UNTRUSTED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE", help="of torch, .json or .json.gz, or of nsys, .nsys-rep or .sqlite"
    )
    parser.add_argument(
        "--url", metavar="URL", help="record a trace of this server instead; it must run on this machine"
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long to record (default: 5)")
    parser.add_argument(
        "--gpu", metavar="ID", help="of --url: read this GPU's own counters meanwhile, to check the trace"
    )
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--device", type=int, metavar="N", help="one GPU of the trace (default: all)")
    parser.add_argument("--from-ms", type=float, metavar="MS", help="from this long after the first activity")
    parser.add_argument("--to-ms", type=float, metavar="MS", help="until this long after the first activity")
    parser.add_argument(
        "--step", metavar="NAME", help="count as a step each kernel or range of which the name begins so"
    )
    parser.add_argument(
        "--active-percent", type=float, metavar="PERCENT", help="SM activity meanwhile, as --gpu reads it"
    )
    parser.add_argument("--page", metavar="FILE", help="where the page goes, and its JSON beside it (gaps.html)")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    from datetime import UTC, datetime
    from pathlib import Path

    import msgspec
    from rich.console import Console

    from meltcore.errors import ConfigError
    from meltcore.forensics.profile import Wanted, profile
    from meltcore.forensics.read import read_trace
    from meltcore.report.gaps_output import print_gaps
    from meltcore.report.gaps_page import save_profile
    from meltcore.results.fingerprint import take_fingerprint
    from meltcore.results.gaps import GAPS_PAGE, Profile

    if (args.trace is None) == (args.url is None):
        raise ConfigError("profile takes a TRACE, or --url of a server to record")
    _check(args)
    activity = None if args.active_percent is None else args.active_percent / 100
    if args.trace:
        path = Path(args.trace)
    else:
        path, seen = _record(args)
        activity = seen if activity is None else activity
    wanted = Wanted(device=args.device, from_ms=args.from_ms, to_ms=args.to_ms, activity_share=activity, step=args.step)
    found = Profile(
        source=path.name,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=take_fingerprint() if args.url else None,  # a file does not say which machine it is of
        reports=profile(read_trace(path), wanted),
    )
    page = Path(args.page) if args.page else path.parent / GAPS_PAGE
    save_profile(page, found)
    console = Console(stderr=args.json)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print_gaps(found.reports, console)
    console.print(f"page: {page}", highlight=False, soft_wrap=True)
    return EXIT_UNTRUSTED if any(report.untrusted for report in found.reports) else 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number that is no time, or no share."""
    import math

    from meltcore.errors import ConfigError

    if not 0 < args.seconds < math.inf:
        raise ConfigError(f"--seconds must be more than 0; got {args.seconds:g}")
    for name in ("from_ms", "to_ms"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more; got {value:g}")
    if args.active_percent is not None and not 0 <= args.active_percent <= 100:
        raise ConfigError(f"--active-percent must lie between 0 and 100; got {args.active_percent:g}")


def _record(args: argparse.Namespace) -> "tuple[Path, float | None]":
    """Have the server record: the path of its trace, and what share of the time --gpu was active meanwhile.

    Raises ConfigError where the server does not offer that.
    """
    import time
    from contextlib import ExitStack
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.errors import ConfigError
    from meltcore.evals.api import Api, Reply
    from meltcore.hardware.monitor import Monitor
    from meltcore.hardware.sampler import Setup
    from meltcore.hardware.under_load import mean_activity

    api = Api(args.url, api_key=args.api_key)

    def ask(what: str) -> Reply:
        reply = api.post(what, b"")
        if reply.status != 200:
            raise ConfigError(
                f"{what} says {reply.status}: {reply.body[:200].decode(errors='replace')}; our server offers it with "
                f"--profile-dir DIR"
            )
        return reply

    with signals_as_ctrl_c(), ExitStack() as stack:
        monitor = None
        if args.gpu is not None:
            folder = stack.enter_context(TemporaryDirectory())
            monitor = stack.enter_context(Monitor(Setup(path=f"{folder}/gpus.jsonl", gpus=args.gpu)))
        ask("/start_profile")
        begun_s = time.monotonic()
        try:
            time.sleep(args.seconds)
            ended_s = time.monotonic()
        finally:
            done = ask("/stop_profile")
        activity = None if monitor is None else mean_activity(monitor.stop(), begun_s, ended_s)
    path = done.json().get("path")
    if not path:
        raise ConfigError("the server does not say where its trace is: give the file itself")
    return Path(path), activity
