"""The sum over ranks of a message, into the residual stream: our one launch over peer memory beside NCCL's all-reduce.

A process a GPU. Times are of one sum in a CUDA graph of many, as a decode step has them; the residual's addition is in
both. Before anything is timed, every sum is compared with one computed by rank 0 from everybody's shares.

    python benchmarks/all_reduce.py --ranks 2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_output import Row, write_result

from meltcore.kernels.all_reduce import Peers, one_shot_sum, suits_one_shot, sum_of_shares
from meltcore.layers.group import Group

HIDDEN = 2048  # Qwen3.5-35B-A3B's: 4 KiB a token in bfloat16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
REACH_US = {1: 8.0, 64: 16.0}  # on eight GPUs
SUMS, REPLAYS, ROUNDS = 60, 10, 5
LIMIT_S = 60.0


def check(group: Group, peers: Peers, tokens: int, device: torch.device) -> float:
    """The share of numbers that differ from the sum by torch; all ranks must have the same bits."""
    torch.manual_seed(1000 * tokens + group.rank)
    share = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    shares = [torch.empty_like(share) for _ in range(group.size)]
    dist.all_gather(shares, share)
    residual = torch.full_like(share, 0.25)
    expected = sum_of_shares(shares, residual)
    result = one_shot_sum(share.clone(), peers, residual)
    bits = [torch.empty_like(result) for _ in range(group.size)]
    dist.all_gather(bits, result)
    assert all(torch.equal(each, bits[0]) for each in bits), f"{tokens} tokens: ranks differ"
    torch.testing.assert_close(result.float(), expected.float(), rtol=2.0**-7, atol=2e-2)
    return float((result != expected).float().mean())


def microseconds(tokens: int, peers: Peers | None, device: torch.device) -> float:
    """Of one sum, the fastest of some rounds."""
    share = torch.zeros(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    residual = torch.zeros_like(share)

    def once() -> None:
        if peers is not None:
            one_shot_sum(share, peers, residual)
        else:
            dist.all_reduce(share)
            residual.add_(share)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            once()
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


def work(rank: int, ranks: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    group = Group(rank, ranks)
    group.join(folder / "group", device, LIMIT_S)
    peers = group.peers
    if peers is None:
        raise SystemExit("these GPUs cannot write to each other's memory")
    rows = []
    for tokens in TOKENS:
        values = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        size = values.numel() * values.element_size()
        if not suits_one_shot(values):
            continue
        differing = check(group, peers, tokens, device)
        ours, theirs = microseconds(tokens, peers, device), microseconds(tokens, None, device)
        if rank == 0:
            print(
                f"{size // 1024} KiB: {ours:.2f} us, NCCL {theirs:.2f} us, {differing:.1%} rounded differently",
                flush=True,
            )
        reach = REACH_US.get(tokens) if ranks == 8 else None
        rows.append(
            Row(
                work=f"{ranks} GPUs, {size // 1024} KiB",
                unit="us a sum",
                value=ours,
                peer="NCCL",
                peer_value=theirs,
                ratio=theirs / ours,
                reach=reach,
            )
        )
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        write_result(f"all_reduce_{ranks}", rows, {"torch": torch.__version__, "nccl": nccl})
    group.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.ranks, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--folder", folder, "--rank"]
        others = [subprocess.Popen([*command, str(rank)], env=os.environ) for rank in range(1, args.ranks)]
        try:
            work(0, args.ranks, Path(folder))
            until = time.monotonic() + LIMIT_S
            for process in others:
                process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in others:
                process.kill()


if __name__ == "__main__":
    main()
