"""Where the time of a step goes: kernels of decode steps and of a prompt step, against the bytes and operations needed.

Dummy weights. A decode step is timed by replays of its graph, and its kernels by the profiler; the floor of a step is
the larger of its bytes (weights, keys and values once) at read bandwidth and its operations at the rate of a large
product, both measured in the same run.

    python benchmarks/step_profile.py --sequences 1,10,100,400 --context 600
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
from collections.abc import Callable
from importlib import metadata

import torch
from attention import matmul_flops_per_us, read_bytes_per_us
from bench_output import Row, write_result
from torch.profiler import ProfilerActivity, profile

from meltcore import LLM, SamplingParams
from meltcore.engine.engine import Engine
from meltcore.engine.messages import AddRequest
from meltcore.models.cache import split_groups

STEPS = 20
SHOWN = 12  # kernels of a step, the longest first


class Ceilings:
    """What the device can do, and what one token of this model needs."""

    def __init__(self, engine: Engine) -> None:
        self.bytes_per_us, self.flops_per_us = read_bytes_per_us(), matmul_flops_per_us()
        model = engine.runner.model
        self.weights = sum(weight.numel() for weight in model.parameters())
        self.weight_bytes = sum(weight.nbytes for weight in model.parameters())
        group, _ = split_groups(model.cache_groups())
        self.kv_bytes = 2 * group.layers * group.kv_heads * group.head_dim * model.embedding.element_size()

    def decode_us(self, sequences: int, context: int) -> float:
        read = (self.weight_bytes + sequences * context * self.kv_bytes) / self.bytes_per_us
        return max(read, 2 * self.weights * sequences / self.flops_per_us)

    def prompts_us(self, tokens: int, head_weights: int) -> float:
        """Products alone; the head serves the prompts' last tokens only."""
        return 2 * (self.weights - head_weights) * tokens / self.flops_per_us


def busy_us(events: list[tuple[float, float]]) -> float:
    """Microseconds in which at least one kernel runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def kernels_of(run: Callable[[], None], repeats: int) -> tuple[float, list[tuple[str, float, float]]]:
    """Busy microseconds of one run, and its kernels by name: microseconds and launches a run, longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    seen = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for event in seen:
        name = event.name.removeprefix("void ").split("(")[0][:60]
        times[name] += event.time_range.elapsed_us()
        launches[name] += 1
    busy = busy_us([(event.time_range.start, event.time_range.end) for event in seen]) / repeats
    return busy, [(name, time / repeats, launches[name] / repeats) for name, time in times.most_common()]


def show(work: str, total_us: float, floor_us: float, kernels: list[tuple[str, float, float]]) -> Row:
    count = sum(launches for _, _, launches in kernels)
    print(f"\n{work}: {total_us:,.0f} us, {count:.0f} kernels, floor {floor_us:,.0f} us")
    for name, time_us, launches in kernels[:SHOWN]:
        print(f"  {time_us:9.1f} us  {launches:6.0f} x {time_us / launches:7.2f}  {name}")
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
    """An engine whose sequences can be brought to where only decode steps are left."""

    def __init__(self, model: str) -> None:
        settings = {"load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 1024, "debug": ("no-prefix-cache",)}
        self.engine = LLM(model, max_num_batched_tokens=8192, **settings).engine
        self._names = (f"r{number}" for number in itertools.count())

    def add(self, sequences: int, prompt: int, out: int) -> list[str]:
        names = [next(self._names) for _ in range(sequences)]
        for name in names:
            ids = torch.randint(1000, 140_000, (prompt,)).tolist()
            self.engine.add(AddRequest(name, ids, SamplingParams(max_tokens=out, ignore_eos=True)))
        return names

    def decode(self, sequences: int, context: int, ceilings: Ceilings) -> Row:
        names = self.add(sequences, context, 500)
        running = self.engine.scheduler.running
        while len(running) < sequences or any(request.remaining > 1 for request in running):
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
        busy, kernels = kernels_of(lambda: self.engine.step() and None, 5)
        self.engine.abort(names)
        while self.engine.has_work:
            self.engine.step()
        floor_us = ceilings.decode_us(sequences, context + 16)
        work = f"decode step, {sequences:,} sequences of about {context + 16} tokens"
        print(f"{work}: {statistics.median(times_us):,.0f} us with the host waiting for each")
        return show(work, busy, floor_us, kernels)

    def prompts(self, sequences: int, length: int, ceilings: Ceilings) -> Row:
        def run() -> None:
            self.add(sequences, length, 1)
            while self.engine.has_work:
                self.engine.step()

        run()
        busy, kernels = kernels_of(run, 3)
        head = self.engine.runner.model.head.numel()
        work = f"prompt step, {sequences} x {length} tokens"
        return show(work, busy, ceilings.prompts_us(sequences * length, head), kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--sequences", default="1,10,100,256,400,1000")
    parser.add_argument("--context", type=int, default=600, help="tokens of each sequence")
    args = parser.parse_args()
    subject = Subject(args.model)
    ceilings = Ceilings(subject.engine)
    rows = [subject.decode(int(count), args.context, ceilings) for count in args.sequences.split(",")]
    rows.append(subject.prompts(14, 576, ceilings))
    write_result("step_profile", rows, {"torch": metadata.version("torch"), "triton": metadata.version("triton")})


if __name__ == "__main__":
    main()
