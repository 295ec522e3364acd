"""Configurations of GEMV and split-K GEMM, tried in place: a chain of 28 layers without attention.

One matmul's configuration varies while the other three keep their default. Printed only: the best goes into
GemvConfig.select and select_config of kernels/gemm/split_k.py. Configurations that do not compile or fit are skipped.

    python benchmarks/gemm_sweep.py --tokens 1,10,64
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

from meltcore.kernels.capability import shared_memory_bytes, sm_count
from meltcore.kernels.gemm.gemv import GemvConfig, gemv
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.gemm.split_k import GemmConfig, split_k_gemm
from meltcore.kernels.norm import rms_norm

Config = GemvConfig | GemmConfig
MATMULS = ("qkv", "output", "gate_up", "down")
ADDS = ("output", "down")
SHOWN = 6


def configs(tokens: int, rows: int, k: int) -> Iterator[Config]:
    """Configurations for a weight of this shape whose programs all run concurrently, one to three per SM."""
    device = torch.device("cuda")
    if tokens == 1:
        yield from itertools.starmap(GemvConfig, itertools.product((2, 4, 8, 16), (512, 1024), (2, 4, 8)))
        return
    tiles = {min(most, max(16, 1 << (tokens - 1).bit_length())) for most in (64, 128)}
    cuts = itertools.product(sorted(tiles), (32, 64, 128), (64, 128), (1, 2, 3, 4, 6, 8, 12))
    for block_m, block_n, block_k, split_k in cuts:
        programs = -(-rows // block_n) * -(-tokens // block_m) * split_k
        resident = -(-programs // sm_count(device))
        if k % (split_k * block_k) or programs < 60 or resident > 3:
            continue
        least = shared_memory_bytes(device) // (resident + 1) // (2 * (block_m + block_n) * block_k) + 1
        for stages in {least, least + 1} - {0, 1}:
            yield GemmConfig(block_m, block_n, block_k, stages, split_k=split_k)


def layer(of: Weights, index: int, batch: Batch, chosen: dict[str, Config | None]) -> None:
    """A layer as the engine computes it, with the chosen configurations."""

    def matmul(name: str, hidden: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        weight, config = getattr(of, name)[index], chosen[name]
        norm, residual = (None, batch.residual) if name in ADDS else (of.norm, None)
        if config is None:
            return linear(hidden, weight, norm, gated=gated, residual=residual)
        if isinstance(config, GemmConfig):
            hidden = rms_norm(hidden, *norm) if norm else hidden
            return split_k_gemm(hidden, weight, gated=gated, residual=residual, config=config)
        return gemv(hidden, weight, norm, gated=gated, residual=residual, config=config)

    matmul("qkv", batch.residual)
    matmul("output", batch.mixed)
    matmul("down", matmul("gate_up", batch.residual, gated=True))


def layer_us(of: Weights, batch: Batch, chosen: dict[str, Config | None]) -> float:
    return median_us([partial(layer, of, index, batch, chosen) for index in range(LAYERS)])


def sweep(of: Weights, tokens: int, report: Callable[[str], None]) -> None:
    batch = Batch.draw(tokens)
    chosen: dict[str, Config | None] = dict.fromkeys(MATMULS)
    report(f"{tokens} tokens: {layer_us(of, batch, chosen):.2f} us a layer")
    for name in MATMULS:
        rows, k = getattr(of, name)[0].shape
        times_us: dict[Config, float] = {}
        for config in configs(tokens, rows, k):
            try:
                times_us[config] = layer_us(of, batch, chosen | {name: config})
            except OutOfResources:
                continue
        best = sorted(times_us, key=lambda config: times_us[config])
        chosen[name] = best[0]
        report(f"  {name}: " + "; ".join(f"{times_us[config]:.2f} {config}" for config in best[:SHOWN]))
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
