"""`meltcore monitor`: log what the GPUs do, and say at the end whether they are well."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.hardware.monitor import Monitor
    from meltcore.hardware.recording import Sample
    from meltcore.hardware.summary import Tally

HELP = (
    "Sample the GPUs every 100 ms from a process of its own: temperature, power, clocks and what holds them down, "
    "memory, errors, links, and SM, tensor and DRAM activity where the GPU counts them. Prints a line a second, and at "
    "the end averages, maxima and a verdict."
)
EXAMPLES = """\
  meltcore monitor                       until Ctrl-C, into a folder in runs/
  meltcore monitor --duration 60 --gpu 0,2 --out gpus.jsonl
  meltcore monitor --gpu MIG-5c89852c    the beginning of a UUID will do

exit status: 0 HEALTHY, 1 DEGRADED, 2 could not start, 3 UNKNOWN or no NVIDIA driver
"""

EXIT_DEGRADED = 1
EXIT_UNKNOWN = 3

_LINE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="ID,...",
        help="indices as nvidia-smi has them, or UUIDs (default: CUDA_VISIBLE_DEVICES, or all)",
    )
    parser.add_argument("--duration", type=_positive, metavar="S", help="end after so many seconds (default: Ctrl-C)")
    parser.add_argument("--interval-ms", type=_interval, default=100.0, metavar="MS", help="of samples (default: 100)")
    parser.add_argument("--out", metavar="FILE", help="JSON lines go there (default: runs/TIME-monitor/samples.jsonl)")


def run(args: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    from meltcore.hardware.monitor import Monitor
    from meltcore.hardware.nvml import NoDriverError
    from meltcore.hardware.sampler import Setup
    from meltcore.results.runfolder import RunFolder

    def record(path: Path) -> int:
        with Monitor(Setup(path=str(path), gpus=args.gpu, interval_s=args.interval_ms / 1e3)) as monitor:
            print(f"writing {path}", flush=True)
            return _watch(monitor, args.duration)

    try:
        if args.out:
            return record(Path(args.out))
        with RunFolder.kept_if_used("runs", "monitor") as folder:
            return record(folder.path / "samples.jsonl")
    except NoDriverError as error:
        print(f"meltcore monitor: {error}", file=sys.stderr)
        return EXIT_UNKNOWN


def _watch(monitor: "Monitor", duration_s: float | None) -> int:
    """Print a line a second and GPU until the time is over, a signal, or every GPU is lost; then the summary."""
    import signal
    import time

    from meltcore.hardware.summary import Tally

    # From here on the two are waited for, in place of the sleep between lines: they end a line, never cut one.
    ending = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    began_s = monitor.start.t_s
    end_s = float("inf") if duration_s is None else began_s + duration_s
    tallies = [Tally() for _ in monitor.start.gpus]
    due_s = began_s
    asked = None
    while asked is None and monitor.running and due_s < end_s:
        due_s = min(due_s + _LINE_S, end_s)
        asked = signal.sigtimedwait(ending, max(0.0, due_s - time.monotonic()))
        _take(monitor, monitor.new_samples(), tallies)
    _take(monitor, monitor.stop(), tallies)
    return _conclude(monitor, tallies)


def _take(monitor: "Monitor", samples: "list[Sample]", tallies: "list[Tally]") -> None:
    from meltcore.hardware.lines import line

    for position, gpu in enumerate(monitor.start.gpus):
        mine = [sample for sample in samples if sample.gpu == position]
        for sample in mine:
            tallies[position].add(sample)
        if mine:
            print(line(gpu, mine, monitor.start.t_s), flush=True)


def _conclude(monitor: "Monitor", tallies: "list[Tally]") -> int:
    from meltcore.hardware.health import judge_summary
    from meltcore.hardware.lines import summary_lines

    verdicts = set()
    for gpu, tally in zip(monitor.start.gpus, tallies, strict=True):
        summary = tally.summary()
        health = judge_summary(summary, monitor.start.interval_s)
        verdicts.add(health.verdict)
        print("\n".join(summary_lines(gpu, summary, health)))
    if monitor.end is None:
        print("the sampler did not end in order: the recording stops short")
        verdicts.add("UNKNOWN")
    else:
        share = monitor.end.cpu_s / (monitor.end.t_s - monitor.start.t_s)
        print(f"\nsampling took {100 * share:.0f} % of a core and missed {monitor.end.late} moments by being late")
    return EXIT_DEGRADED if "DEGRADED" in verdicts else EXIT_UNKNOWN if "UNKNOWN" in verdicts else 0


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _interval(text: str) -> float:
    number = _positive(text)
    if not 10 <= number <= 60_000:
        raise argparse.ArgumentTypeError(f"{text} ms is outside 10 to 60,000")
    return number
