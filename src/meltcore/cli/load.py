"""`meltcore load`: send load to an OpenAI-compatible server, and measure the server."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.schema import FleetLevel, FleetLoad, RunResult
    from meltcore.measure.load.config import LoadConfig, Timeouts
    from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig

HELP = "Load an OpenAI-compatible server and measure throughput and latency: chat, translation, transcription, speech."

EXAMPLES = """\
  meltcore load http://127.0.0.1:8000 --concurrency 10,100,400
  meltcore load http://127.0.0.1:8000 --concurrency 10000 --num-prompts 10000 --processes 2
  meltcore load http://127.0.0.1:8000 --request-rate 5,10,20 --arrivals poisson --goodput ttft:2000,tpot:100
  meltcore load http://127.0.0.1:8000 --workload random:in=128-1024,out=128 --num-prompts 500
  meltcore load http://127.0.0.1:8000 --concurrency 1,32 --monitor
  meltcore load http://127.0.0.1:8000 --fleet --levels 10,100,400   every model of a fleet, alone and mixed
  meltcore load http://127.0.0.1:8000 --fleet --parts interference --interference experiment.yaml
  meltcore load https://api.example.com --model NAME --api-key KEY --workload prompts.jsonl
"""

GPU_FILE = "gpus.jsonl"  # in the run folder: every sample of the recorded GPUs
LEVELS_FILE = "levels.jsonl"  # in the run folder: each level of a fleet once it is over, which survives a kill
# Options of LoadConfig that a load on a fleet has too.
_FLEET_OPTIONS = ("processes", "seed", "api_key")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from meltcore.common.options import add_options, number
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig
    from meltcore.measure.load.tasks.task import tasks

    workloads = [f"  {text:<38} {meaning}" for task in tasks().values() for text, meaning in task.usage]
    parser.epilog = "\n".join([f"{parser.epilog}\n\nworkloads:", *workloads])
    parser.add_argument("url", metavar="URL", help="Address of the server, with or without /v1.")
    add_options(parser, LoadConfig)
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--fleet",
        dest="act",
        action="store_const",
        const=_run_fleet,
        help="Load all models of the server, each by its task.",
    )
    add_options(parser, FleetLoadConfig)
    parser.set_defaults(concurrency=None)  # to tell a given 10 from the default
    parser.add_argument(
        "--timeout",
        type=number(float, exclusive_minimum=0),
        metavar="S",
        help="Time limit of one request in seconds (default: 1800).",
    )
    group = parser.add_argument_group("GPUs")
    group.add_argument("--monitor", action="store_true", help="Record GPU activity, power and memory during the load.")
    group.add_argument(
        "--gpu", metavar="ID,...", help="GPUs of --monitor: indices or UUIDs (default: those that this job may use)."
    )
    group = parser.add_argument_group("output")
    group.add_argument("--out", default="runs", metavar="DIR", help="Parent of the run folder (default: runs).")
    group.add_argument("--json", action="store_true", help="Print the result as JSON instead of a table.")


def run(args: argparse.Namespace) -> int:
    """Measure the server, save and print the result, and return the exit status."""
    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.values.formatting import caution_lines, result_warnings
    from meltcore.measure.report.load.levels import levels_tables
    from meltcore.measure.report.page.console import print_table
    from meltcore.measure.report.render import save_document

    config = _load_config(args)
    _check_gpu_option(args)
    console = Console(stderr=args.json)
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, "load") as folder:
        result = _measure(args, config, folder, console)
    notes = [reason for level in result.levels if level.verdict == "OK" for reason in level.reasons]
    try:
        save_document(folder.result_path, result)
    finally:  # if the disk is full, the terminal still shows the result
        for reason in dict.fromkeys([*result_warnings(result), *notes, *caution_lines(result.levels)]):
            console.print(reason, style="yellow", markup=False, highlight=False)
        if args.json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        else:
            for table in levels_tables(result.levels):
                print_table(table, console)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return result.exit_code


def _run_fleet(args: argparse.Namespace) -> int:
    """Measure all models of a server: alone, mixed and in pairs. Returns the exit status."""
    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.report.load.fleet_load import fleet_load_page
    from meltcore.measure.report.page.console import print_page
    from meltcore.measure.report.render import save_document

    config = _fleet_config(args)
    console = Console(stderr=args.json)
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, "load-fleet") as folder:
        result = _measure_fleet(args, config, folder, console)
    try:
        save_document(folder.result_path, result)
    finally:
        if args.json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        else:
            print_page(fleet_load_page(result), console)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return result.exit_code


def _load_config(args: argparse.Namespace) -> "LoadConfig":
    """Return the settings of a load on one model. Raises ConfigError for invalid or contradictory options."""
    from meltcore.common.errors import ConfigError
    from meltcore.common.options import check_unused, from_options
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig
    from meltcore.measure.load.tasks.task import check_workload

    check_unused(args, FleetLoadConfig, "is for --fleet")
    if args.concurrency is None:
        args.concurrency = LoadConfig.concurrency
    elif args.request_rate:
        raise ConfigError("--concurrency makes closed-loop levels and --request-rate open-loop ones: give one of them")
    if args.tokenizer is not None:
        from meltcore.models.checkpoints.checkpoint import find_tokenizer

        args.tokenizer = find_tokenizer(args.tokenizer)
    config = from_options(LoadConfig, args, timeouts=_timeouts(args))
    check_workload(config)
    return config


def _fleet_config(args: argparse.Namespace) -> "FleetLoadConfig":
    """Return the settings of a load on all models of a server.

    Raises ConfigError for options that only a load on one model has.
    """
    from meltcore.common.options import check_unused, from_options
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig

    check_unused(args, LoadConfig, "is for a load on one model, without --fleet", *_FLEET_OPTIONS)
    _check_gpu_option(args)
    return from_options(FleetLoadConfig, args, timeouts=_timeouts(args))


def _timeouts(args: argparse.Namespace) -> "Timeouts":
    from meltcore.measure.load.config import Timeouts

    return Timeouts() if args.timeout is None else Timeouts(total_s=args.timeout)


def _check_gpu_option(args: argparse.Namespace) -> None:
    from meltcore.common.errors import ConfigError

    if args.gpu is not None and not args.monitor:
        raise ConfigError("--gpu selects the GPUs that --monitor records: add --monitor")


def _measure(args: argparse.Namespace, config: "LoadConfig", folder: "RunFolder", console: "Console") -> "RunResult":
    """Measure one model of a server. With --monitor, record the GPUs meanwhile."""
    from dataclasses import replace

    from meltcore.measure.load.run.runner import level_bars, measure
    from meltcore.measure.node.monitor.recording import attach_gpu_timelines, read_recording

    path = folder.path / GPU_FILE
    console.print(config.plan, highlight=False, soft_wrap=True)
    with _recorded(args, path, tries=args.monitor) as is_recorded, level_bars(config.levels, console) as on_progress:
        result = measure(replace(config, records_path=folder.requests_path), sys.argv[1:], on_progress)
    if is_recorded:
        result.notes += attach_gpu_timelines(result.levels, read_recording(path))
    return result


def _measure_fleet(
    args: argparse.Namespace, config: "FleetLoadConfig", folder: "RunFolder", console: "Console"
) -> "FleetLoad":
    """Measure all models of a server, and record the GPUs meanwhile.

    The GPUs are recorded with --monitor, or if the server is on this machine and the machine has GPUs.
    """
    import msgspec

    from meltcore.measure.load.fleet.fleet_run import measure_fleet
    from meltcore.measure.load.fleet.fleet_streams import level_line, level_status
    from meltcore.measure.load.wire.connection import parse_target
    from meltcore.measure.node.monitor.recording import attach_gpu_means, read_recording

    levels_path, recording_path = folder.path / LEVELS_FILE, folder.path / GPU_FILE

    def on_level(level: "FleetLevel") -> None:
        with levels_path.open("ab") as file:
            file.write(msgspec.json.encode(level) + b"\n")
        console.print(level_line(level), markup=False, highlight=False, soft_wrap=True)

    is_local = parse_target(config.url).host in ("localhost", "127.0.0.1", "::1")
    with (
        _recorded(args, recording_path, tries=args.monitor or is_local) as is_recorded,
        level_status(console) as on_progress,
    ):
        result = measure_fleet(
            config,
            sys.argv[1:],
            records_path=folder.requests_path,
            on_progress=on_progress,
            on_level=on_level,
            on_plan=lambda text: console.print(text, highlight=False, soft_wrap=True),
        )
    if is_recorded:
        attach_gpu_means(result, read_recording(recording_path))
    return result


@contextmanager
def _recorded(args: argparse.Namespace, path: "Path", tries: bool) -> Iterator[bool]:
    """Record the GPUs to `path` during the block if `tries` is true. Yield whether the GPUs are recorded.

    Raises NoDriverError if --monitor requires a recording and there is no driver.
    """
    from meltcore.common.errors import MeltcoreError
    from meltcore.common.gpus.driver import NoDriverError
    from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings

    monitor = None
    if tries:
        try:
            monitor = Monitor(SamplerSettings(path=str(path), gpus=args.gpu))
        except MeltcoreError as error:
            path.unlink(missing_ok=True)  # nothing was measured
            if args.monitor or not isinstance(error, NoDriverError):
                raise
    with monitor or nullcontext():
        yield monitor is not None
