"""`meltcore profile`: find when and why a GPU was idle, from the trace of a profiler."""

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from meltcore.measure.experiments.servers import ApiResponse

HELP = (
    "Read a trace of the torch profiler or an SQLite export of Nsight Systems and report when the GPU did not compute, "
    "and why: late launch, synchronization, exposed copy or communication, no work; by size, between which kernels, "
    "and how much of a step each group of kernels takes. With --url, record a live server first; "
    "with --nsys, a command."
)
EXAMPLES = """\
  meltcore profile trace.json.gz
  meltcore profile report.nsys-rep                             where nsys is installed; elsewhere its export, .sqlite
  meltcore profile trace.json --from-ms 200 --to-ms 800 --page gaps.html
  meltcore profile trace.json --step _first_maximum_kernel     each of these kernels marks a step
  meltcore profile --url http://127.0.0.1:8000 --seconds 5     a server started with --profile-dir, under load
  meltcore profile --url http://127.0.0.1:8000 --gpu 0         checked by the GPU's own counters
  meltcore profile --nsys -- python train.py                   runs it under Nsight Systems, from start to end
  meltcore profile --nsys --url http://127.0.0.1:8000 -- meltcore serve MODEL --profiler cuda
                                                               5 seconds of a server; send it requests meanwhile

exit status: 0 done, 1 the trace is incomplete
"""

EXIT_UNTRUSTED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from meltcore.common.options import add_options, number
    from meltcore.measure.trace.gaps import ProfileOptions

    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Trace of torch (.json, .json.gz) or of Nsight Systems (.nsys-rep, .sqlite).",
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="With --nsys, after --: the command to record.")
    nsys = parser.add_argument_group("Nsight Systems")
    nsys.add_argument(
        "--nsys", action="store_true", help="Run COMMAND under nsys; with --url, record that server for --seconds."
    )
    nsys.add_argument(
        "--nsys-timeout",
        type=number(float, exclusive_minimum=0),
        default=900.0,
        metavar="S",
        help="Time limit of COMMAND under nsys; with --url, also of the server's start (default: 900).",
    )
    nsys.add_argument("--out", default="runs", metavar="DIR", help="Folder for the report of nsys (default: runs).")
    server = parser.add_argument_group("server")
    server.add_argument("--url", metavar="URL", help="Record a trace of this server, which must run on this machine.")
    server.add_argument(
        "--seconds",
        type=number(float, exclusive_minimum=0),
        default=5.0,
        metavar="S",
        help="Duration of the recording (default: 5).",
    )
    server.add_argument("--gpu", metavar="ID", help="GPU whose own counters are read meanwhile, to check the trace.")
    server.add_argument("--api-key", metavar="KEY", help="API key of the server.")
    add_options(parser, ProfileOptions)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--page", metavar="FILE", help="Path of the page; its JSON goes beside it (default: gaps.html)."
    )
    output.add_argument("--json", action="store_true", help="Print the reports as JSON instead of tables.")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from datetime import UTC, datetime
    from pathlib import Path

    from rich.console import Console

    from meltcore.common.errors import ConfigError
    from meltcore.common.options import from_options
    from meltcore.measure.documents.fingerprint import take_fingerprint
    from meltcore.measure.documents.gaps import GAPS_PAGE, GpuProfile
    from meltcore.measure.report.nodes.profile import profile_page
    from meltcore.measure.report.page.console import print_document, print_page
    from meltcore.measure.report.render import save_document
    from meltcore.measure.trace.gaps import ProfileOptions, analyze_trace
    from meltcore.measure.trace.read import read_trace

    if args.nsys:
        path = _record_nsys(args)
    elif args.command:
        raise ConfigError(f"profile takes one TRACE, or --nsys with a command; got {args.trace} {args.command[0]} ...")
    elif (args.trace is None) == (args.url is None):
        raise ConfigError("profile takes a TRACE, or --url of a server to record")
    elif args.trace:
        path = Path(args.trace)
    else:
        path, active_percent = _record(args)
        args.active_percent = active_percent if args.active_percent is None else args.active_percent
    profile = GpuProfile(
        source=path.name,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        # A file does not say which machine it is from.
        fingerprint=take_fingerprint() if args.url or args.nsys else None,
        reports=analyze_trace(read_trace(path), from_options(ProfileOptions, args)),
    )
    page_path = Path(args.page) if args.page else path.parent / GAPS_PAGE
    save_document(page_path.with_suffix(".json"), profile, page_path)
    console = Console(stderr=args.json)
    if args.json:
        print_document(profile)
    else:
        print_page(profile_page(profile), console)
    console.print(f"page: {page_path}", highlight=False, soft_wrap=True)
    return EXIT_UNTRUSTED if any(report.untrusted for report in profile.reports) else 0


