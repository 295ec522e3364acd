"""All-reduce, residual addition and norm of prompt steps: messages of 1 to 64 MiB in stages, beside NCCL.

One process per GPU. Times are of one such operation in a CUDA graph of many, alone and after a GEMM, as in a layer, and
with the weighted sum over each token's experts before it. NCCL runs without the events that it records between
reductions. Results of both are first compared with the reference.

The rate at which all ranks write to each other at the same time is printed first.

    python benchmarks/prompt_all_reduce.py --ranks 2
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
from typing import Any

import torch
import torch.distributed as dist
from bench_output import Row, need_gpu, write_result

from meltcore.kernels.comm.all_reduce import all_reduce_rms_norm_reference
from meltcore.kernels.comm.staged_all_reduce import staged_all_reduce_rms_norm, staged_combine_all_reduce_rms_norm
from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.moe.combine import combine, combine_reference
from meltcore.kernels.norm import Norm, add_rms_norm
from meltcore.layers.tensor_parallel import TensorParallelGroup, share_allocation

HIDDEN, TOP_K = 2048, 9  # Qwen3.5-35B-A3B's: 4 KiB per token in bfloat16; eight experts and a shared one
TOKENS = (256, 1024, 4096, 8192, 16384)  # 1, 4, 16, 32 and 64 MiB
LINK_BYTES, LINK_PROGRAMS = 32 * 2**20, (16, 64, 256)
REPEATS, REPLAYS, ROUNDS = 12, 3, 4
LIMIT_S = 120.0

Once = Callable[[], object]


@triton.jit
def _link_kernel(source, target, words, BLOCK: tl.constexpr):
    """Copy int32 words between two addresses, BLOCK per iteration of a program."""
    source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    start = tl.program_id(0) * BLOCK
    while start < words:
        offset = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + offset, tl.load(source_ptr + offset))
        start += tl.num_programs(0) * BLOCK


def exchanged(local: bytes) -> list[bytes]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local)
    return every


class Message:
    """Partial sums and a residual of `tokens` tokens, and what is done with them."""

    def __init__(self, tokens: int, group: TensorParallelGroup, device: torch.device) -> None:
        self.group = group
        torch.manual_seed(1000 * tokens)
        self.residual = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        self.norm = Norm(torch.rand(HIDDEN, device=device).bfloat16(), 1e-6)
        self.topk_weights = torch.rand(tokens, TOP_K, device=device)
        torch.manual_seed(1000 * tokens + 1 + group.rank)
        self.partial_sum = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        self.outputs = torch.randn(tokens * TOP_K, HIDDEN, device=device).bfloat16()
        self.weight = torch.randn(HIDDEN, HIDDEN, device=device).bfloat16() / HIDDEN**0.5
        self.hidden = torch.empty_like(self.partial_sum)

    @property
    def memory(self) -> SymmetricMemory:
        assert self.group.symmetric_memory is not None, "these GPUs have no peer access"
        return self.group.symmetric_memory

    @property
    def megabytes(self) -> float:
        return self.partial_sum.numel() * 2 / 1e6

    def nccl(self) -> torch.Tensor:
        dist.all_reduce(self.partial_sum)
        return add_rms_norm(self.residual, self.partial_sum, *self.norm)

    def staged(self) -> torch.Tensor:
        return staged_all_reduce_rms_norm(self.partial_sum, self.memory, self.norm, self.residual)[1]

    def experts_nccl(self) -> torch.Tensor:
        partial_sum = combine(self.outputs, self.topk_weights)
        dist.all_reduce(partial_sum)
        return add_rms_norm(self.residual, partial_sum, *self.norm)

    def experts_staged(self) -> torch.Tensor:
        return staged_combine_all_reduce_rms_norm(
            self.outputs, self.memory, self.topk_weights, self.norm, self.residual
        )[1]

    def gemm(self) -> None:
        torch.mm(self.hidden, self.weight, out=self.partial_sum)

    def forms(self) -> dict[str, Once]:
        return {
            "NCCL": self.nccl,
            "staged": self.staged,
            "experts, NCCL": self.experts_nccl,
            "experts, staged": self.experts_staged,
        }


def graph_of(once: Once, times: int) -> torch.cuda.CUDAGraph:
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            once()
    return graph


def microseconds(once: Once, repeats: int = REPEATS) -> float:
    """The fastest of some rounds."""
    graph = graph_of(once, repeats)
    best = float("inf")
    for _ in range(ROUNDS):
        graph.replay()  # brings the ranks together
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        for _ in range(REPLAYS):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, started.elapsed_time(ended) * 1000 / (REPLAYS * repeats))
    return best


def check(message: Message, name: str, form: Once) -> float:
    """Compare a form's normalized rows with the reference, eagerly and in a graph. Returns the part that differs."""
    experts, residual = name.startswith("experts"), message.residual.clone()
    sent = combine_reference(message.outputs, message.topk_weights) if experts else message.partial_sum.clone()
    partial_sums = [torch.empty_like(sent) for _ in range(message.group.size)]
    dist.all_gather(partial_sums, sent)
    local = message.partial_sum.clone()
    _, expected = all_reduce_rms_norm_reference(partial_sums, message.norm, residual)
    differing = 0.0

    def fresh() -> None:
        message.partial_sum.copy_(local)
        message.residual.copy_(residual)

    fresh()
    graph, found = torch.cuda.CUDAGraph(), [torch.empty(0)]
    form()
    fresh()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found[0] = form()  # type: ignore[assignment]
    for _ in range(3):
        fresh()
        found[0].zero_()
        torch.cuda.synchronize()
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        bits = [torch.empty_like(expected) for _ in range(message.group.size)]
        dist.all_gather(bits, found[0].contiguous())
        assert all(torch.equal(each, bits[0]) for each in bits), f"{name}: ranks differ"
        torch.testing.assert_close(found[0].float(), expected.float(), rtol=2.0**-5, atol=6e-2)
        differing = float((found[0] != expected).float().mean())
    fresh()
    return differing


