"""`meltcore tune`: find a server's limits and best settings by restarting it."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.tuning import Tuning, TuningPoint
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
    from meltcore.measure.experiments.tune.config import BatchingOptions, ContextOptions, PrecisionOptions

    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, options in zip(KINDS, (ContextOptions, BatchingOptions, PrecisionOptions), strict=True):
        kind = kinds.add_parser(name, help=KINDS[name], description=KINDS[name], allow_abbrev=False)
        kind.add_argument("checkpoint", nargs="?", metavar="MODEL", help="Model to serve with our engine.")
        server = kind.add_argument_group("Server")
        server.add_argument("--run", metavar="FILE", help="Command file of another server, with {port} and {args}.")
        server.add_argument("--serve-args", default="", metavar="ARGS", help="More options of our engine, in quotes.")
        server.add_argument(
            "--flag", action="append", default=[], metavar="SETTING=OPTION", help="Name of a setting's server option."
        )
        add_options(kind, options, group=name.capitalize())
        add_start_options(kind, concurrency="64")
        kind.add_argument("--goodput", metavar="ttft:MS,itl:MS", help="Latency limits that a setting must meet.")
        output = kind.add_argument_group("Output")
        output.add_argument("--out", default="runs", metavar="DIR", help="Parent of the run folder (default: runs).")
        output.add_argument("--json", action="store_true", help="Print the result as JSON instead of a table.")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    import sys

    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.experiments.tune.run import save_tuning
    from meltcore.measure.report.comparisons.tuning import tuning_page
    from meltcore.measure.report.page.console import print_page

    console = Console(stderr=args.json)
    load = _load(args)
    measure = {"context": _context, "batching": _batching, "precision": _precision}[args.kind]
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, f"tune-{args.kind}") as folder:
        tuning = measure(args, _tuner(args, console, folder), load)
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
    from meltcore.measure.load.tasks.task import default_task, workload_task

    load = start_options(args, ()).load
    if workload_task(load.workload) is not default_task():
        raise ConfigError(f"tune tunes the engine of generation; the workload {load.workload} is of another task")
    if len(load.levels) != 1:
        raise ConfigError("tune loads every setting with the same concurrency: give one value as --concurrency")
    return dataclasses.replace(load, slo_ms={} if args.goodput is None else parse_slo(args.goodput))


def _tuner(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "Tuner":
    import shlex
    import sys

    from rich.markup import escape

    from meltcore.common.errors import ConfigError
    from meltcore.measure.documents.values.formatting import format_number
    from meltcore.measure.experiments.servers.command import parse_command, read_command
    from meltcore.measure.experiments.tune.run import Tuner, parse_flags

    if (args.checkpoint is None) == (args.run is None):
        raise ConfigError("tune takes a MODEL for our engine, or --run FILE for another server")
    if args.run is not None:
        command = read_command(args.run)
    else:
        serve_command = shlex.join([sys.executable, "-m", "meltcore.cli.main", "serve", args.checkpoint])
        command = parse_command(f"{serve_command} --port {{port}} {args.serve_args} {{args}}", "--serve-args")

    def on_point(point: "TuningPoint") -> None:
        outcome = f"{format_number(point.output_tokens_per_s)} tok/s" if point.ok else point.reason
        console.print(f"{escape(point.label)}: {escape(outcome)}", highlight=False)

    return Tuner(
        command=command,
        folder=folder.path,
        report=lambda text: console.print(escape(text), style="yellow", highlight=False),
        on_point=on_point,
        flags=parse_flags(args.flag),
        arguments=tuple(sys.argv[1:]),
        start_limit_s=args.start_timeout,
    )


def _batching(args: argparse.Namespace, tuner: "Tuner", load: "LoadConfig") -> "Tuning":
    from meltcore.common.options import from_options
    from meltcore.measure.experiments.tune.batching import batching_finding, best_and_knee, sweep
    from meltcore.measure.experiments.tune.config import BatchingOptions
    from meltcore.measure.experiments.tune.run import make_tuning

    points = sweep(tuner, from_options(BatchingOptions, args), load)
    best_and_knee_indices = best_and_knee(points)
    return make_tuning(
        "batching",
        tuner,
        load,
        points,
        batching_finding(points, *best_and_knee_indices),
        best_and_knee=best_and_knee_indices,
    )


def _context(args: argparse.Namespace, tuner: "Tuner", load: "LoadConfig") -> "Tuning":
    from pathlib import Path

    from meltcore.common.options import from_options
    from meltcore.measure.experiments.tune.config import ContextOptions
    from meltcore.measure.experiments.tune.context import ContextSearch, kv_bytes_per_token, read_config
    from meltcore.measure.experiments.tune.run import make_tuning

    search = ContextSearch(tuner, from_options(ContextOptions, args), load)
    path = Path(args.config or args.checkpoint or "")
    if args.config or (args.checkpoint and path.is_dir()):
        config = read_config(path)
        search.vocab_size = config.get("text_config", config).get("vocab_size")
        search.bytes_per_token = kv_bytes_per_token(config, args.kv_element_size)
    search.run()
    return make_tuning("context", tuner, load, search.points, search.finding, facts=search.facts)


def _precision(args: argparse.Namespace, tuner: "Tuner", load: "LoadConfig") -> "Tuning":
    from pathlib import Path

    from meltcore.measure.experiments.tune.precision import (
        FP8_VARIANTS,
        bundled_items,
        gsm8k_items,
        precision_finding,
        try_variants,
    )
    from meltcore.measure.experiments.tune.run import make_tuning

    variants: dict[str, tuple[str, ...]] = {name: ("--dtype", name) for name in args.dtypes}
    if args.fp8:
        variants |= FP8_VARIANTS
    items = bundled_items(args.questions)
    if args.gsm8k is not None:
        items += gsm8k_items(Path(args.gsm8k), 200)
    points = try_variants(tuner, variants, load, items)
    return make_tuning("precision", tuner, load, points, precision_finding(points))
