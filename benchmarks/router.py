"""Norm, router and choice of experts as the engine launches them, against the three as kernels of their own.

Qwen3.5-35B-A3B's sizes. bf16, random data; launches take turns over routers enough to miss the L2 cache. Every number
is the median of CUDA graph replays, in which kernels start early as they do in a step.

    python benchmarks/router.py    # the table and benchmarks/results/router.json
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import triton
from attention import median_us, read_bytes_per_us
from bench_output import Row, need_gpu, write_result

from meltcore.kernels.norm import Norm, rms_norm
from meltcore.kernels.router import router_logits, to_experts
from meltcore.kernels.routing import Routing, route

HIDDEN, EXPERTS, CHOICES = 2048, 256, 8
TYPE = torch.bfloat16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
COPIES = 100  # of the router, a megabyte each


def ours(residual: torch.Tensor, norm: Norm, router: torch.Tensor) -> tuple[torch.Tensor, Routing]:
    return to_experts(residual, norm, router, CHOICES, renormalised=True, shared=True)


def three_launches(residual: torch.Tensor, norm: Norm, router: torch.Tensor) -> tuple[torch.Tensor, Routing]:
    hidden = rms_norm(residual, *norm)
    return hidden, route(router_logits(hidden, router), CHOICES, renormalised=True, shared=True)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    need_gpu()
    torch.manual_seed(0)
    routers = torch.randn(COPIES, EXPERTS + 1, HIDDEN, device="cuda", dtype=TYPE) / HIDDEN**0.5
    norm = Norm(torch.ones(HIDDEN, device="cuda"), 1e-6)
    bandwidth, rows = read_bytes_per_us(), []
    for tokens in TOKENS:
        residual = torch.randn(tokens, HIDDEN, device="cuda", dtype=TYPE)
        ours_us, theirs_us = (
            median_us([partial(form, residual, norm, router) for router in routers]) for form in (ours, three_launches)
        )
        floor_us = (routers[0].nbytes + 2 * residual.nbytes) / bandwidth
        rows.append(
            Row(
                work=f"{tokens:,} tokens",
                unit="us",
                value=ours_us,
                peer="three launches",
                peer_value=theirs_us,
                ratio=theirs_us / ours_us,
                limit_share=floor_us / ours_us,
            )
        )
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    write_result("router", rows, versions)


if __name__ == "__main__":
    main()
