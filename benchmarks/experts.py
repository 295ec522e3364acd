"""Products of routed experts against the device's limits, and the table of launches that kernels/experts.py takes.

Qwen3.5-35B-A3B's experts (256 of which a token has 8, and one that all have; hidden size 2,048) at their width of 512
and at 256, 128 and 64, what each of 2, 4 and 8 GPUs has of it; and Qwen3-30B-A3B's 128 of width 768, of which a token
has 8. bf16, random data, uniform random routing, another one in every launch. Every number is the median of CUDA graph
replays. Many tokens have launches of their own (kernels/expert_tiles.py), which are measured beside these.

    python benchmarks/experts.py                   # the table and benchmarks/results/experts.json
    python benchmarks/experts.py --tune 256,128    # tries launches for these widths and puts what it found into
                                                   # src/meltcore/kernels/expert_launches.py, beside the others
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

from meltcore.kernels import expert_launches
from meltcore.kernels.capability import shared_bytes
from meltcore.kernels.expert_product import ExpertsLaunch, Form, Pairs, expert_product, form_of
from meltcore.kernels.expert_tiles import suits_tiles
from meltcore.kernels.experts import _experts_add_triton
from meltcore.kernels.routing import Routing

HIDDEN, CHOICES = 2048, 8
TYPE = torch.bfloat16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
# Tokens, how pairs are found (None: as in the engine), and the peer: what it is called and how it finds them.
FORMS: tuple[tuple[int, Form | None, str, Form], ...] = (
    (1, None, "the general products", "alone"),
    *((tokens, "found", "pairs placed first", "placed") for tokens in (3, 8, 16, 24, 32, 48, 64)),
    *((tokens, None, "pairs looked up by the products", "placed") for tokens in (2048, 4096, 8064)),
)
WIDTHS = (768, 512, 256, 128, 64)
CLOSE = 1.02  # a launch is kept for more tokens while it is at most this much slower than the best
COMPILERS = 15
ROUGH_REPLAYS, CONTENDERS = 3, 4  # of all that are tried; then the fastest of each size of tiles, with all replays
TILES = (16, 32, 64, 128)  # pairs of one
TABLE = Path(expert_launches.__file__)


class Experts(NamedTuple):
    """How many a token chooses from, and whether it has one more, last of all, whatever it chooses."""

    chosen_from: int
    shared: bool

    @property
    def count(self) -> int:
        return self.chosen_from + self.shared

    @property
    def pairs(self) -> int:
        return CHOICES + self.shared

    def drawn(self, tokens: int) -> torch.Tensor:
        chosen = torch.rand(tokens, self.chosen_from, device="cuda").topk(CHOICES).indices
        everybody = torch.full_like(chosen[:, :1], self.chosen_from)
        return (torch.cat([chosen, everybody], 1) if self.shared else chosen).int()


def experts_of(width: int) -> Experts:
    return Experts(128, shared=False) if width == 768 else Experts(256, shared=True)


class Product(NamedTuple):
    """The way up, with its gate, or the way down, of experts of one width."""

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


def products(widths: tuple[int, ...]) -> list[Product]:
    return [Product(width, gated) for width in widths for gated in (True, False)]


class Case:
    """A product with its data."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.weight = torch.randn(product.shape, device="cuda", dtype=TYPE) / product.shape[2] ** 0.5

    @property
    def down(self) -> torch.Tensor:
        """The shape of the way down: by it the pairs are found."""
        return torch.empty(self.product.experts.count, HIDDEN, self.product.width, dtype=TYPE, device="meta")

    def drawn(self, tokens: int) -> list[torch.Tensor]:
        """As many routings as read more than the L2 cache holds."""
        return [self.product.experts.drawn(tokens) for _ in range(16 if tokens <= 4 else 4)]

    def measure_us(
        self,
        launch: ExpertsLaunch,
        drawn: list[torch.Tensor],
        *,
        form: Form | None = None,
        replays: int = REPLAYS,
    ) -> float:
        """One product, its pairs in their places where they have some."""
        (pairs, choices), (_, rows, columns) = (drawn[0].numel(), drawn[0].shape[1]), self.product.shape
        gated = self.product.gated
        inputs = torch.randn(pairs // choices if gated else pairs, columns, device="cuda", dtype=TYPE)
        output = torch.empty(pairs, rows // (2 if gated else 1), device="cuda", dtype=TYPE)
        call = partial(expert_product, inputs, self.weight, output, launch=launch, gated=gated)
        return median_us([partial(call, Pairs.of(each, self.down, launch.pairs, form)) for each in drawn], replays)

    def floor_us(self, tokens: int, drawn: list[torch.Tensor], bandwidth: float, rate: float) -> float:
        distinct = sum(len(experts.unique()) for experts in drawn) / len(drawn)
        (_, rows, columns), pairs = self.product.shape, tokens * self.product.experts.pairs
        moved = (distinct * rows * columns + tokens * columns + pairs * rows) * TYPE.itemsize
        return max(moved / bandwidth, 2 * pairs * rows * columns / rate)


def candidates() -> Iterator[ExpertsLaunch]:
    """What might suit some number of tokens. Wider steps, tiles of fewer rows and other counts of warps were tried for
    widths of 512 and 64, and were the fastest for none. One stage: the whole of a narrow weight at once.
    """
    for pairs, rows, columns, stages in itertools.product((16, 32), (64, 128, 256), (64, 128), (1, 3, 4, 6)):
        yield ExpertsLaunch(pairs, rows, columns, stages, 4)
    for rows, stages in itertools.product((128, 256), (1, 3, 4)):
        for columns in (64, 128) if stages == 1 else (64,):
            yield ExpertsLaunch(64, rows, columns, stages, 4)
            yield ExpertsLaunch(128, rows, columns, stages, 8)


def suits(launch: ExpertsLaunch, product: Product) -> bool:
    """Fits into shared memory, and has work for every column of a step."""
    steps = product.shape[2] / launch.columns
    if launch.stages == 1:
        return steps == 1
    step = (launch.pairs + launch.rows) * launch.columns * TYPE.itemsize
    enough = launch.stages * step + 1024 <= shared_bytes(torch.device("cuda", 0))
    return enough and steps >= 1 and (launch.stages == 3 or launch.stages <= steps)


def launches_of(product: Product) -> list[ExpertsLaunch]:
    return [launch for launch in candidates() if suits(launch, product)]


def likely(launch: ExpertsLaunch, tokens: int, product: Product) -> bool:
    """Tiles from what experts get on average to several times that."""
    even = tokens * CHOICES / product.experts.chosen_from
    return {16: even <= 16, 32: 2 <= even <= 64, 64: even >= 8, 128: even >= 16}[launch.pairs]


def _compile(product: Product, launch: ExpertsLaunch) -> None:
    case = Case(product)
    for form in {form_of(tokens, case.down) for tokens in TOKENS if likely(launch, tokens, product)}:
        case.measure_us(launch, [product.experts.drawn(1)], form=form, replays=1)


def contenders(case: Case, tokens: int, kept: ExpertsLaunch | None) -> dict[ExpertsLaunch, float]:
    """Microseconds of the launches worth measuring well: of each size of tiles the fastest, and the one `kept`."""
    drawn = case.drawn(tokens)
    tried = [launch for launch in launches_of(case.product) if likely(launch, tokens, case.product)]
    rough = {launch: case.measure_us(launch, drawn, replays=ROUGH_REPLAYS) for launch in tried}
    by_tile = groupby(sorted(tried, key=lambda launch: (launch.pairs, rough[launch])), lambda launch: launch.pairs)
    chosen = {launch for _, alike in by_tile for launch in list(alike)[:CONTENDERS]}
    if kept in tried:
        chosen.add(kept)
    return {launch: case.measure_us(launch, drawn) for launch in chosen}


class Chosen:
    """The launches of one product for more and more tokens."""

    def __init__(self, product: Product) -> None:
        self.case, self.entries = Case(product), []

    @property
    def last(self) -> ExpertsLaunch | None:
        return self.entries[-1][1] if self.entries else None

    def measure(self, tokens: int) -> None:
        self.times = contenders(self.case, tokens, self.last)

    def best(self, tile: int) -> float:
        """Microseconds; endless where no launch has such tiles."""
        return min((time for launch, time in self.times.items() if launch.pairs == tile), default=math.inf)

    def choose(self, tokens: int, tile: int) -> None:
        alike = {launch: time for launch, time in self.times.items() if launch.pairs == tile}
        best, most = min(alike, key=lambda launch: alike[launch]), tokens * self.case.product.experts.pairs
        if self.last in alike and alike[self.last] <= CLOSE * alike[best]:
            self.entries[-1] = (most, self.last)
        else:
            self.entries.append((most, best))
        print(f"{self.case.product.name}, {tokens} tokens: {alike[self.last]:.1f} us {tuple(self.last)}", flush=True)


def tune(widths: tuple[int, ...]) -> None:
    """Both products have tiles of as many pairs, since pairs are placed once. Up to where other kernels take over."""
    jobs = [(product, launch) for product in products(widths) for launch in launches_of(product)]
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        pool.starmap(_compile, jobs, chunksize=1)
    table = dict(expert_launches.TABLE)
    for width in widths:
        both, tile = [Chosen(product) for product in products((width,))], 0
        for tokens in TOKENS:
            gate_up, down = (one.case.weight for one in both)
            if suits_tiles(gate_up[0], both[0].case.drawn(tokens)[0], gate_up, down):
                break
            for one in both:
                one.measure(tokens)
            times = {size: sum(one.best(size) for one in both) for size in TILES}
            if times.get(tile, math.inf) > CLOSE * min(times.values()):
                tile = min(times, key=lambda size: times[size])
            for one in both:
                one.choose(tokens, tile)
        for one in both:
            table[one.case.product.shape] = tuple((most, tuple(launch)) for most, launch in one.entries)
    write_table(table)


def write_table(table: dict) -> None:
    """In the order of widths, the widest first."""
    lines = []
    for shape in sorted(table, key=lambda shape: (-min(shape[1] // 2, shape[2]), -shape[2])):
        lines.append(f"    {shape}: (")
        lines += [f"        ({most}, {launch})," for most, launch in table[shape]]
        lines.append("    ),")
    head, _, _ = TABLE.read_text().partition(" = {")
    TABLE.write_text("\n".join([f"{head} = {{", *lines, "}\n"]))


def measure(widths: tuple[int, ...]) -> list[Row]:
    bandwidth, rate = read_bytes_per_us(), matmul_flops_per_us()
    rows = []
    for product in products(widths):
        case = Case(product)
        for tokens in TOKENS:
            drawn = case.drawn(tokens)
            time_us = case.measure_us(ExpertsLaunch.of(drawn[0].numel(), case.weight), drawn)
            floor_us = case.floor_us(tokens, drawn, bandwidth, rate)
            rows.append(
                Row(
                    work=f"{product.name}, {tokens:,} tokens",
                    unit="us",
                    value=time_us,
                    peer="floor: weights of the experts met, or products",
                    peer_value=floor_us,
                    ratio=floor_us / time_us,
                    limit_share=floor_us / time_us,
                )
            )
    return rows


def measure_forms(widths: tuple[int, ...]) -> list[Row]:
    """The whole feed-forward, by one way of finding pairs against another."""
    rows = []
    for width in widths:
        gate_up, down = (Case(product).weight for product in products((width,)))
        experts = experts_of(width)
        for tokens, form, peer, peer_form in FORMS:
            hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=TYPE)
            weights = torch.rand(tokens, experts.pairs, device="cuda") / experts.pairs
            routings = [Routing(experts.drawn(tokens), weights) for _ in range(4)]
            call = partial(_experts_add_triton, None, hidden, gate_up=gate_up, down=down)
            time_us, peer_us = (
                median_us([partial(call, routing=routing, form=each) for routing in routings])
                for each in (form, peer_form)
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
    parser.add_argument("--tune", type=_widths, help="widths, with commas, to try other launches for; writes the table")
    parser.add_argument("--widths", type=_widths, default=WIDTHS, help="to measure, with commas")
    parser.add_argument("--forms", action="store_true", help="only the ways of finding pairs: experts_forms.json")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    if arguments.tune:
        tune(arguments.tune)
        return
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    if arguments.forms:
        write_result("experts_forms", measure_forms(arguments.widths), versions)
        return
    write_result("experts", measure(arguments.widths) + measure_forms(arguments.widths), versions)


if __name__ == "__main__":
    main()
