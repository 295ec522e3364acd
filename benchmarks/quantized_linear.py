"""Linear layers with block-quantized weights against read bandwidth and the bf16 matmul rate.

A number is microseconds per layer: the four GEMMs of a decoder layer, in one CUDA graph over 8 layers with weights of
their own, which together miss the L2 cache. Few tokens are compared with reading the layer's packed bytes once at 4.3
TB/s, many tokens with the same GEMMs by cuBLAS on the dequantized weights in the same run. Results are checked against
the torch reference first.

    python benchmarks/quantized_linear.py     # the table and benchmarks/results/quantized_linear/h200.json
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
import triton
from attention import check, median_us
from bench_output import Row, Target, need_gpu, write_result
from linear import READ_BYTES_PER_US

from meltcore.kernels.quant.ggml import BlockType, GgmlTensor, empty, pack, random_blocks
from meltcore.kernels.quant.ggml_decode import dequantize
from meltcore.kernels.quant.ggml_linear import ggml_linear
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.kernels.quant.int4 import GROUP_SIZES, Int4Type

LAYERS = 8
FEW, MANY = (1, 4, 16, 32), (64, 128, 256, 512, 1024, 2048)
# Shares of read bandwidth and of cuBLAS's rate to reach, by number of tokens.
FEW_TARGETS = {1: 0.8, 4: 0.8, 16: 0.75}
MANY_TARGETS = {64: 1.0, 128: 1.0, 256: 1.0, 512: 1.0, 1024: 0.93, 2048: 0.93}


class Shape(NamedTuple):
    """Output and input size of each matrix of a layer."""

    qkv: tuple[int, int]
    output: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]


SHAPES = {
    "Gemma-3-27B": Shape((8192, 5376), (5376, 4096), (43008, 5376), (5376, 21504)),
    "Qwen3-8B": Shape((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
}


# By the names of the option --types.
TYPES: dict[str, BlockType] = {each.name: each for each in GgmlType}
TYPES |= {f"INT4_G{group_size}": Int4Type(group_size) for group_size in reversed(GROUP_SIZES)}


def random_weight(block_type: BlockType, size: tuple[int, int], generator: torch.Generator) -> GgmlTensor:
    """Random bits with scales that keep outputs near unit variance."""
    if isinstance(block_type, GgmlType):
        return pack(random_blocks(block_type, size, size[1] ** -0.5, generator), block_type)
    weight = empty(block_type, size, generator.device)
    weight.values.random_(generator=generator)
    weight.subscales.zero_()  # zero points of 8
    scales = weight.scales.view(block_type.scale_dtype)
    scales.uniform_(0.5, 1.5, generator=generator).mul_(size[1] ** -0.5 / 4.8)
    return weight


class Layer(NamedTuple):
    """The four weights of a layer."""

    qkv: GgmlTensor
    output: GgmlTensor
    gate_up: GgmlTensor
    down: GgmlTensor

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for weight in self for array in weight.arrays)


def run_layer(layer: Layer, inputs: dict[int, torch.Tensor]) -> None:
    for weight in layer:
        ggml_linear(inputs[weight.columns], weight)


def run_library(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


def measure(model: str, shape: Shape, ggml_type: BlockType) -> list[Row]:
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [Layer(*(random_weight(ggml_type, size, generator) for size in shape)) for _ in range(LAYERS)]
    dense = [
        dequantize(weight, torch.empty(len(weight.values), weight.columns, dtype=torch.bfloat16, device="cuda"))
        for weight in layers[0]
    ]
    rows = []
    for tokens in FEW + MANY:
        inputs = {size: torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda") for _, size in shape}
        if tokens in (1, 16, 64, 512):
            for weight in layers[0]:
                work = f"{model}, {ggml_type.name}, {weight.columns} columns, tokens: {tokens}"
                check(work, partial(ggml_linear, inputs[weight.columns], weight))
        ours_us = median_us([partial(run_layer, layer, inputs) for layer in layers])
        library_us = median_us([partial(run_library, dense, inputs)] * LAYERS)
        read_share = layers[0].nbytes / READ_BYTES_PER_US / ours_us
        few = tokens in FEW
        target = FEW_TARGETS.get(tokens) if few else MANY_TARGETS.get(tokens)
        note = f"; {read_share:.0%} of 4.3 TB/s" if few else ""
        rows.append(
            Row(
                work=f"{model}, {ggml_type.name}, layer, tokens: {tokens}{note}",
                unit="us",
                value=ours_us,
                peer="cuBLAS, bf16",
                peer_value=library_us,
                ratio=library_us / ours_us,
                limit_share=read_share if few else None,
            )
        )
        if target is not None:
            share, unit = (read_share, "of 4.3 TB/s") if few else (library_us / ours_us, "of cuBLAS's bf16 rate")
            work = f"{model}, {ggml_type.name}, share, tokens: {tokens}"
            rows.append(Row(work=work, unit=unit, value=share, target=Target(target)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES), help="Models whose shapes are measured, with commas.")
    parser.add_argument("--types", default=",".join(TYPES), help="Formats, with commas.")
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    rows = []
    for model in args.models.split(","):
        for name in args.types.split(","):
            rows += measure(model, SHAPES[model], TYPES[name])
            torch.cuda.empty_cache()
    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__), "cuda": str(torch.version.cuda)}
    write_result(rows, versions)


if __name__ == "__main__":
    main()
