"""Norm, router GEMM and expert selection as the engine launches them, against three separate kernels.

Qwen3.5-35B-A3B's sizes. bf16, random data; launches take turns over enough routers to miss the L2 cache. Every number
is the median of CUDA graph replays with programmatic dependent launch, as in a decode step.

    python benchmarks/router.py    # the table and benchmarks/results/router/h200.json
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import triton
from attention import median_us, read_bytes_per_us
from bench_output import Row, need_gpu, write_result

from meltcore.kernels.moe.router import route_tokens, router_logits
from meltcore.kernels.moe.routing import Routing, select_experts
from meltcore.kernels.norm import Norm, rms_norm

HIDDEN, EXPERTS, TOP_K = 2048, 256, 8
TYPE = torch.bfloat16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
COPIES = 100  # of the router, a megabyte each


def ours(residual: torch.Tensor, norm: Norm, router: torch.Tensor) -> tuple[torch.Tensor, Routing]:
    return route_tokens(residual, norm, router, TOP_K, norm_topk_prob=True, shared_expert=True)


def three_launches(residual: torch.Tensor, norm: Norm, router: torch.Tensor) -> tuple[torch.Tensor, Routing]:
    hidden = rms_norm(residual, *norm)
    return hidden, select_experts(router_logits(hidden, router), TOP_K, norm_topk_prob=True, shared_expert=True)


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
    write_result(rows, versions)


if __name__ == "__main__":
    main()
