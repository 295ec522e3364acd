"""All-reduce, residual addition and norm of prompt steps: messages of 1 to 64 MiB in five forms.

One process per GPU. Times are of one such operation in a CUDA graph of many, alone and after a GEMM, as in a layer.
NCCL runs without the events that it records between reductions. Results of every form are first compared with the
reference.

- NCCL: all-reduce, then addition and norm of all rows
- staged: our launches over symmetric memory (staged_all_reduce.py), which are not in the engine
- NCCL, sharded: reduce-scatter, addition and norm of this rank's rows only, all-gather of the normalized rows
- copy engines, N chunks: the same over peer copies, with the sum of one chunk beside the copies of the next
- experts: with the weighted sum over each token's experts before it, by NCCL and staged

The link's own rates, in both directions at the same time, are printed first: by copy engines, and by programs that
write to the other GPU or read from it.

    python benchmarks/prompt_all_reduce.py --ranks 2
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import staged_all_reduce as staged_file
import torch
import torch.distributed as dist
from bench_output import Row, need_gpu, write_result
from staged_all_reduce import (
    StagedMemory,
    buffer_bytes,
    exchange_stage,
    staged_all_reduce_rms_norm,
    staged_combine_all_reduce_rms_norm,
)

from meltcore.kernels.comm.all_reduce import all_reduce_rms_norm_reference
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.moe.combine import combine, combine_reference
from meltcore.kernels.norm import Norm, add_rms_norm
from meltcore.layers.tensor_parallel import TensorParallelGroup, has_peer_access, share_allocation

HIDDEN, TOP_K = 2048, 9  # Qwen3.5-35B-A3B's: 4 KiB per token in bfloat16; eight experts and a shared one
TOKENS = (256, 1024, 4096, 8192, 16384)  # 1, 4, 16, 32 and 64 MiB
LINK_BYTES, LINK_PROGRAMS = 32 * 2**20, (16, 32, 64, 128, 256)
CHUNKS = (1, 4)  # of a message that copy engines move
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


class _Memory:
    """Device memory at an address, as torch.as_tensor takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def exchanged(local: bytes) -> list[bytes]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local)
    return every


def staged_memory(group: TensorParallelGroup, device: torch.device) -> StagedMemory:
    return StagedMemory.of(share_allocation(group.rank, buffer_bytes(), device, exchanged), group.rank, device)


