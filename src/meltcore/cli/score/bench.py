"""`meltcore bench`: measure the GPU score."""

import argparse
import sys

HELP = (
    "Measure the GPU score: output tokens per second that this GPU sustains with Qwen3-0.6B in BF16, on a fixed and "
    "versioned workload. Takes five minutes: a ladder of 1 to 10,000 concurrent requests, then a sustained run at the "
    "best level, with the GPU's health sampled throughout. Nothing is uploaded."
)
EXAMPLES = """\
  meltcore bench                         every visible GPU, concurrently; random weights, no download
  meltcore bench --gpu 0,2 --duration 60
  meltcore bench --gpu MIG-5c89852c      the first letters of a UUID
  meltcore bench --precision fp8         FP8 weights and KV cache; never ranked against BF16
  meltcore bench --model ./Qwen3-0.6B    real weights; never ranked against random ones
  meltcore bench --reference h200        the ratio to a shipped reference, or to any result
  meltcore bench --sweep                 concurrency × output length × temperature, as charts; no score
  meltcore bench --model ./Qwen3-0.6B --prompts mine.txt    your prompts; never ranked against the score
  meltcore leaderboard                   your newest runs among the shipped references
  meltcore bench --ray auto              all nodes of the Ray cluster that this machine belongs to

A GPU divided by MIG is measured slice by slice, concurrently. An interruption keeps what was measured, without a score.

exit status: 0 a score, 1 none (an engine failed), 2 could not start, 130 interrupted
with --ray: 0 nodes with the same GPUs are alike, 1 one is slow, unlike the others or degraded, 2 one has no score
"""

METRICS = ("score", "score_ttft_ms", "score_itl_ms", "tokens_per_joule", "health", "utilization", "nvml_utilization")

_RAY_OPTIONS = ("cpu", "duration_s", "precision", "model", "out")
_START_LIMIT_S = 900.0  # beyond --duration, for a node to load the model and compile the kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    from meltcore.cli.all_nodes import add_ray_options
    from meltcore.common.options import add_options
    from meltcore.measure.score.config import BenchConfig

    add_options(parser, BenchConfig)
    parser.add_argument(
        "--export", metavar="FILE", help="Also write the charts into one .svg or .png file (PNG: meltcore[png])."
    )
    parser.add_argument("--json", action="store_true", help="Print the result as JSON instead of tables.")
    add_ray_options(parser, f"{_START_LIMIT_S:g} more than --duration", _run_on_all_nodes)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from pathlib import Path

    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.options import from_options
    from meltcore.measure.report.page.charts_export import check_export, export_page
    from meltcore.measure.report.page.console import print_page
    from meltcore.measure.report.scores.score import level_line, score_page
    from meltcore.measure.score.config import BenchConfig
    from meltcore.measure.score.run import run_bench

    console = Console(stderr=args.json, highlight=False)
    if args.export:
        check_export(Path(args.export))  # before minutes of measuring
    with signals_as_ctrl_c():
        folder, result = run_bench(
            from_options(BenchConfig, args, arguments=tuple(sys.argv[1:])),
            report=lambda text: console.print(text, soft_wrap=True, markup=False),
            on_level=lambda device, level, last: console.print(
                level_line(device.label, level, last), soft_wrap=True, markup=False
            ),
        )
    if args.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        print_page(score_page(result), console)
    console.print(f"report: {folder.report_path}", soft_wrap=True)
    if args.export:
        export_page(score_page(result), Path(args.export))
        console.print(f"charts: {args.export}", soft_wrap=True)
    return result.exit_code


def _run_on_all_nodes(args: argparse.Namespace) -> int:
    """Run the command on all nodes of a cluster. Returns the exit code."""
    from meltcore.cli.all_nodes import refuse_with_ray, run_on_all_nodes
    from meltcore.common.options import check_unused, from_options
    from meltcore.fleet.plan.cluster import absolute_path
    from meltcore.measure.score.config import BenchConfig

    refuse_with_ray(args, "export")
    check_unused(args, BenchConfig, "is for one node; it excludes --ray", *_RAY_OPTIONS)
    config = from_options(BenchConfig, args)
    command = ["bench", "--json", "--duration", f"{config.duration_s!r}", "--precision", config.precision]
    command += ["--cpu"] * config.cpu
    if config.model:  # a node runs the command in a folder of its own
        command += ["--model", absolute_path(config.model) or config.model]
    return run_on_all_nodes(
        args,
        command,
        limit_s=config.duration_s + _START_LIMIT_S,
        needs_gpu=not config.cpu,
        takes_gpus=not config.cpu,
        out=config.out,
    ).exit_code