def link_rates(group: TensorParallelGroup, device: torch.device) -> None:
    """Print GB/s in each direction while every rank writes to the next one."""
    source = torch.randint(0, 2**30, (LINK_BYTES // 4,), dtype=torch.int32, device=device)
    theirs = share_allocation(group.rank, LINK_BYTES, device, exchanged)[(group.rank + 1) % group.size]
    for programs in LINK_PROGRAMS:

        def write(programs: int = programs) -> None:
            _link_kernel[(programs,)](source.data_ptr(), theirs, len(source), BLOCK=4096, num_warps=8)

        dist.barrier()
        rate = LINK_BYTES / microseconds(write, 10) / 1e3
        if group.rank == 0:
            print(f"link, {programs} programs write: {rate:.0f} GB/s", flush=True)


def rows_of(message: Message) -> list[Row]:
    rank, size = message.group.rank, message.group.size
    rows, times = [], {}
    for name, form in message.forms().items():
        differing = check(message, name, form)
        message.residual.zero_()
        message.partial_sum.zero_()
        message.outputs.zero_()
        message.hidden.normal_()
        for chain in (False,) if name.startswith("experts") else (False, True):

            def once(form: Once = form, chain: bool = chain) -> None:
                if chain:
                    message.gemm()
                form()

            label = f"{name}, GEMM before" if chain else name
            times[label] = microseconds(once)
            peer = ("experts, NCCL" if name.startswith("experts") else "NCCL") + (", GEMM before" if chain else "")
            bus_gbps = message.megabytes / times[label] * 2 * (size - 1) / size * 1e3
            if rank == 0:
                print(
                    f"{message.megabytes / 1.048576:.0f} MiB, {label}: {times[label]:.1f} us, {bus_gbps:.0f} GB/s, "
                    f"{times[peer] / times[label]:.2f} of NCCL's rate, {differing:.2%} rounded differently",
                    flush=True,
                )
            row = Row(work=f"{size} GPUs, {len(message.partial_sum)} tokens: {label}", unit="us", value=times[label])
            if label != peer:
                row.peer, row.peer_value, row.ratio = peer, times[peer], times[peer] / times[label]
            rows.append(row)
        torch.manual_seed(message.group.rank)
        message.residual.normal_()
        message.partial_sum.normal_()
        message.outputs.normal_()
        dist.broadcast(message.residual, 0)
    return rows


def work(rank: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    group = TensorParallelGroup(rank, args.ranks)
    group.join(args.folder / "group", device, LIMIT_S)
    if group.symmetric_memory is None:
        raise SystemExit("these GPUs have no peer access")
    link_rates(group, device)
    rows = []
    for tokens in TOKENS:
        message = Message(tokens, group, device)
        rows += rows_of(message)
        del message
        torch.cuda.empty_cache()
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        write_result(rows, {"torch": str(torch.__version__), "nccl": nccl}, gpus=args.ranks, script="prompt_all_reduce")
    group.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args)
        return
    need_gpu(max(2, args.ranks))
    os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--folder", folder]
        others = [subprocess.Popen([*command, "--rank", str(rank)], env=os.environ) for rank in range(1, args.ranks)]
        try:
            work(0, args)
            until = time.monotonic() + LIMIT_S
            for process in others:
                process.wait(max(0.0, until - time.monotonic()))
        finally:
            for process in others:
                process.kill()


if __name__ == "__main__":
    main()
