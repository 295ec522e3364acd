"""FP8 weights with a scale per 128 x 128 block: linear layers and routed experts, for few tokens and for many.

A number is microseconds per layer, in one CUDA graph over 8 layers with weights of their own, which together miss the
L2 cache, quantization of the tokens included. Few tokens are compared with reading the layer's bytes once at 4.3 TB/s,
of experts those that the tokens chose; many with torch's FP8 matmul with one scale for all, of the same operations, in
the same run. Results are checked against the torch reference first.

    python benchmarks/block_fp8.py     # the table and benchmarks/results/block_fp8/h200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from attention import check, median_us
from bench_output import Row, Target, need_gpu, write_result
from linear import READ_BYTES_PER_US

from meltcore.kernels.fp8.block_fp8 import BLOCK, BlockFp8Tensor, num_blocks
from meltcore.kernels.fp8.block_fp8_experts import block_fp8_expert_outputs
from meltcore.kernels.fp8.block_fp8_linear import block_fp8_linear
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.moe.routing import Routing

LAYERS = 8
TYPE = torch.bfloat16
FEW, MANY = (1, 4, 16, 32, 64, 128), (512, 1024, 2048, 8192)
FEW_TARGETS, MANY_TARGET = {1: 0.8, 4: 0.8, 16: 0.75}, 0.6
FEW_EXPERT_TOKENS, MANY_EXPERT_TOKENS = (1, 4, 16, 64, 256), (2048, 8192)


class Experts(NamedTuple):
    """Number of experts, those of a token, hidden size and width."""

    count: int
    top_k: int
    size: int
    width: int


# Rows and columns of a layer's matrices. The shared expert of Qwen3.5 is one more, which every token has.
SHAPES = {
    "Qwen3-30B-A3B": ((5120, 2048), (2048, 4096)),
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
}
EXPERTS = {"Qwen3-30B-A3B": Experts(128, 8, 2048, 768), "Qwen3.5-35B-A3B": Experts(257, 9, 2048, 512)}


def random_weight(*shape: int) -> BlockFp8Tensor:
    """Random values with scales that keep outputs near unit variance."""
    *leading, rows, columns = shape
    values = torch.empty(shape, dtype=FP8, device="cuda")
    for part in values.view(-1, rows, columns):  # bounds what random numbers in 16 bits take
        part.copy_(torch.randn(rows, columns, dtype=TYPE, device="cuda"))
    scales = torch.rand(*leading, num_blocks(rows), num_blocks(columns), device="cuda") + 0.5
    return BlockFp8Tensor(values, scales * columns**-0.5)


def num_bytes(weight: BlockFp8Tensor) -> int:
    return weight.values.nbytes + weight.scales.nbytes


def library_us(sizes: list[tuple[int, int, int]]) -> float:
    """Microseconds of torch's FP8 matmuls of [tokens, rows, columns] with one scale for all numbers."""
    one = torch.ones((), device="cuda")
    launches: list[Callable[[], object]] = []
    for tokens, rows, columns in sizes:
        hidden, weight = (torch.randn(count, columns, device="cuda").to(FP8) for count in (tokens, rows))
        launches.append(
            partial(torch._scaled_mm, hidden, weight.t(), scale_a=one, scale_b=one, out_dtype=TYPE, use_fast_accum=True)
        )
    return median_us(launches) * len(launches)


def rows_of(work: str, tokens: int, ours_us: float, bytes_read: int, peer_us: float | None) -> list[Row]:
    """The measured row, and one with the share to reach if there is one."""
    read_share = bytes_read / READ_BYTES_PER_US / ours_us
    named = f"{work}, tokens: {tokens}"
    if peer_us is None:
        target = FEW_TARGETS.get(tokens)
        row = Row(work=f"{named}; {read_share:.0%} of 4.3 TB/s", unit="us", value=ours_us, limit_share=read_share)
        share = Row(work=f"{work}, share, tokens: {tokens}", unit="of 4.3 TB/s", value=read_share)
    else:
        target, ratio = MANY_TARGET, peer_us / ours_us
        peer = "torch._scaled_mm, one scale"
        row = Row(work=named, unit="us", value=ours_us, peer=peer, peer_value=peer_us, ratio=ratio)
        share = Row(work=f"{work}, share, tokens: {tokens}", unit="of the FP8 matmul rate", value=ratio)
    if target is None:
        return [row]
    share.target = Target(target)
    return [row, share]


def measure_linear(model: str) -> list[Row]:
    shapes = SHAPES[model]
    layers = [[random_weight(*shape) for shape in shapes] for _ in range(LAYERS)]
    rows = []
    for tokens in FEW + MANY:
        inputs = {columns: torch.randn(tokens, columns, dtype=TYPE, device="cuda") for _, columns in shapes}

        def run_layer(layer: list[BlockFp8Tensor], inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in layer:
                block_fp8_linear(inputs[weight.values.shape[1]], weight)

        if tokens in (1, 16, 64, 512):
            for weight in layers[0]:
                check(f"{model}, tokens: {tokens}", partial(block_fp8_linear, inputs[weight.values.shape[1]], weight))
        peer_us = library_us([(tokens, *shape) for shape in shapes]) if tokens in MANY else None
        ours_us = median_us([partial(run_layer, layer) for layer in layers])
        rows += rows_of(f"{model}, linear layers", tokens, ours_us, sum(map(num_bytes, layers[0])), peer_us)
    return rows


def measure_experts(model: str) -> list[Row]:
    experts = EXPERTS[model]
    shapes = ((experts.count, 2 * experts.width, experts.size), (experts.count, experts.size, experts.width))
    layers = [[random_weight(*shape) for shape in shapes] for _ in range(LAYERS)]
    expert_bytes = sum(map(num_bytes, layers[0])) // experts.count
    rows = []
    for tokens in FEW_EXPERT_TOKENS + MANY_EXPERT_TOKENS:
        hidden = torch.randn(tokens, experts.size, dtype=TYPE, device="cuda")
        ids = torch.stack([torch.randperm(experts.count, device="cuda")[: experts.top_k] for _ in range(tokens)]).int()
        routing = Routing(ids, torch.rand(tokens, experts.top_k, device="cuda"))
        launches = [partial(block_fp8_expert_outputs, hidden, routing, *layer) for layer in layers]
        if tokens in (1, 16, 256):
            check(f"{model}, experts, tokens: {tokens}", launches[0])
        pairs = tokens * experts.top_k
        sizes = [(pairs, 2 * experts.width, experts.size), (pairs, experts.size, experts.width)]
        peer_us = library_us(sizes) if tokens in MANY_EXPERT_TOKENS else None
        bytes_read = len(ids.unique()) * expert_bytes
        rows += rows_of(f"{model}, experts", tokens, median_us([*launches]), bytes_read, peer_us)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES), help="Models whose linear layers are measured.")
    parser.add_argument("--experts", default=",".join(EXPERTS), help="Models whose experts are measured.")
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    rows = []
    for model in filter(None, args.models.split(",")):
        rows += measure_linear(model)
        torch.cuda.empty_cache()
    for model in filter(None, args.experts.split(",")):
        rows += measure_experts(model)
        torch.cuda.empty_cache()
    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__), "cuda": str(torch.version.cuda)}
    write_result(rows, versions, [f"A block has {BLOCK} x {BLOCK} numbers. Experts are drawn uniformly."])


if __name__ == "__main__":
    main()
