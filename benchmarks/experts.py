"""Grouped GEMM of experts against the device's limits, and the tuned configurations of kernels/moe/grouped_gemm.py.

Qwen3.5-35B-A3B's experts (256, top_k 8, one shared; hidden size 2,048) at width 512 and at 256, 128 and 64, the shards
of TP=2, 4 and 8; and Qwen3-30B-A3B's (128 of width 768, top_k 8). bf16, random data, a new uniform
routing per launch. Every number is the median of CUDA graph replays. For many tokens the kernels of
kernels/moe/grouped_gemm_tma.py are measured too.

    python benchmarks/experts.py                   # the table and benchmarks/results/experts/h200.json
    python benchmarks/experts.py --tune 256,128    # tries configurations for these widths and writes the best to
                                                   # src/meltcore/kernels/moe/tuned_configs.py, beside the others
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from attention import REPLAYS, matmul_flops_per_us, median_us, read_bytes_per_us
from bench_output import Row, need_gpu, write_result

from meltcore.kernels.capability import shared_memory_bytes
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.moe import grouped_gemm_tma, tuned_configs
from meltcore.kernels.moe.experts import add_experts
from meltcore.kernels.moe.grouped_gemm import Dispatch, Mode, grouped_gemm, select_config, select_mode
from meltcore.kernels.moe.routing import Routing

HIDDEN, TOP_K = 2048, 8
TYPE = torch.bfloat16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
# Tokens, mode of the grouped GEMM (None: as in the engine), and the peer: its name and mode.
MODES: tuple[tuple[int, Mode | None, str, Mode], ...] = (
    (1, None, "grouped GEMM", "gemv"),
    *((tokens, "indirect", "aligned pairs", "grouped") for tokens in (3, 8, 16, 24, 32, 48, 64)),
    *((tokens, None, "grouped GEMM without TMA", "grouped") for tokens in (2048, 4096, 8064)),
)
WIDTHS = (768, 512, 256, 128, 64)
CLOSE = 1.02  # a config is kept for more tokens while it is at most this much slower than the best
COMPILERS = 15
ROUGH_REPLAYS, CONTENDERS = 3, 4  # of all that are tried; then the fastest of each size of tiles, with all replays
TILES = (16, 32, 64, 128)  # pairs of one
TABLE = Path(tuned_configs.__file__)


class Experts(NamedTuple):
    """Number of routed experts, and whether a shared expert, the last, serves every token too."""

    selectable: int
    shared: bool

    @property
    def count(self) -> int:
        return self.selectable + self.shared

    @property
    def pairs(self) -> int:
        return TOP_K + self.shared

    def drawn(self, tokens: int) -> torch.Tensor:
        chosen = torch.rand(tokens, self.selectable, device="cuda").topk(TOP_K).indices
        shared = torch.full_like(chosen[:, :1], self.selectable)
        return (torch.cat([chosen, shared], 1) if self.shared else chosen).int()


def experts_of(width: int) -> Experts:
    return Experts(128, shared=False) if width == 768 else Experts(256, shared=True)


class ExpertGemm(NamedTuple):
    """gate_up_proj or down_proj of experts of one width."""

    width: int
    gated: bool

    @property
    def experts(self) -> Experts:
        return experts_of(self.width)

    @property
    def shape(self) -> tuple[int, int, int]:
        count = self.experts.count
        return (count, 2 * self.width, HIDDEN) if self.gated else (count, HIDDEN, self.width)

    @property
    def name(self) -> str:
        return f"{'gate and up' if self.gated else 'down'}, width {self.width}"


def gemms(widths: tuple[int, ...]) -> list[ExpertGemm]:
    return [ExpertGemm(width, gated) for width in widths for gated in (True, False)]


class Case:
    """A GEMM with its data."""

    def __init__(self, gemm: ExpertGemm) -> None:
        self.gemm = gemm
        self.weight = torch.randn(gemm.shape, device="cuda", dtype=TYPE) / gemm.shape[2] ** 0.5

    @property
    def down(self) -> torch.Tensor:
        """The shape of down_proj, by which the mode is selected."""
        return torch.empty(self.gemm.experts.count, HIDDEN, self.gemm.width, dtype=TYPE, device="meta")

    def drawn(self, tokens: int) -> list[torch.Tensor]:
        """Enough routings to read more than the L2 cache holds."""
        return [self.gemm.experts.drawn(tokens) for _ in range(16 if tokens <= 4 else 4)]

    def measure_us(
        self,
        config: GemmConfig,
        drawn: list[torch.Tensor],
        *,
        mode: Mode | None = None,
        replays: int = REPLAYS,
    ) -> float:
        """One GEMM, its pairs aligned if the mode needs it."""
        (pairs, top_k), (_, rows, columns) = (drawn[0].numel(), drawn[0].shape[1]), self.gemm.shape
        gated = self.gemm.gated
        inputs = torch.randn(pairs // top_k if gated else pairs, columns, device="cuda", dtype=TYPE)
        output = torch.empty(pairs, rows // (2 if gated else 1), device="cuda", dtype=TYPE)
        call = partial(grouped_gemm, inputs, self.weight, output, config=config, gated=gated)
        return median_us([partial(call, Dispatch.of(each, self.down, config.block_m, mode)) for each in drawn], replays)

    def floor_us(self, tokens: int, drawn: list[torch.Tensor], bandwidth: float, rate: float) -> float:
        distinct = sum(len(experts.unique()) for experts in drawn) / len(drawn)
        (_, rows, columns), pairs = self.gemm.shape, tokens * self.gemm.experts.pairs
        moved = (distinct * rows * columns + tokens * columns + pairs * rows) * TYPE.itemsize
        return max(moved / bandwidth, 2 * pairs * rows * columns / rate)


def candidates() -> Iterator[GemmConfig]:
    """Configurations that may be the fastest for some number of tokens.

    Wider steps, tiles of fewer rows and other numbers of warps were tried for widths of 512 and 64, and were never the
    fastest. One stage loads a whole narrow weight.
    """
    for pairs, rows, columns, stages in itertools.product((16, 32), (64, 128, 256), (64, 128), (1, 3, 4, 6)):
        yield GemmConfig(pairs, rows, columns, stages, 4)
    for rows, stages in itertools.product((128, 256), (1, 3, 4)):
        for columns in (64, 128) if stages == 1 else (64,):
            yield GemmConfig(64, rows, columns, stages, 4)
            yield GemmConfig(128, rows, columns, stages, 8)


def suits(config: GemmConfig, gemm: ExpertGemm) -> bool:
    """Whether the config fits into shared memory and every column of a tile has work."""
    steps = gemm.shape[2] / config.block_k
    if config.num_stages == 1:
        return steps == 1
    step = (config.block_m + config.block_n) * config.block_k * TYPE.itemsize
    enough = config.num_stages * step + 1024 <= shared_memory_bytes(torch.device("cuda", 0))
    return enough and steps >= 1 and (config.num_stages == 3 or config.num_stages <= steps)


def configs_of(gemm: ExpertGemm) -> list[GemmConfig]:
    return [config for config in candidates() if suits(config, gemm)]


def likely(config: GemmConfig, tokens: int, gemm: ExpertGemm) -> bool:
    """Whether block_m is from the mean number of pairs per expert to several times that."""
    even = tokens * TOP_K / gemm.experts.selectable
    return {16: even <= 16, 32: 2 <= even <= 64, 64: even >= 8, 128: even >= 16}[config.block_m]


def _compile(gemm: ExpertGemm, config: GemmConfig) -> None:
    case = Case(gemm)
    for mode in {select_mode(tokens, case.down) for tokens in TOKENS if likely(config, tokens, gemm)}:
        case.measure_us(config, [gemm.experts.drawn(1)], mode=mode, replays=1)


def contenders(case: Case, tokens: int, kept: GemmConfig | None) -> dict[GemmConfig, float]:
    """Microseconds of the configurations to measure well: the fastest ones per tile size, and `kept`."""
    drawn = case.drawn(tokens)
    tried = [config for config in configs_of(case.gemm) if likely(config, tokens, case.gemm)]
    rough = {config: case.measure_us(config, drawn, replays=ROUGH_REPLAYS) for config in tried}
    by_tile = groupby(sorted(tried, key=lambda config: (config.block_m, rough[config])), lambda config: config.block_m)
    chosen = {config for _, alike in by_tile for config in list(alike)[:CONTENDERS]}
    if kept in tried:
        chosen.add(kept)
    return {config: case.measure_us(config, drawn) for config in chosen}


class TunedGemm:
    """The configurations of one GEMM for increasing numbers of tokens."""

    def __init__(self, gemm: ExpertGemm) -> None:
        self.case, self.entries = Case(gemm), []

    @property
    def last(self) -> GemmConfig | None:
        return self.entries[-1][1] if self.entries else None

    def measure(self, tokens: int) -> None:
        self.times = contenders(self.case, tokens, self.last)

    def best(self, tile: int) -> float:
        """Microseconds; endless where no config has such tiles."""
        return min((time for config, time in self.times.items() if config.block_m == tile), default=math.inf)

    def choose(self, tokens: int, tile: int) -> None:
        alike = {config: time for config, time in self.times.items() if config.block_m == tile}
        best, most = min(alike, key=lambda config: alike[config]), tokens * self.case.gemm.experts.pairs
        if self.last in alike and alike[self.last] <= CLOSE * alike[best]:
            self.entries[-1] = (most, self.last)
        else:
            self.entries.append((most, best))
        print(f"{self.case.gemm.name}, {tokens} tokens: {alike[self.last]:.1f} us {tuple(self.last)[:5]}", flush=True)


def tune(widths: tuple[int, ...]) -> None:
    """Both GEMMs have the same block_m, since pairs are aligned once. Up to where other kernels take over."""
    jobs = [(gemm, config) for gemm in gemms(widths) for config in configs_of(gemm)]
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        pool.starmap(_compile, jobs, chunksize=1)
    table = dict(tuned_configs.TABLE)
    for width in widths:
        both, tile = [TunedGemm(gemm) for gemm in gemms((width,))], 0
        for tokens in TOKENS:
            gate_up, down = (one.case.weight for one in both)
            if grouped_gemm_tma.supports(gate_up[0], both[0].case.drawn(tokens)[0], gate_up, down):
                break
            for one in both:
                one.measure(tokens)
            times = {size: sum(one.best(size) for one in both) for size in TILES}
            if times.get(tile, math.inf) > CLOSE * min(times.values()):
                tile = min(times, key=lambda size: times[size])
            for one in both:
                one.choose(tokens, tile)
        for one in both:
            table[one.case.gemm.shape] = tuple((most, tuple(config)[:5]) for most, config in one.entries)
    write_table(table)


def write_table(table: dict) -> None:
    """In the order of widths, the widest first."""
    lines = []
    for shape in sorted(table, key=lambda shape: (-min(shape[1] // 2, shape[2]), -shape[2])):
        lines.append(f"    {shape}: (")
        lines += [f"        ({most}, {config})," for most, config in table[shape]]
        lines.append("    ),")
    head, _, _ = TABLE.read_text().partition(" = {")
    TABLE.write_text("\n".join([f"{head} = {{", *lines, "}\n"]))


def measure(widths: tuple[int, ...]) -> list[Row]:
    bandwidth, rate = read_bytes_per_us(), matmul_flops_per_us()
    rows = []
    for gemm in gemms(widths):
        case = Case(gemm)
        for tokens in TOKENS:
            drawn = case.drawn(tokens)
            time_us = case.measure_us(select_config(drawn[0].numel(), case.weight), drawn)
            floor_us = case.floor_us(tokens, drawn, bandwidth, rate)
            rows.append(
                Row(
                    work=f"{gemm.name}, {tokens:,} tokens",
                    unit="us",
                    value=time_us,
                    peer="floor: weights of the experts used, or FLOPs",
                    peer_value=floor_us,
                    ratio=floor_us / time_us,
                    limit_share=floor_us / time_us,
                )
            )
    return rows


def measure_modes(widths: tuple[int, ...]) -> list[Row]:
    """The whole feed-forward, in one mode against another."""
    rows = []
    for width in widths:
        gate_up, down = (Case(gemm).weight for gemm in gemms((width,)))
        experts = experts_of(width)
        for tokens, mode, peer, peer_mode in MODES:
            hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=TYPE)
            weights = torch.rand(tokens, experts.pairs, device="cuda") / experts.pairs
            routings = [Routing(experts.drawn(tokens), weights) for _ in range(4)]
            call = partial(add_experts, None, hidden, gate_up=gate_up, down=down)
            time_us, peer_us = (
                median_us([partial(call, routing=routing, mode=each) for routing in routings])
                for each in (mode, peer_mode)
            )
            rows.append(
                Row(
                    work=f"experts of width {width}, {tokens} token{'s' if tokens > 1 else ''}, all launches",
                    unit="us",
                    value=time_us,
                    peer=peer,
                    peer_value=peer_us,
                    ratio=peer_us / time_us,
                )
            )
    return rows


def _widths(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tune", type=_widths, help="Sweep configurations for these widths, separated by commas, and write the table."
    )
    parser.add_argument("--widths", type=_widths, default=WIDTHS, help="Expert widths to measure, separated by commas.")
    parser.add_argument("--modes", action="store_true", help="Measure only the modes of the grouped GEMM.")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    if arguments.tune:
        tune(arguments.tune)
        return
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    if arguments.modes:
        write_result(measure_modes(arguments.widths), versions)
        return
    write_result(measure(arguments.widths) + measure_modes(arguments.widths), versions)


if __name__ == "__main__":
    main()
