"""All-reduce with residual addition and norm: one launch over symmetric memory, against NCCL and two kernels.

Both all-reduces are also measured alone.

One process per GPU. Times are of one all-reduce in a CUDA graph of many, as in a decode step. NCCL runs
without the events that it records between reductions by default (NCCL_GRAPH_MIXING_SUPPORT=0), which cost 12 us.
Before anything is timed, results are compared with the reference: launched eagerly, in a graph, and eagerly again,
since all use the same buffers.

    python benchmarks/all_reduce.py --ranks 2
    python benchmarks/all_reduce.py --ways     # one-shot and two-shot, to set _TWO_SHOT_SAVES_BYTES; printed only
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from bench_output import Row, Target, need_gpu, write_result

from meltcore.kernels.comm import all_reduce as all_reduce_file
from meltcore.kernels.comm.all_reduce import (
    all_reduce,
    all_reduce_rms_norm,
    all_reduce_rms_norm_reference,
    can_fuse_norm,
)
from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.norm import Norm, rms_norm
from meltcore.layers.tensor_parallel import TensorParallelGroup

HIDDEN = 2048  # Qwen3.5-35B-A3B's: 4 KiB per token in bfloat16
TOKENS = (1, 4, 16, 32, 64, 128, 256)
REACH_US = {1: 8.0, 64: 16.0}  # on eight GPUs
SUMS, REPLAYS, ROUNDS = 60, 10, 5
LIMIT_S = 60.0


class Message:
    """A partial_sum and a residual of `tokens` tokens, and what is done with them."""

    def __init__(self, tokens: int, group: TensorParallelGroup, device: torch.device) -> None:
        torch.manual_seed(1000 * tokens)
        self.residual = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        self.norm = Norm(torch.rand(HIDDEN, device=device).bfloat16(), 1e-6)
        torch.manual_seed(1000 * tokens + 1 + group.rank)
        self.partial_sum = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        self.group = group

    @property
    def size(self) -> str:
        return f"{self.group.size} GPUs, {self.partial_sum.numel() * 2 // 1024} KiB"

    @property
    def memory(self) -> SymmetricMemory:
        assert self.group.symmetric_memory is not None
        return self.group.symmetric_memory

    def all_in_one(self) -> tuple[torch.Tensor, torch.Tensor]:
        return all_reduce_rms_norm(self.partial_sum, self.memory, self.norm, self.residual)

    def all_by_nccl(self) -> None:
        dist.all_reduce(self.partial_sum)
        rms_norm(self.residual.add_(self.partial_sum), *self.norm)

    def sum_alone(self) -> None:
        all_reduce(self.partial_sum, self.memory)

    def sum_by_nccl(self) -> None:
        dist.all_reduce(self.partial_sum)


def graph_of(once: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            once()
    return graph


def check(tokens: int, group: TensorParallelGroup, device: torch.device) -> float:
    """The fraction of numbers that differ from torch's by the order of the sum. All ranks must have the same bits."""
    message = Message(tokens, group, device)
    partial_sums = [torch.empty_like(message.partial_sum) for _ in range(group.size)]
    dist.all_gather(partial_sums, message.partial_sum)
    expected: tuple[torch.Tensor, ...] = (message.residual.clone(),)
    found: tuple[torch.Tensor, ...] = ()

    def once() -> None:
        nonlocal found
        found = message.all_in_one()

    graph = graph_of(once, 3)
    for launches, launch in ((1, lambda: None), (3, graph.replay), (3, graph.replay), (1, once)):
        launch()
        for _ in range(launches):
            expected = all_reduce_rms_norm_reference(partial_sums, message.norm, expected[0])
    for ours, theirs in zip(found, expected, strict=True):
        bits = [torch.empty_like(ours) for _ in range(group.size)]
        dist.all_gather(bits, ours.contiguous())
        assert all(torch.equal(each, bits[0]) for each in bits), f"{tokens} tokens: ranks differ"
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2.0**-6, atol=6e-2)
    return float((found[0] != expected[0]).float().mean())


