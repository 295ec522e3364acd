"""Launch parameters of the few-token and tiled products, tried in place: a chain of 28 layers without attention.

One product's launch varies while the other three stay as they are by default. Printed only: what is best goes into
FewTokensLaunch.of and TiledLaunch.of. Launch parameters that do not compile or do not fit are skipped.

    python benchmarks/product_sweep.py --tokens 1,10,64
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from attention import median_us
from linear import LAYERS, Batch, Weights
from triton.runtime.errors import OutOfResources

from meltcore.kernels.few_tokens import MAX_TOKENS, FewTokensLaunch, few_tokens
from meltcore.kernels.norm import rms_norm
from meltcore.kernels.tiled_product import TiledLaunch, tiled_product

Launch = FewTokensLaunch | TiledLaunch
PRODUCTS = ("qkv", "output", "gate_up", "down")
SHOWN = 6


def launches(tokens: int, rows: int, input_size: int) -> Iterator[Launch]:
    if tokens <= MAX_TOKENS:
        sizes = ((2, 4, 8, 16), (2, 4, 8)) if tokens == 1 else ((8, 16, 32), (4, 8))
        for held, warps, columns in itertools.product(*sizes, (512, 1024)):
            yield FewTokensLaunch(held, columns, warps)
    for tile_rows, columns, shares in itertools.product((32, 64, 128), (64, 128), (1, 2, 3, 4, 6, 8)):
        programs = rows // tile_rows * shares
        if tokens > 1 and input_size % (shares * columns) == 0 and 64 <= programs <= 400:
            tile = max(16, 1 << (tokens - 1).bit_length())
            for stages in (3, 4, 5):
                yield TiledLaunch(min(tile, 128), tile_rows, columns, shares, stages)


def layer(of: Weights, index: int, batch: Batch, chosen: dict[str, Launch | None]) -> None:
    def product(name: str, hidden: torch.Tensor, *, normed: bool = False, gated: bool = False) -> torch.Tensor:
        weight, launch = getattr(of, name)[index], chosen[name]
        residual = None if normed else batch.residual
        if isinstance(launch, TiledLaunch):
            hidden = rms_norm(hidden, *of.norm) if normed else hidden
            return tiled_product(hidden, weight, gated=gated, residual=residual, launch=launch)
        return few_tokens(hidden, weight, of.norm if normed else None, gated=gated, residual=residual, launch=launch)

    product("qkv", batch.residual, normed=True)
    product("output", batch.mixed)
    product("down", product("gate_up", batch.residual, normed=True, gated=True))


def layer_us(of: Weights, batch: Batch, chosen: dict[str, Launch | None]) -> float:
    return median_us([partial(layer, of, index, batch, chosen) for index in range(LAYERS)])


def sweep(of: Weights, tokens: int, report: Callable[[str], None]) -> None:
    batch = Batch.draw(tokens)
    default: Launch | None = None
    if tokens > MAX_TOKENS:
        default = TiledLaunch(min(128, 1 << (tokens - 1).bit_length()), 64, 128, 1, 4)
    chosen = dict.fromkeys(PRODUCTS, default)
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
    if not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU")
    torch.manual_seed(0)
    of = Weights.draw()
    for tokens in map(int, arguments.tokens.split(",")):
        sweep(of, tokens, print)


if __name__ == "__main__":
    main()
