"""`meltcore monitor`: record the GPUs' metrics, and judge their health at the end."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.common.gpus.reader import Sample
    from meltcore.measure.node.monitor.sampler import Monitor
    from meltcore.measure.node.monitor.summary import SummaryBuilder

HELP = (
    "Sample the GPUs every 100 ms in a separate process: temperature, power, clocks and clock event reasons, memory, "
    "errors, links, and SM, tensor and DRAM activity where the GPU has counters. Prints one line per second and GPU, "
    "and at the end means, maxima and a verdict."
)
EXAMPLES = """\
  meltcore monitor                       until Ctrl-C, into a folder in runs/
  meltcore monitor --duration 60 --gpu 0,2 --out gpus.jsonl
  meltcore monitor --gpu MIG-5c89852c    a UUID prefix is enough

exit status: 0 HEALTHY, 1 DEGRADED, 2 could not start, 3 UNKNOWN or no NVIDIA driver
"""

EXIT_UNKNOWN = 3

_PRINT_INTERVAL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meltcore monitor`."""
    from meltcore.common.options import number

    parser.add_argument(
        "--gpu",
        metavar="ID,...",
        help="GPU indices of nvidia-smi or UUIDs (default: CUDA_VISIBLE_DEVICES, or all GPUs).",
    )
    parser.add_argument(
        "--duration",
        type=number(float, exclusive_minimum=0),
        metavar="S",
        help="Duration in seconds (default: until Ctrl-C).",
    )
    parser.add_argument(
        "--interval-ms",
        type=number(float, minimum=10, maximum=60_000),
        default=100.0,
        metavar="MS",
        help="Sampling interval (default: 100).",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="Output in JSON lines (default: runs/TIME-monitor/samples.jsonl)."
    )


def run(args: argparse.Namespace) -> int:
    """Record the GPUs until the end, print a summary, and return the exit code."""
    import sys
    from pathlib import Path

    from meltcore.common.gpus.driver import NoDriverError
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings

    def record(path: Path) -> int:
        with Monitor(SamplerSettings(path=str(path), gpus=args.gpu, interval_s=args.interval_ms / 1e3)) as monitor:
            print(f"writing {path}", flush=True)
            return _watch(monitor, args.duration)

    try:
        if args.out:
            return record(Path(args.out))
        with RunFolder.create_or_remove("runs", "monitor") as folder:
            return record(folder.path / "samples.jsonl")
    except NoDriverError as error:
        print(f"meltcore monitor: {error}", file=sys.stderr)
        return EXIT_UNKNOWN


def _watch(monitor: "Monitor", duration_s: float | None) -> int:
    """Print one line per second and GPU. At the end, print the summary.

    The end comes when the time is up, a signal arrives, or every GPU is lost.
    """
    import signal
    import time

    from meltcore.measure.node.monitor.summary import SummaryBuilder

    # From here on sigtimedwait replaces the sleep between lines: a signal never interrupts a line.
    signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    start_s = monitor.start.t_s
    end_s = float("inf") if duration_s is None else start_s + duration_s
    builders = [SummaryBuilder() for _ in monitor.start.gpus]
    next_line_s = start_s
    received_signal = None
    while received_signal is None and monitor.is_running and next_line_s < end_s:
        next_line_s = min(next_line_s + _PRINT_INTERVAL_S, end_s)
        received_signal = signal.sigtimedwait(signals, max(0.0, next_line_s - time.monotonic()))
        _process_samples(monitor, monitor.new_samples(), builders)
    _process_samples(monitor, monitor.stop(), builders)
    return _print_summary(monitor, builders)


def _process_samples(monitor: "Monitor", samples: "list[Sample]", builders: "list[SummaryBuilder]") -> None:
    from meltcore.measure.node.monitor.console import gpu_line

    for gpu_index, gpu in enumerate(monitor.start.gpus):
        gpu_samples = [sample for sample in samples if sample.gpu == gpu_index]
        for sample in gpu_samples:
            builders[gpu_index].add(sample)
        if gpu_samples:
            print(gpu_line(gpu, gpu_samples, monitor.start.t_s), flush=True)


def _print_summary(monitor: "Monitor", builders: "list[SummaryBuilder]") -> int:
    from meltcore.measure.documents.verdicts import MEANINGS, Verdict, worst_verdict
    from meltcore.measure.node.monitor.console import summary_lines
    from meltcore.measure.node.monitor.summary import judge_health

    verdicts: list[Verdict] = []
    for gpu, builder in zip(monitor.start.gpus, builders, strict=True):
        summary = builder.summary()
        health = judge_health(summary, monitor.start.interval_s)
        verdicts.append(health.verdict)
        print("\n".join(summary_lines(gpu, summary, health)))
    if monitor.end is None:
        print("the sampler did not end in order: the recording is cut short")
        verdicts.append("UNKNOWN")
    else:
        cores = monitor.end.cpu_s / (monitor.end.t_s - monitor.start.t_s)
        print(f"\nsampling took {100 * cores:.0f} % of a core and missed {monitor.end.missed} intervals")
    return MEANINGS[worst_verdict(verdicts, "UNKNOWN")].exit_code
