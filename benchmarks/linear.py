"""Products of few tokens with Qwen3-0.6B's weights, bf16, against torch's and against reading the weights once.

Launches take turns over copies of the weight, enough of them to miss the L2 cache, inside one CUDA graph.

    python benchmarks/linear.py     # the table and benchmarks/results/linear.json
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from attention import CACHE_BYTES, check, median_us
from bench_output import Row, write_result

from meltcore.kernels.linear import linear

TOKENS = (1, 2, 4, 8, 16)
SHAPES = {
    "qkv": (4096, 1024),
    "attention output": (1024, 2048),
    "gate and up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
READ_BYTES_PER_US = 4.3e6  # what an H200 reaches


def measure(work: str, output_size: int, input_size: int) -> list[Row]:
    nbytes = output_size * input_size * torch.bfloat16.itemsize
    copies = max(2, -(-CACHE_BYTES // nbytes))
    weights = [
        torch.randn(output_size, input_size, dtype=torch.bfloat16, device="cuda") * input_size**-0.5
        for _ in range(copies)
    ]
    rows = []
    for tokens in TOKENS:
        hidden = torch.randn(tokens, input_size, dtype=torch.bfloat16, device="cuda")
        check(f"{work}, {tokens} tokens", partial(linear, hidden, weights[0]))
        ours_us = median_us([partial(linear, hidden, weight) for weight in weights])
        torch_us = median_us([partial(torch.nn.functional.linear, hidden, weight) for weight in weights])
        share = nbytes / READ_BYTES_PER_US / ours_us
        rows.append(
            Row(
                work=f"{work} {output_size:,} x {input_size:,}, tokens: {tokens}; {share:.0%} of 4.3 TB/s",
                unit="us",
                value=ours_us,
                peer="torch",
                peer_value=torch_us,
                ratio=torch_us / ours_us,
                limit_share=share,
            )
        )
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU")
    torch.manual_seed(0)
    rows = [row for work, shape in SHAPES.items() for row in measure(work, *shape)]
    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__), "cuda": str(torch.version.cuda)}
    write_result("linear", rows, versions)


if __name__ == "__main__":
    main()
