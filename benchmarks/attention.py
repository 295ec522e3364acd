"""Attention over pages against the device's limits: decode by measured read bandwidth, prefill by a GEMM.

Qwen3-0.6B's shapes (16 query heads, 8 key heads of 128), bf16, random data, pages in random order. Every number is the
median of CUDA graph replays, with inputs larger than the L2 cache; every result is compared with the reference first.

    python benchmarks/attention.py             # the table and benchmarks/results/attention/h200.json
    python benchmarks/attention.py --fp8       # decode over FP8 caches beside BF16's: results/attention/h200.json
    python benchmarks/attention.py --sweep decode     # other launch parameters, printed only
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
from bench_output import Row, Target, need_gpu, write_result

from meltcore.kernels.attention.decode import DecodeLaunch, decode_attention
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms, make_query_tiles
from meltcore.kernels.attention.prefill import PrefillLaunch, prefill_attention
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.rotary import rotary_table

PAGE_SIZE = 64
TYPE = torch.bfloat16
MAX_PAGES = 640  # of Qwen3-0.6B's 40,960 positions: the table is as wide as in the engine
REPLAYS = 15
CACHE_BYTES = 2**28  # inputs of a graph's launches together: several times any L2
DISTANCE = 1e-2  # of two bf16 bodies
DECODE_TARGET = Target(0.85, of="ratio")


class Heads(NamedTuple):
    """Heads of queries, heads of keys and values, and the elements of one."""

    query: int
    key: int
    dim: int

    @property
    def width(self) -> int:
        """Columns of the fused QKV projection: queries, keys and values of a token."""
        return (self.query + 2 * self.key) * self.dim

    @property
    def scale(self) -> float:
        return self.dim**-0.5


HEADS = Heads(16, 8, 128)  # Qwen3-0.6B
HEADS_OF_30B, HEADS_OF_35B = Heads(32, 4, 128), Heads(16, 2, 256)
FP8_WORKS = (
    *((HEADS, sequences, tokens) for sequences, tokens in ((64, 1280), (256, 1280), (1000, 640))),
    (HEADS_OF_30B, 400, 640),
    *((HEADS_OF_35B, sequences, 1280) for sequences in (64, 256)),
)


class Cache(NamedTuple):
    """A paged KV cache: keys and values [pages, page_size, heads, dim], and the pages of each sequence."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor


