"""Launch parameters of the one-token and tiled products, tried in place: a chain of 28 layers without attention.

One product's launch varies while the other three stay as they are by default. Printed only: what is best goes into
RowsLaunch.of and TiledLaunch.of. Launch parameters that do not compile or do not fit are skipped.

    python benchmarks/product_sweep.py --tokens 1,10,64
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from attention import median_us
from bench_output import need_gpu
from linear import LAYERS, Batch, Weights
from triton.runtime.errors import OutOfResources

from meltcore.kernels.capability import processors, shared_bytes
from meltcore.kernels.linear import gated_linear, linear, linear_add
from meltcore.kernels.norm import rms_norm
from meltcore.kernels.one_token import RowsLaunch, one_token
from meltcore.kernels.tiled_product import TiledLaunch, tiled_product

Launch = RowsLaunch | TiledLaunch
PRODUCTS = ("qkv", "output", "gate_up", "down")
ADDS = ("output", "down")
SHOWN = 6


def launches(tokens: int, rows: int, input_size: int) -> Iterator[Launch]:
    """What could serve a weight of this shape; rounds of programs that all run at once, one to three a processor."""
    device = torch.device("cuda")
    if tokens == 1:
        yield from itertools.starmap(RowsLaunch, itertools.product((2, 4, 8, 16), (512, 1024), (2, 4, 8)))
        return
    tiles = {min(most, max(16, 1 << (tokens - 1).bit_length())) for most in (64, 128)}
    cuts = itertools.product(sorted(tiles), (32, 64, 128), (64, 128), (1, 2, 3, 4, 6, 8, 12))
    for tile, tile_rows, columns, shares in cuts:
        programs = -(-rows // tile_rows) * -(-tokens // tile) * shares
        resident = -(-programs // processors(device))
        if input_size % (shares * columns) or programs < 60 or resident > 3:
            continue
        least = shared_bytes(device) // (resident + 1) // (2 * (tile + tile_rows) * columns) + 1
        for stages in {least, least + 1} - {0, 1}:
            yield TiledLaunch(tile, tile_rows, columns, shares, stages)


def layer(of: Weights, index: int, batch: Batch, chosen: dict[str, Launch | None]) -> None:
    """As the engine computes it where nothing is chosen."""

    def product(name: str, hidden: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        weight, launch = getattr(of, name)[index], chosen[name]
        norm, residual = (None, batch.residual) if name in ADDS else (of.norm, None)
        if launch is None:
            if residual is not None:
                return linear_add(residual, hidden, weight)
            return gated_linear(hidden, weight, norm) if gated else linear(hidden, weight, norm)
        if isinstance(launch, TiledLaunch):
            hidden = rms_norm(hidden, *norm) if norm else hidden
            return tiled_product(hidden, weight, gated=gated, residual=residual, launch=launch)
        return one_token(hidden, weight, norm, gated=gated, residual=residual, launch=launch)

    product("qkv", batch.residual)
    product("output", batch.mixed)
    product("down", product("gate_up", batch.residual, gated=True))


def layer_us(of: Weights, batch: Batch, chosen: dict[str, Launch | None]) -> float:
    return median_us([partial(layer, of, index, batch, chosen) for index in range(LAYERS)])


def sweep(of: Weights, tokens: int, report: Callable[[str], None]) -> None:
    batch = Batch.draw(tokens)
    chosen: dict[str, Launch | None] = dict.fromkeys(PRODUCTS)
    report(f"{tokens} tokens: {layer_us(of, batch, chosen):.2f} us a layer")
    for name in PRODUCTS:
        rows, input_size = getattr(of, name)[0].shape
        times_us: dict[Launch, float] = {}
        for launch in launches(tokens, rows, input_size):
            try:
                times_us[launch] = layer_us(of, batch, chosen | {name: launch})
            except OutOfResources:
                continue
        best = sorted(times_us, key=lambda launch: times_us[launch])
        chosen[name] = best[0]
        report(f"  {name}: " + "; ".join(f"{times_us[launch]:.2f} {launch}" for launch in best[:SHOWN]))
    report(f"  all four at their best: {layer_us(of, batch, chosen):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="1,10,64")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    of = Weights.draw()
    for tokens in map(int, arguments.tokens.split(",")):
        sweep(of, tokens, print)


if __name__ == "__main__":
    main()
