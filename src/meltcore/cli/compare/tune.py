"""`meltcore tune`: find a server's limits and best settings by restarting it."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.experiments.tune.run import Tuner
    from meltcore.measure.load.config import LoadConfig

HELP = """\
Restart a server with different settings and measure each. Gains are counted from its default settings."""
EXAMPLES = """\
  meltcore tune batching meltcore/sums --max-num-seqs 8,16,32,64 --max-num-batched-tokens 1024,4096
  meltcore tune batching --run vllm.cmd --max-num-seqs 64,128,256 --concurrency 256 --goodput ttft:2000,itl:50
  meltcore tune context ./my-checkpoint --seq-len 4096
  meltcore tune precision ./my-checkpoint --gsm8k test.jsonl

vllm.cmd holds a command line; {args} stands where the settings go (default: at the end):
  vllm serve ./my-checkpoint --port {port} {args}
Servers whose options have other names: --flag max_num_seqs=-np --flag max_model_len=-c
"""
KINDS = {
    "context": "Search the longest context and the most sequences that fit in memory, beside the calculated ones.",
    "batching": "Sweep concurrent sequences and token budgets, and mark the knee.",
    "precision": "Compare speed and answers of float16, bfloat16, FP8 weights and FP8 KV caches.",
}

EXIT_NO_RESULT = 1  # nothing ran, or nothing met the SLO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from meltcore.cli.start_options import add_start_options
    from meltcore.common.options import add_options
    from meltcore.measure.experiments.tune.config import OPTIONS

    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, options in OPTIONS.items():
        kind = kinds.add_parser(name, help=KINDS[name], description=KINDS[name], allow_abbrev=False)
        kind.add_argument("checkpoint", nargs="?", metavar="MODEL", help="Model to serve with our engine.")
        server = kind.add_argument_group("server")
        server.add_argument("--run", metavar="FILE", help="Command file of another server, with {port} and {args}.")
        server.add_argument("--serve-args", default="", metavar="ARGS", help="More options of our engine, in quotes.")
        server.add_argument(
            "--flag", action="append", default=[], metavar="SETTING=OPTION", help="Name of a setting's server option."
        )
        add_options(kind, options, group=name.capitalize())
        add_start_options(kind, concurrency="64")
        kind.add_argument("--goodput", metavar="ttft:MS,itl:MS", help="Latency limits that a setting must meet.")
        output = kind.add_argument_group("output")
        output.add_argument("--out", default="runs", metavar="DIR", help="Parent of the run folder (default: runs).")
        output.add_argument("--json", action="store_true", help="Print the result as JSON instead of a table.")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import sys

    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.options import from_options
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.experiments.tune.config import OPTIONS
    from meltcore.measure.experiments.tune.context import tune_context
    from meltcore.measure.experiments.tune.precision import tune_precision
    from meltcore.measure.experiments.tune.run import save_tuning, tune_batching
    from meltcore.measure.report.comparisons.tuning import tuning_page
    from meltcore.measure.report.page.console import print_page

    console = Console(stderr=args.json)
    load, options = _load(args), from_options(OPTIONS[args.kind], args)
    tune: Any = {"context": tune_context, "batching": tune_batching, "precision": tune_precision}[args.kind]
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, f"tune-{args.kind}") as folder:
        tuning = tune(_tuner(args, console, folder), options, load)
    save_tuning(folder, tuning)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(msgspec.json.encode(tuning).decode() + "\n")
    else:
        print_page(tuning_page(tuning), console)
    return 0 if tuning.has_result else EXIT_NO_RESULT


def _load(args: argparse.Namespace) -> "LoadConfig":
    import dataclasses

    from meltcore.cli.start_options import start_options
    from meltcore.common.errors import ConfigError
    from meltcore.measure.load.config import parse_slo
    from meltcore.measure.load.tasks.task import check_workload, default_task, workload_task

    load = start_options(args).load
    if workload_task(load.workload) is not default_task():
        raise ConfigError(f"tune tunes the engine of generation; the workload {load.workload} is of another task")
    if len(load.levels) != 1:
        raise ConfigError("tune loads every setting with the same concurrency: give one value as --concurrency")
    load = dataclasses.replace(load, slo_ms={} if args.goodput is None else parse_slo(args.goodput))
    check_workload(load)
    return load


def _tuner(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "Tuner":
    import shlex
    import sys

    from meltcore.common.errors import ConfigError
    from meltcore.measure.experiments.servers import parse_command, read_command
    from meltcore.measure.experiments.tune.run import Tuner, parse_flags

    if (args.checkpoint is None) == (args.run is None):
        raise ConfigError("tune takes a MODEL for our engine, or --run FILE for another server")
    if args.run is not None:
        command = read_command(args.run)
    else:
        serve_command = shlex.join([sys.executable, "-m", "meltcore.cli.main", "serve", args.checkpoint])
        command = parse_command(f"{serve_command} --port {{port}} {args.serve_args} {{args}}", "--serve-args")
    return Tuner(
        command=command,
        folder=folder.path,
        console=console,
        flags=parse_flags(args.flag),
        checkpoint=args.checkpoint,
        arguments=tuple(sys.argv[1:]),
        start_limit_s=args.start_timeout,
    )