def make_cache(lengths: list[int], heads: Heads = HEADS, kind: torch.dtype = TYPE) -> Cache:
    """Row i of the table holds sequence i, on pages drawn without order."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    most = max(MAX_PAGES, *counts)
    shape = (sum(counts) + 1, PAGE_SIZE, heads.key, heads.dim)
    order = np.random.default_rng(0).permutation(sum(counts)) + 1
    table = np.zeros((len(lengths), most), dtype=np.int64)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        table[row, :count] = order[end - count : end]
    keys, values = (torch.randn(shape, dtype=TYPE, device="cuda").to(kind) for _ in range(2))
    return Cache(keys, values, torch.from_numpy(table).cuda())


def median_us(launches: list[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Microseconds per launch, from replays of one graph that holds them all."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times_us = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times_us)


def read_bytes_per_us(numbers: int = 2**30) -> float:
    data = torch.randn(numbers, device="cuda")
    return data.nbytes / median_us([data.sum] * 3)


def matmul_flops_per_us() -> float:
    left, right = (torch.randn(8192, 8192, dtype=TYPE, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median_us([lambda: left @ right] * 10)


def check(work: str, compute: Callable[[], torch.Tensor]) -> None:
    ours = compute().double()
    force_implementation("reference")
    expected = compute().double()
    force_implementation(None)
    distance = float((ours - expected).norm() / expected.norm())
    if not distance <= DISTANCE:
        raise SystemExit(f"{work}: relative distance {distance:.2e} from the reference")


class Decode:
    """One batch shape. Launches take turns over copies of the batch, enough of them to miss the L2 cache."""

    def __init__(self, work: str, lengths: list[int], heads: Heads = HEADS, kind: torch.dtype = TYPE) -> None:
        self.work, self.heads = work, heads
        sequences = len(lengths)
        self.kv_bytes = sum(lengths) * heads.key * heads.dim * 2 * kind.itemsize
        copies = min(64, max(4, CACHE_BYTES // self.kv_bytes))
        self.kept = copies if self.kv_bytes < CACHE_BYTES else 1
        self.cache = make_cache(lengths * self.kept, heads, kind)
        self.qkv = torch.randn(sequences, heads.width, dtype=TYPE, device="cuda")
        norms = HeadNorms(*torch.randn(2, heads.dim, dtype=TYPE, device="cuda"), 1e-6)
        rotary = rotary_table(heads.dim, max(lengths), 1e6, self.qkv.device)
        self.params = AttentionParams(norms, rotary, self.cache.keys, self.cache.values, heads.scale)
        self.positions = torch.tensor(lengths, device="cuda") - 1
        self.rows = [torch.arange(sequences, device="cuda") + sequences * (i % self.kept) for i in range(copies)]
        # Each key and value once, the new ones in the QKV output and in the cache, and the outputs.
        self.bytes = self.kv_bytes + self.qkv.nbytes + sequences * heads.query * heads.dim * TYPE.itemsize

    def call(self, rows: torch.Tensor) -> torch.Tensor:
        return decode_attention(self.qkv, self.params, self.positions, self.cache.table, rows)

    def measure_us(self) -> float:
        check(self.work, lambda: self.call(self.rows[0]))
        return median_us([partial(self.call, rows) for rows in self.rows])

    def measure_launch_us(self, launch: DecodeLaunch) -> float:
        out = torch.empty(len(self.qkv), self.heads.query, self.heads.dim, dtype=TYPE, device="cuda")

        def call(rows: torch.Tensor) -> None:
            decode_attention(self.qkv, self.params, self.positions, self.cache.table, rows, out=out, launch=launch)

        return median_us([partial(call, rows) for rows in self.rows])


class Prefill:
    """Chunks of `length` tokens after `context` tokens, one of each sequence, as the only chunks of a step."""

    def __init__(self, sequences: int, length: int, context: int = 0) -> None:
        self.work = f"prefill, {sequences} x {length:,} tokens{f' after {context:,}' if context else ''}"
        self.sequences, self.length = sequences, length
        self.cache = make_cache([context + length] * sequences)
        self.qkv = torch.randn(sequences * length, HEADS.width, dtype=TYPE, device="cuda")
        norms = HeadNorms(*torch.randn(2, HEADS.dim, dtype=TYPE, device="cuda"), 1e-6)
        rotary = rotary_table(HEADS.dim, context + length, 1e6, self.qkv.device)
        self.params = AttentionParams(norms, rotary, self.cache.keys, self.cache.values, HEADS.scale)
        chunks = [(row, row * length, length, context) for row in range(sequences)]
        self.tiles = torch.from_numpy(make_query_tiles(chunks)).cuda()
        # Two dot products of every visible pair of query and key.
        self.flops = 4 * HEADS.query * HEADS.dim * sequences * length * (2 * context + length + 1) // 2

    def call(self) -> torch.Tensor:
        return prefill_attention(self.qkv, self.params, self.cache.table, self.tiles)

    def measure_us(self) -> float:
        check(self.work, self.call)
        return median_us([self.call] * 5)

    def measure_launch_us(self, launch: PrefillLaunch) -> float:
        out = torch.empty(len(self.qkv), HEADS.query, HEADS.dim, dtype=TYPE, device="cuda")
        given = self.qkv, self.params, self.cache.table, self.tiles
        return median_us([partial(prefill_attention, *given, out=out, launch=launch)] * 5)

    def measure_torch_us(self) -> float:
        """torch's own attention on the same work: queries prepared, keys and values not in pages."""
        shape = (self.sequences, self.length, -1, HEADS.dim)
        queries = self.qkv[:, : HEADS.query * HEADS.dim].contiguous().view(shape).transpose(1, 2)
        keys, values = (
            part[1:].view(-1, HEADS.key, HEADS.dim)[: len(self.qkv)].view(shape).transpose(1, 2)
            for part in (self.cache.keys, self.cache.values)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return median_us(
            [lambda: attend(queries, keys, values, is_causal=True, scale=HEADS.scale, enable_gqa=True)] * 5
        )


def decode_works() -> list[Decode]:
    mixed = np.random.default_rng(1).integers(512, 2561, 256).tolist()
    return [
        Decode("decode, 256 sequences of 512 to 2,560 tokens", mixed),
        Decode("decode, 1 sequence of 600 tokens", [600]),
        Decode("decode, 10 sequences of 600 tokens", [600] * 10),
        Decode("decode, 32 sequences of 600 tokens", [600] * 32),
        Decode("decode, 100 sequences of 600 tokens", [600] * 100),
        Decode("decode, 64 sequences of 1,536 tokens", [1536] * 64),
        Decode("decode, 256 sequences of 600 tokens", [600] * 256),
        Decode("decode, 400 sequences of 600 tokens", [600] * 400),
        Decode("decode, 1,000 sequences of 600 tokens", [600] * 1000),
    ]


def prefill_works() -> list[Prefill]:
    return [Prefill(8, 1024), Prefill(14, 576), Prefill(1, 8192)]


def measure() -> list[Row]:
    bandwidth, rate = read_bytes_per_us(), matmul_flops_per_us()
    rows = [
        Row(work="read only: sum of 4 GiB of float32", unit="TB/s", value=bandwidth / 1e6),
        Row(work="bf16 GEMM of 8192^3", unit="TFLOP/s", value=rate / 1e6),
    ]
    for index, decode in enumerate(decode_works()):
        time_us = decode.measure_us()
        floor_us = decode.bytes / bandwidth
        rows.append(
            Row(
                work=decode.work,
                unit="us",
                value=time_us,
                peer=f"{decode.bytes / 1e6:,.1f} MB at read bandwidth",
                peer_value=floor_us,
                ratio=floor_us / time_us,
                target=DECODE_TARGET if index == 0 else None,
                limit_share=floor_us / time_us,
            )
        )
    for prefill in prefill_works():
        time_us, peer_us = prefill.measure_us(), prefill.measure_torch_us()
        rows.append(
            Row(
                work=prefill.work,
                unit="TFLOP/s",
                value=prefill.flops / time_us / 1e6,
                peer="torch, without pages",
                peer_value=prefill.flops / peer_us / 1e6,
                ratio=peer_us / time_us,
                limit_share=prefill.flops / time_us / rate,
            )
        )
    return rows


def measure_fp8() -> list[Row]:
    """The same sequences in a cache of e4m3 and in one of bf16; shares are of the read bandwidth."""
    bandwidth = read_bytes_per_us()
    rows = [Row(work="read only: sum of 4 GiB of float32", unit="TB/s", value=bandwidth / 1e6)]
    for heads, sequences, tokens in FP8_WORKS:
        work = f"decode, heads {heads.query}/{heads.key} of {heads.dim}, {sequences:,} sequences of {tokens:,} tokens"
        found = {}
        for kind in (TYPE, FP8):
            decode = Decode(work, [tokens] * sequences, heads, kind)
            found[kind] = decode.measure_us(), decode.bytes / bandwidth
            del decode
        (plain_us, _), (time_us, floor_us) = found[TYPE], found[FP8]
        rows.append(
            Row(
                work=work,
                unit="us",
                value=time_us,
                peer="bf16 cache",
                peer_value=plain_us,
                ratio=plain_us / time_us,
                limit_share=floor_us / time_us,
            )
        )
    return rows


def decode_launches() -> Iterator[DecodeLaunch]:
    cuts = [(1, 32), (2, 32), (4, 32), (4, 16), (2, 8), (4, 8), (4, 4), (8, 4), (8, 2), (8, 1), (16, 1), (64, 1)]
    for (splits, share_pages), stages, ahead in itertools.product(cuts, (2, 3, 4), (False, True)):
        yield DecodeLaunch(splits, share_pages, 64, 4, stages, ahead)


def prefill_launches() -> Iterator[PrefillLaunch]:
    for packed, warps, registers in ((1, 4, None), (2, 4, None), (2, 8, None), (2, 8, 128)):
        for block_keys, stages in ((64, 2), (64, 3), (64, 4), (32, 3), (32, 4), (128, 2)):
            yield PrefillLaunch(packed, block_keys, warps, stages, registers)


def sweep_decode() -> None:
    """Best first, ten of each work."""
    bandwidth = read_bytes_per_us()
    for decode in decode_works():
        print(f"{decode.work}; chosen {decode.measure_us():.1f} us, floor {decode.bytes / bandwidth:.1f} us")
        found = [(decode.measure_launch_us(launch), launch) for launch in decode_launches()]
        print(*(f"  {time_us:8.1f} us  {launch}" for time_us, launch in sorted(found)[:10]), sep="\n")


def sweep_prefill() -> None:
    for prefill in prefill_works():
        print(f"{prefill.work}; chosen {prefill.flops / prefill.measure_us() / 1e6:.0f} TFLOP/s")
        found_prefill = [(prefill.measure_launch_us(launch), launch) for launch in prefill_launches()]
        print(*(f"  {prefill.flops / us / 1e6:6.0f} TFLOP/s  {it}" for us, it in sorted(found_prefill)), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=("decode", "prefill"), help="Sweep launch parameters instead.")
    parser.add_argument("--fp8", action="store_true", help="Measure decode over FP8 caches beside BF16 caches.")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    if arguments.sweep == "decode":
        sweep_decode()
    elif arguments.sweep == "prefill":
        sweep_prefill()
    else:
        rows = measure_fp8() if arguments.fp8 else measure()
        versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
        write_result(rows, versions, subject="FP8 caches" if arguments.fp8 else "")


if __name__ == "__main__":
    main()