def _record_nsys(args: argparse.Namespace) -> "Path":
    """Run the command under nsys, and return the path of the exported report.

    Raises ConfigError if nsys cannot run, or if it leaves no report.
    """
    import time
    from pathlib import Path

    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError
    from meltcore.common.process import LoggedProcess
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.experiments.servers import ApiError, is_healthy
    from meltcore.measure.trace.nsys import find_nsys, record

    command = [*([args.trace] if args.trace else []), *args.command]
    if not command:
        raise ConfigError("--nsys needs a command after --: meltcore profile --nsys -- COMMAND...")
    if args.gpu is not None:
        raise ConfigError("--gpu is for --url without --nsys: nsys itself takes the counters that it would read")
    find_nsys()  # before a folder is created
    if args.url and is_healthy(args.url, args.api_key):
        raise ConfigError(f"a server answers at {args.url} already; nsys records only what it has started itself")
    console = Console(stderr=True)

    def report(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    def mark(server: LoggedProcess) -> None:
        server.wait_for(lambda: is_healthy(args.url, args.api_key) or None, args.nsys_timeout, f"serve {args.url}")
        post = _poster(args, "--profiler cuda")
        post("/start_profile")
        try:
            time.sleep(args.seconds)
        finally:
            # The end of the range ends the server, often before it answers. What nsys leaves says whether it worked.
            with suppress(ApiError):
                post("/stop_profile")

    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, "nsys") as folder:
        report(f"recording under nsys into {folder.path}")
        return record(
            command,
            Path(folder.path),
            limit_s=args.nsys_timeout,
            report=report,
            mark=mark if args.url else None,
        )


def _poster(args: argparse.Namespace, option: str) -> "Callable[[str], ApiResponse]":
    """Return a function that posts to a path of the server.

    The function raises ConfigError if the server does not accept the request.
    """
    from meltcore.common.errors import ConfigError
    from meltcore.measure.experiments.servers import Api, ApiResponse

    api = Api(args.url, api_key=args.api_key)

    def post(path: str) -> ApiResponse:
        reply = api.post(path, b"")
        if reply.status != 200:
            raise ConfigError(
                f"{path} returned {reply.status}: {reply.body[:200].decode(errors='replace')}; start our server with "
                f"{option} to offer it"
            )
        return reply

    return post


def _record(args: argparse.Namespace) -> "tuple[Path, float | None]":
    """Let the server record a trace. Return the trace's path, and the mean SM activity of the GPU --gpu in percent.

    Without --gpu the activity is None. Raises ConfigError if the server cannot record a trace.
    """
    import time
    from contextlib import ExitStack
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError
    from meltcore.measure.node.monitor.recording import mean_sm_activity
    from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings

    post = _poster(args, "--profile-dir DIR")
    with signals_as_ctrl_c(), ExitStack() as stack:
        monitor = None
        if args.gpu is not None:
            folder = stack.enter_context(TemporaryDirectory())
            monitor = stack.enter_context(Monitor(SamplerSettings(path=f"{folder}/gpus.jsonl", gpus=args.gpu)))
        post("/start_profile")
        start_s = time.monotonic()
        try:
            time.sleep(args.seconds)
            end_s = time.monotonic()
        finally:
            stop_reply = post("/stop_profile")
        activity = None if monitor is None else mean_sm_activity(monitor.stop(), start_s, end_s)
    path = stop_reply.json().get("path")
    if not path:
        raise ConfigError("the server does not report the path of its trace: give the file itself")
    return Path(path), None if activity is None else 100 * activity
