"""Attention of prompts beside FlashAttention 3, in one process on the same queries, keys and values.

Qwen3-0.6B's shapes, bf16, causal; whole prompts, and chunks after a context. Ours normalizes and rotates its queries
and reads keys from pages of 64 in random order. FlashAttention 3 gets queries that are prepared, and keys without
pages, in pages of 128, which its bulk copies can load, and in ours. Numbers are medians of CUDA graph replays. Each
output of ours is compared with the reference, and FlashAttention 3's with ours.

    PYTHONPATH=FOLDER_OF_SGLANG python benchmarks/prompt_attention.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import torch
from attention import DISTANCE, HEADS, PAGE_SIZE, TYPE, Cache, Prefill, check, matmul_flops_per_us, median_us
from bench_output import Row, Target, need_gpu, write_result

from meltcore.kernels.attention.kv_cache import rotated_queries

LAUNCHES = 5
REPLAYS, LONG_REPLAYS, LONG_TOKENS = 15, 5, 32_768  # fewer of long prompts
TARGET = Target(0.9, of="ratio")
TARGET_TOKENS = 8192  # and longer prompts
FlashAttention = Callable[..., torch.Tensor]


class Library(NamedTuple):
    """FlashAttention 3 as a package ships it."""

    name: str
    attend: FlashAttention


def find_library() -> Library:
    """Exits where no package with FlashAttention 3 is on the path."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise SystemExit(f"needs sgl_kernel of SGLang on the path: {error}") from None
    return Library(f"FlashAttention 3 of sglang-kernel {metadata.version('sglang-kernel')}", flash_attn_with_kvcache)


def repaged(cache: Cache, sequences: int, length: int, page_size: int) -> Cache:
    """The same keys and values in larger pages, in random order too."""
    pages = sequences * (length // page_size)
    order = torch.randperm(pages, device="cuda")
    shape = (pages, page_size, HEADS.key, HEADS.dim)
    found = []
    for flat in contiguous(cache, sequences, length):
        paged = torch.empty(shape, dtype=TYPE, device="cuda")
        paged[order] = flat.reshape(shape)
        found.append(paged)
    return Cache(*found, order.view(sequences, -1))


def contiguous(cache: Cache, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values without pages: [sequences, length, heads, dim] each."""
    used = cache.table[:, : length // PAGE_SIZE]
    keys, values = (part[used].reshape(sequences, length, HEADS.key, HEADS.dim) for part in cache[:2])
    return keys, values


class Beside:
    """Our prefill attention and FlashAttention 3 on one batch. length: keys of a sequence."""

    def __init__(self, sequences: int, length: int, context: int, library: Library) -> None:
        self.ours, self.library = Prefill(sequences, length, context), library
        self.sequences, self.length = sequences, context + length
        positions = torch.arange(context, self.length, device="cuda").repeat(sequences)
        queries = rotated_queries(self.ours.qkv, self.ours.params, positions)
        self.queries = queries.view(sequences, length, HEADS.query, HEADS.dim).contiguous()
        self.lengths = torch.full((sequences,), self.length, dtype=torch.int32, device="cuda")

    def without_pages(self) -> Callable[[], torch.Tensor]:
        keys, values = contiguous(self.ours.cache, self.sequences, self.length)
        return lambda: self.library.attend(self.queries, keys, values, softmax_scale=HEADS.scale, causal=True)

    def in_pages(self, page_size: int) -> Callable[[], torch.Tensor]:
        cache = self.ours.cache
        if page_size != PAGE_SIZE:
            cache = repaged(cache, self.sequences, self.length, page_size)
        table = cache.table[:, : self.length // page_size].to(torch.int32).contiguous()
        return lambda: self.library.attend(
            self.queries,
            cache.keys,
            cache.values,
            page_table=table,
            cache_seqlens=self.lengths,
            softmax_scale=HEADS.scale,
            causal=True,
        )

    def rows(self, flops_per_us: float) -> list[Row]:
        work, expected = self.ours.work, self.ours.call().double()
        check(work, self.ours.call)
        launches = {"": self.without_pages()}
        launches |= {f"pages of {size}": self.in_pages(size) for size in (128, PAGE_SIZE) if self.length % size == 0}
        for name, launch in launches.items():
            theirs = launch().view(expected.shape).double()
            distance = float((theirs - expected).norm() / expected.norm())
            if not distance <= DISTANCE:
                raise SystemExit(f"{work}, {self.library.name} {name}: relative distance {distance:.2e} from ours")
            del theirs
        del expected
        # Ours before and after the others, since a GPU at its power limit slows down: the mean of both.
        replays = REPLAYS if self.length < LONG_TOKENS else LONG_REPLAYS
        before_us = median_us([self.ours.call] * LAUNCHES, replays)
        times_us = {name: median_us([launch] * LAUNCHES, replays) for name, launch in launches.items()}
        ours_us = (before_us + median_us([self.ours.call] * LAUNCHES, replays)) / 2
        rows = []
        for name, time_us in times_us.items():
            row = Row(
                work=f"{work}{f', theirs in {name}' if name else ''}",
                unit="TFLOP/s",
                value=self.ours.flops / ours_us / 1e6,
                peer=self.library.name,
                peer_value=self.ours.flops / time_us / 1e6,
                ratio=time_us / ours_us,
                limit_share=self.ours.flops / ours_us / flops_per_us,
            )
            if not name and self.length >= TARGET_TOKENS:
                row.target = TARGET
            rows.append(row)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts",
        default="1x8192,1x32768,1x131072,1x16384+114688,1x4096+61440,8x1024,14x576",
        help="Batches, each COUNTxTOKENS; +CONTEXT: tokens before them.",
    )
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    library = find_library()
    rate = matmul_flops_per_us()
    rows = [Row(work="bf16 GEMM of 8192^3", unit="TFLOP/s", value=rate / 1e6)]
    for prompts in args.prompts.split(","):
        sequences, _, chunk = prompts.partition("x")
        length, _, context = chunk.partition("+")
        rows += Beside(int(sequences), int(length), int(context or 0), library).rows(rate)
    versions = {name: metadata.version(name) for name in ("torch", "triton", "sglang-kernel")}
    write_result(rows, versions)


if __name__ == "__main__":
    main()