class Shared:
    """Memory of every rank that all can address."""

    def __init__(self, num_bytes: int, group: TensorParallelGroup, device: torch.device) -> None:
        self.addresses = share_allocation(group.rank, num_bytes, device, exchanged)
        self.local = torch.as_tensor(_Memory(self.addresses[group.rank], num_bytes), device=device)
        self._driver = ctypes.CDLL("libcuda.so.1")

    def push(self, rank: int, offset: int, source: torch.Tensor) -> None:
        """Copy a contiguous tensor to this memory of `rank`, by a copy engine on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        target, size = ctypes.c_uint64(self.addresses[rank] + offset), source.numel() * source.element_size()
        error = self._driver.cuMemcpyAsync(target, ctypes.c_uint64(source.data_ptr()), ctypes.c_size_t(size), stream)
        assert error == 0, f"cuMemcpyAsync: error {error}"


class CopyEngines:
    """The exchange by peer copies: rows of other ranks arrive in the first half of `shared`, sums in the second."""

    def __init__(self, group: TensorParallelGroup, device: torch.device) -> None:
        self.group, self.bytes = group, TOKENS[-1] * HIDDEN * 2
        self.shared = Shared(2 * self.bytes, group, device)
        # Of these only counters are used: a message has one for its rows and one for its sums, and so has a chunk.
        self.memories = [staged_memory(group, device) for _ in range(max(CHUNKS))]
        self.rows_stream, self.sums_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def run(self, message: Message, chunks: int) -> torch.Tensor:
        """Returns the normalized rows of all ranks; the residual stays sharded."""
        rank, ranks = self.group.rank, self.group.size
        partial_sum, main = message.partial_sum, torch.cuda.current_stream()
        tokens = len(partial_sum)
        rows, row_bytes = tokens // (chunks * ranks), HIDDEN * 2
        normalized = self.shared.local[self.bytes :][: tokens * row_bytes].view(torch.bfloat16).view(tokens, HIDDEN)
        self.rows_stream.wait_stream(main)
        self.sums_stream.wait_stream(main)
        events = []
        with torch.cuda.stream(self.rows_stream):
            for chunk in range(chunks):
                for step in range(1, ranks):
                    peer = (rank + step) % ranks
                    first = (chunk * ranks + peer) * rows
                    slot = (chunk * ranks + rank) * rows * row_bytes
                    self.shared.push(peer, slot, partial_sum[first : first + rows])
                exchange_stage(0, self.memories[chunk], wait=False)
                events.append(self.rows_stream.record_event())
        for chunk in range(chunks):
            main.wait_event(events[chunk])
            exchange_stage(0, self.memories[chunk], signal=False)
            first = (chunk * ranks + rank) * rows
            own = partial_sum[first : first + rows]
            for step in range(1, ranks):
                peer = (rank + step) % ranks
                slot = self.shared.local[(chunk * ranks + peer) * rows * row_bytes :][: rows * row_bytes]
                own = own + slot.view(torch.bfloat16).view(rows, HIDDEN)
            result = add_rms_norm(message.residual[first : first + rows], own, *message.norm)
            normalized[first : first + rows].copy_(result)
            self.sums_stream.wait_stream(main)
            with torch.cuda.stream(self.sums_stream):
                for step in range(1, ranks):
                    peer = (rank + step) % ranks
                    self.shared.push(peer, self.bytes + first * row_bytes, normalized[first : first + rows])
                exchange_stage(1, self.memories[chunk], wait=False)
        main.wait_stream(self.sums_stream)
        main.wait_stream(self.rows_stream)
        for chunk in range(chunks):
            exchange_stage(1, self.memories[chunk], signal=False)
        return normalized


class Message:
    """Partial sums and a residual of `tokens` tokens, and what is done with them."""

    def __init__(self, tokens: int, group: TensorParallelGroup, device: torch.device, engines: CopyEngines) -> None:
        self.group, self.memory, self.engines = group, engines.memories[0], engines
        torch.manual_seed(1000 * tokens)
        self.residual = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        self.norm = Norm(torch.rand(HIDDEN, device=device).bfloat16(), 1e-6)
        self.topk_weights = torch.rand(tokens, TOP_K, device=device)
        torch.manual_seed(1000 * tokens + 1 + group.rank)
        self.partial_sum = torch.randn(tokens, HIDDEN, device=device).bfloat16()
        self.outputs = torch.randn(tokens * TOP_K, HIDDEN, device=device).bfloat16()
        self.weight = torch.randn(HIDDEN, HIDDEN, device=device).bfloat16() / HIDDEN**0.5
        self.own_rows = torch.empty(tokens // group.size, HIDDEN, device=device, dtype=torch.bfloat16)
        self.gathered = torch.empty_like(self.partial_sum)

    @property
    def megabytes(self) -> float:
        return self.partial_sum.numel() * 2 / 1e6

    def nccl(self) -> torch.Tensor:
        dist.all_reduce(self.partial_sum)
        return add_rms_norm(self.residual, self.partial_sum, *self.norm)

    def staged(self) -> torch.Tensor:
        return staged_all_reduce_rms_norm(self.partial_sum, self.memory, self.norm, self.residual)[1]

    def sharded(self) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.own_rows, self.partial_sum)
        rows = len(self.own_rows)
        residual = self.residual[self.group.rank * rows : (self.group.rank + 1) * rows]
        dist.all_gather_into_tensor(self.gathered, add_rms_norm(residual, self.own_rows, *self.norm))
        return self.gathered

    def copy_engines(self, chunks: int) -> torch.Tensor:
        return self.engines.run(self, chunks)

    def experts_nccl(self) -> torch.Tensor:
        partial_sum = combine(self.outputs, self.topk_weights)
        dist.all_reduce(partial_sum)
        return add_rms_norm(self.residual, partial_sum, *self.norm)

    def experts_staged(self) -> torch.Tensor:
        return staged_combine_all_reduce_rms_norm(
            self.outputs, self.memory, self.topk_weights, self.norm, self.residual
        )[1]

    def gemm(self) -> None:
        torch.mm(self.gathered, self.weight, out=self.partial_sum)

    def forms(self) -> dict[str, Once]:
        forms: dict[str, Once] = {"NCCL": self.nccl, "staged": self.staged, "NCCL, sharded": self.sharded}
        for chunks in CHUNKS:
            forms[f"copy engines, {chunks} chunks"] = lambda chunks=chunks: self.copy_engines(chunks)
        return forms | {"experts, NCCL": self.experts_nccl, "experts, staged": self.experts_staged}


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


def link_rates(engines: CopyEngines, device: torch.device) -> None:
    """Print GB/s in each direction while every rank copies to, or from, the next one."""
    group = engines.group
    peer = (group.rank + 1) % group.size
    source = torch.randint(0, 2**30, (LINK_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    theirs = engines.shared.addresses[peer]

    def kernel(programs: int, first: int, second: int) -> Once:
        return lambda: _link_kernel[(programs,)](first, second, len(source), BLOCK=4096, num_warps=8)

    forms: dict[str, Once] = {"copy engine": lambda: engines.shared.push(peer, 0, source)}
    forms |= {f"{programs} programs write": kernel(programs, source.data_ptr(), theirs) for programs in LINK_PROGRAMS}
    forms |= {f"{programs} programs read": kernel(programs, theirs, target.data_ptr()) for programs in LINK_PROGRAMS}
    for name, once in forms.items():
        dist.barrier()
        rate = LINK_BYTES / microseconds(once, 10) / 1e3
        if group.rank == 0:
            print(f"link, {name}: {rate:.0f} GB/s", flush=True)


def rows_of(message: Message, only: str) -> list[Row]:
    rank, size = message.group.rank, message.group.size
    rows, times = [], {}
    for name, form in message.forms().items():
        if only and only not in name and name not in ("NCCL", "experts, NCCL"):
            continue
        differing = check(message, name, form)
        message.residual.zero_()
        message.partial_sum.zero_()
        message.outputs.zero_()
        message.gathered.normal_()
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


def tile_sweep(message: Message) -> None:
    """Print times of the staged form by the words of a tile."""
    chosen = staged_file._TILE_WORDS
    for words in (1024, 2048, 4096, 8192):
        staged_file._TILE_WORDS = words
        times = [microseconds(once) for once in (message.staged, message.experts_staged)]
        if message.group.rank == 0:
            size = f"{message.megabytes / 1.048576:.0f} MiB"
            print(f"{size}, tiles of {words} words: {times[0]:.1f} us, experts {times[1]:.1f}", flush=True)
    staged_file._TILE_WORDS = chosen


def work(rank: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    group = TensorParallelGroup(rank, args.ranks)
    group.join(args.folder / "group", device, LIMIT_S)
    if not has_peer_access(range(args.ranks)):
        raise SystemExit("these GPUs have no peer access")
    engines = CopyEngines(group, device)
    link_rates(engines, device)
    rows = []
    for tokens in TOKENS:
        message = Message(tokens, group, device, engines)
        rows += rows_of(message, args.only)
        if args.sweep and tokens == 8192:
            tile_sweep(message)
        del message
        torch.cuda.empty_cache()
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        write_result(rows, {"torch": str(torch.__version__), "nccl": nccl}, gpus=args.ranks, script="prompt_all_reduce")
    group.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--sweep", action="store_true", help="Also time tiles and numbers of programs; printed only.")
    parser.add_argument("--only", default="", help="Only forms whose name has this text, beside NCCL.")
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
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--folder", folder, "--only", args.only]
        command += ["--sweep"] if args.sweep else []
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
