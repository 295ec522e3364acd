"""`meltcore bench`: the GPU score."""

import argparse
import sys

HELP = (
    "The GPU score: output tokens per second that this GPU sustains with Qwen3-0.6B in BF16, on a fixed and versioned "
    "workload. Five minutes: a ladder of 1 to 10,000 concurrent requests, then a sustained run at the best level, the "
    "GPU's health sampled all through. Nothing is uploaded."
)
EXAMPLES = """\
  meltcore bench                         every visible GPU, all at once; random weights, no download
  meltcore bench --gpu 0,2 --duration 60
  meltcore bench --gpu MIG-5c89852c      the beginning of a UUID will do
  meltcore bench --precision fp8         8-bit weights, keys and values; never ranked against BF16
  meltcore bench --model ./Qwen3-0.6B    real weights; never ranked against random ones
  meltcore rank runs/A runs/B            compare results

A GPU divided by MIG is measured slice by slice, all at once. An interruption keeps what was measured, without a score.

exit status: 0 a score, 1 none (an engine failed), 2 could not start, 130 interrupted
"""

METRICS = ("score", "score_ttft_ms", "score_itl_ms", "tokens_per_joule", "health", "nvml_utilization")

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="ID,...",
        help="indices as nvidia-smi has them, or UUIDs (default: CUDA_VISIBLE_DEVICES, or all)",
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU; the result compares with nothing")
    parser.add_argument(
        "--duration",
        type=float,
        default=300.0,
        metavar="S",
        help="in all: 40 %% ladder, 55 %% sustained, 5 %% to start (300)",
    )
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16", help="a workload each (bf16)")
    parser.add_argument("--model", metavar="PATH", help="a checkpoint folder or hub id (default: random weights)")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where the run folder goes (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    import msgspec
    from rich.console import Console

    from meltcore.bench.run import BenchConfig, run_bench
    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.report.score_output import level_line, print_score

    console = Console(stderr=args.json, highlight=False)
    config = BenchConfig(
        duration_s=args.duration,
        gpus=args.gpu,
        cpu=args.cpu,
        precision=args.precision,
        model=args.model,
        out=Path(args.out),
        arguments=tuple(sys.argv[1:]),
    )
    with signals_as_ctrl_c():
        folder, result = run_bench(
            config,
            say=lambda text: console.print(text, soft_wrap=True, markup=False),
            on_level=lambda device, level, last: console.print(level_line(device.label, level, last), markup=False),
        )
    if args.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        print_score(result, console)
    console.print(f"report: {folder.report_path}", soft_wrap=True)
    if result.verdict == "PARTIAL":
        return EXIT_INTERRUPTED
    return EXIT_FAILED if result.verdict == "FAILED" else 0
