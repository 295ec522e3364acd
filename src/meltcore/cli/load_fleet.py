"""`meltcore load --fleet`: loads all models of a server, alone, mixed and in pairs, and judges their health."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.schema import FleetLevel, FleetLoad
    from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig

LEVELS_FILE = "levels.jsonl"  # in the run folder: each level once it is over, which survives a kill
GPU_FILE = "gpus.jsonl"
# Options of LoadConfig that a load on a fleet has too.
_SHARED_SETTINGS = ("processes", "seed", "api_key")


def run_fleet(args: argparse.Namespace) -> int:
    """Measure the fleet, save and print the result, and return the exit status as `meltcore load` does."""
    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.report.load.fleet_load import fleet_load_page
    from meltcore.measure.report.page.console import print_page
    from meltcore.measure.report.render import save_document

    config = _config(args)
    console = Console(stderr=args.json)
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, "load-fleet") as folder:
        result = _measure(args, config, folder, console)
    try:
        save_document(folder.result_path, result)
    finally:
        if args.json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        else:
            print_page(fleet_load_page(result), console)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return result.exit_code


def _config(args: argparse.Namespace) -> "FleetLoadConfig":
    """Return the settings of the command line. Raises ConfigError for options that only a load on one model has."""
    from meltcore.common.errors import ConfigError
    from meltcore.common.options import check_unused, from_options
    from meltcore.measure.load.config import LoadConfig, Timeouts
    from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig

    check_unused(args, LoadConfig, "is for a load on one model, without --fleet", *_SHARED_SETTINGS)
    if args.gpu is not None and not args.monitor:
        raise ConfigError("--gpu selects the GPUs that --monitor records: add --monitor")
    timeouts = Timeouts() if args.timeout is None else Timeouts(total_s=args.timeout)
    return from_options(FleetLoadConfig, args, timeouts=timeouts)


def _measure(
    args: argparse.Namespace, config: "FleetLoadConfig", folder: "RunFolder", console: "Console"
) -> "FleetLoad":
    """Run the load while the GPUs are recorded.

    The GPUs are recorded with --monitor, or if the server is on this machine and the machine has GPUs.
    """
    import msgspec

    from meltcore.measure.load.fleet.fleet_run import measure_fleet
    from meltcore.measure.load.fleet.fleet_streams import level_line, level_status
    from meltcore.measure.node.monitor.recording import attach_gpu_means, read_recording

    levels_path = folder.path / LEVELS_FILE

    def on_level(level: "FleetLevel") -> None:
        with levels_path.open("ab") as file:
            file.write(msgspec.json.encode(level) + b"\n")
        console.print(level_line(level), markup=False, highlight=False, soft_wrap=True)

    recording_path = folder.path / GPU_FILE
    with _recorded(args, config.url, recording_path) as is_recorded, level_status(console) as on_progress:
        result = measure_fleet(
            config, sys.argv[1:], records_path=folder.requests_path, on_progress=on_progress, on_level=on_level
        )
    if is_recorded:
        attach_gpu_means(result, read_recording(recording_path))
    return result


@contextmanager
def _recorded(args: argparse.Namespace, url: str, path: "Path") -> Iterator[bool]:
    """Record the GPUs during the block. Yields whether the GPUs are recorded.

    Raises NoDriverError if --monitor requires a recording and there is no driver.
    """
    from meltcore.common.errors import MeltcoreError
    from meltcore.common.gpus.driver import NoDriverError
    from meltcore.measure.load.wire.connection import parse_target
    from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings

    monitor = None
    if args.monitor or parse_target(url).host in ("localhost", "127.0.0.1", "::1"):
        try:
            monitor = Monitor(SamplerSettings(path=str(path), gpus=args.gpu))
        except MeltcoreError as error:
            path.unlink(missing_ok=True)
            if args.monitor or not isinstance(error, NoDriverError):
                raise
    if monitor is None:
        yield False
        return
    with monitor:
        yield True
        monitor.stop()