def microseconds(once: Callable[[], object]) -> float:
    """The fastest of some rounds."""
    graph = graph_of(once, SUMS)
    best = float("inf")
    for _ in range(ROUNDS):
        graph.replay()  # brings the ranks together
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        for _ in range(REPLAYS):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, started.elapsed_time(ended) * 1000 / (REPLAYS * SUMS))
    return best


def checked(tokens: int, group: TensorParallelGroup, device: torch.device) -> tuple[Message, float]:
    """A message of zeros to be timed, since a sum of zeros stays zero over all replays; and the result of `check`."""
    message = Message(tokens, group, device)
    if not can_fuse_norm(message.partial_sum, group.size):
        raise SystemExit(f"{tokens} tokens are too many for one launch")
    differing = check(tokens, group, device)
    message.residual.zero_()
    message.partial_sum.zero_()
    return message, differing


def rows_of(tokens: int, group: TensorParallelGroup, device: torch.device) -> list[Row]:
    message, differing = checked(tokens, group, device)
    rows = []
    for what, peer, ours, theirs in (
        ("all-reduce, residual, norm", "NCCL, two kernels", message.all_in_one, message.all_by_nccl),
        ("all-reduce", "NCCL", message.sum_alone, message.sum_by_nccl),
    ):
        value, peer_value = microseconds(ours), microseconds(theirs)
        reach = REACH_US.get(tokens) if group.size == 8 and peer != "NCCL" else None
        target = Target(reach, better="lower") if reach else None
        row = Row(
            work=f"{message.size}: {what}", unit="us", value=value, peer=peer, peer_value=peer_value, target=target
        )
        row.ratio = peer_value / value
        rows.append(row)
    if group.rank == 0:
        times = "; ".join(f"{row.value:.2f} us, NCCL {row.peer_value:.2f}" for row in rows)
        print(f"{message.size}: {times}; {differing:.1%} rounded differently", flush=True)
    return rows


def compare_ways(tokens: int, group: TensorParallelGroup, device: torch.device) -> None:
    times = {}
    for way, worth in (("one shot", sys.maxsize), ("two", 0)):
        all_reduce_file._TWO_SHOT_SAVES_BYTES = worth
        message, _ = checked(tokens, group, device)
        times[way] = microseconds(message.all_in_one)
    if group.rank == 0:
        print(f"{message.size}: " + ", ".join(f"{way} {time:.2f} us" for way, time in times.items()), flush=True)


def work(rank: int, ranks: int, folder: Path, *, ways: bool) -> None:
    device = torch.device("cuda", rank)
    group = TensorParallelGroup(rank, ranks)
    group.join(folder / "group", device, LIMIT_S)
    if group.symmetric_memory is None:
        raise SystemExit("these GPUs have no peer access")
    if ways:
        for tokens in TOKENS:
            compare_ways(tokens, group, device)
        group.destroy()
        return
    rows = [row for tokens in TOKENS for row in rows_of(tokens, group, device)]
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        write_result(rows, {"torch": str(torch.__version__), "nccl": nccl}, gpus=ranks, script="all_reduce")
    group.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--ways", action="store_true", help="Compare only one-shot and two-shot all-reduces.")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.ranks, args.folder, ways=args.ways)
        return
    need_gpu(max(2, args.ranks))
    os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        ways = ["--ways"] if args.ways else []
        command = [sys.executable, __file__, *ways, "--ranks", str(args.ranks), "--folder", folder, "--rank"]
        others = [subprocess.Popen([*command, str(rank)], env=os.environ) for rank in range(1, args.ranks)]
        try:
            work(0, args.ranks, Path(folder), ways=args.ways)
            until = time.monotonic() + LIMIT_S
            for process in others:
                process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in others:
                process.kill()


if __name__ == "__main__":
    main()
