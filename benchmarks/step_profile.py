"""Time of the kernels of decode and prefill steps, against the bytes and operations that they need.

Dummy weights. A decode step is timed by replays of its graph, and its kernels by the profiler; the floor of a step is
the larger of its bytes at read bandwidth and its operations at the rate of a large GEMM (floors.py), both measured
in the same run. A layer's kernels are shown in their order too, each by how much later it ends than the one before
(kernel_chain.py). With tensor parallelism the profile is that of rank 0.

    python benchmarks/step_profile.py --sequences 1,10,100,400 --context 600
    python benchmarks/step_profile.py --model Qwen/Qwen3.5-35B-A3B --debug uniform-routing --sequences 1,8,64 \\
        --tp 4
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from bench_output import Row, need_gpu, write_result
from floors import Limits, Needs
from kernel_chain import Chain, Kernel, chains_of
from torch.profiler import ProfilerActivity, profile

from meltcore import LLM, SamplingParams
from meltcore.protocol.generation import AddRequest

STEPS = 20
SHOWN = 12  # kernels per step, the longest first
LAYERS_SHOWN = 2  # different layers per step; a hybrid model has two kinds


def busy_us(events: list[tuple[float, float]]) -> float:
    """Microseconds in which at least one kernel runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


class Seen(NamedTuple):
    """busy_us: of one run; kernels: by name, microseconds and launches a run, longest first; chains: of its layers."""

    busy_us: float
    kernels: list[tuple[str, float, float]]
    chains: list[Chain]


def see(run: Callable[[], object], repeats: int) -> Seen:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    seen = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    kernels = []
    for event in seen:
        name = event.name.removeprefix("void ").split("(")[0][:60]
        times[name] += event.time_range.elapsed_us()
        launches[name] += 1
        kernels.append(Kernel(name, event.time_range.start, event.time_range.end))
    busy = busy_us([(kernel.start_us, kernel.end_us) for kernel in kernels]) / repeats
    by_name = [(name, time / repeats, launches[name] / repeats) for name, time in times.most_common()]
    return Seen(busy, by_name, chains_of(kernels))


def show(work: str, seen: Seen, floor_us: float) -> Row:
    total_us, count = seen.busy_us, sum(launches for _, _, launches in seen.kernels)
    print(f"\n{work}: {total_us:,.0f} us, {count:.0f} kernels, floor {floor_us:,.0f} us")
    for name, time_us, launches in seen.kernels[:SHOWN]:
        print(f"  {time_us:9.1f} us  {launches:6.0f} x {time_us / launches:7.2f}  {name}")
    for chain in seen.chains[:LAYERS_SHOWN]:
        print(f"  a layer, {chain.time_us:.1f} us, from the medians of {chain.layers} like it:")
        for link in chain.links:
            print(f"    ends {link.later_us:7.2f} us later, lasts {link.lasts_us:7.2f}  {link.name}")
    return Row(
        work=f"{work}, {count:.0f} kernels",
        unit="us",
        value=total_us,
        peer="floor of bytes or operations",
        peer_value=floor_us,
        ratio=floor_us / total_us,
        limit_share=floor_us / total_us,
    )


class Subject:
    """An engine that can be run until only decode steps are left."""

    def __init__(self, model: str, sequences: int, budget: int, debug: str, tp: int) -> None:
        switches = tuple(filter(None, debug.split(",")))
        self.engine = LLM(
            model,
            load_format="dummy",
            tensor_parallel_size=tp,
            max_model_len=4096,
            max_num_seqs=sequences,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            debug=switches,
        ).engine
        self._needs, self._limits = Needs.of(self.engine.runner.model), Limits.measure()
        self._names = (f"r{number}" for number in itertools.count())

    def add(self, sequences: int, prompt: int, out: int) -> list[str]:
        names = [next(self._names) for _ in range(sequences)]
        for name in names:
            ids = torch.randint(1000, min(140_000, self.engine.vocab_size), (prompt,)).tolist()
            self.engine.add(AddRequest(name, ids, SamplingParams(max_tokens=out, ignore_eos=True)))
        return names

    def decode(self, sequences: int, context: int) -> Row:
        names = self.add(sequences, context, 500)
        running = self.engine.scheduler.running
        while len(running) < sequences or any(request.num_remaining > 1 for request in running):
            self.engine.step()
        for _ in range(3):
            self.engine.step()
        torch.cuda.synchronize()
        times_us = []
        for _ in range(STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.engine.step()
            end.record()
            end.synchronize()
            times_us.append(begin.elapsed_time(end) * 1e3)
        seen = see(self.engine.step, 5)
        self.engine.abort(names)
        while self.engine.has_work:
            self.engine.step()
        floor_us = self._needs.decode_us(sequences, context + 16, self._limits)
        work = f"decode step, {sequences:,} sequence{'s' * (sequences != 1)} of about {context + 16} tokens"
        print(f"{work}: {statistics.median(times_us):,.0f} us with the host waiting for each")
        return show(work, seen, floor_us)

    def prompts(self, sequences: int, length: int) -> Row:
        def run() -> None:
            self.add(sequences, length, 1)
            while self.engine.has_work:
                self.engine.step()

        run()
        seen = see(run, 3)
        work = f"prefill step, {sequences} x {length} tokens"
        return show(work, seen, self._needs.prompts_us(sequences, length, self._limits))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--sequences", default="1,10,100,256,400,1000")
    parser.add_argument("--context", type=int, default=600, help="Tokens of each sequence.")
    parser.add_argument("--prompts", default="14x576", help="Prefill steps as PROMPTSxTOKENS, separated by commas.")
    parser.add_argument("--budget", type=int, default=8192, help="Most tokens per step.")
    parser.add_argument("--debug", default="", help="Debug switches, separated by commas.")
    parser.add_argument("--tp", type=int, default=1, help="Tensor-parallel size.")
    args = parser.parse_args()
    need_gpu(args.tp)
    sequences = [int(count) for count in args.sequences.split(",")]
    prompts = [tuple(map(int, step.split("x"))) for step in args.prompts.split(",")]
    most = max(*sequences, *(count for count, _ in prompts))
    subject = Subject(args.model, most, args.budget, args.debug, args.tp)
    rows = [subject.decode(count, args.context) for count in sequences]
    rows += [subject.prompts(count, length) for count, length in prompts]
    subject.engine.close()
    versions = {"torch": metadata.version("torch"), "triton": metadata.version("triton")}
    subject_name = Path(args.model).name if args.model.endswith(".gguf") else args.model
    write_result(rows, versions, subject=subject_name, gpus=args.tp)


if __name__ == "__main__":
    main()
