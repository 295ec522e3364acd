"""Matmuls with Qwen3-0.6B's weights, bf16, against cuBLAS and cublasLt and against reading the weights once.

Every number is the median of replays of one CUDA graph that holds 28 launches (or layers), each with weights of its
own: together they miss the L2 cache, and kernels follow each other as in a decode step. Results are compared with the
torch references first. "layer" is the four matmuls of a block with their norms, activation and additions, without the
attention between them; its peer does the same with the library's GEMMs and our kernels around them.

    python benchmarks/linear.py          # the table and benchmarks/results/linear/h200.json
    python benchmarks/linear.py --fp8    # the layer with FP8 weights against the one in bf16, merged into that file
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from attention import CACHE_BYTES, check, median_us
from bench_output import Row, need_gpu, write_result

from meltcore.kernels.activation import swiglu
from meltcore.kernels.fp8.fp8 import Fp8Tensor, quantize
from meltcore.kernels.fp8.fp8_linear import fp8_linear
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.norm import Norm, rms_norm

TOKENS = (1, 2, 4, 8, 10, 16, 32, 64, 100, 128, 256, 400, 512, 1000)
MANY_TOKENS = (2048, 4096, 8192, 16384)
HIDDEN, MIXED, GATED = 1024, 2048, 3072
SHAPES = {
    "qkv": (4096, HIDDEN),
    "attention output": (HIDDEN, MIXED),
    "gate and up": (2 * GATED, HIDDEN),
    "down": (HIDDEN, GATED),
    "head": (151936, HIDDEN),
}
LAYERS = 28
READ_BYTES_PER_US = 4.3e6  # what an H200 reaches
TYPE = torch.bfloat16
LIBRARIES = {"cuBLAS": "cublas", "cublasLt": "cublaslt"}

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Linear = Callable[..., torch.Tensor]  # with the options of `linear`
plain_matmul: Matmul = torch.nn.functional.linear


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=TYPE, device="cuda")


def weights(output_size: int, input_size: int, copies: int = LAYERS) -> list[torch.Tensor]:
    return [random(output_size, input_size) * input_size**-0.5 for _ in range(copies)]


class Weights(NamedTuple):
    """Of every layer, bf16 or FP8."""

    qkv: list[Any]
    output: list[Any]
    gate_up: list[Any]
    down: list[Any]
    norm: Norm

    @classmethod
    def draw(cls) -> Weights:
        names = ("qkv", "attention output", "gate and up", "down")
        return cls(*(weights(*SHAPES[name]) for name in names), norm=Norm(random(HIDDEN).abs() + 0.5, 1e-6))

    def in_fp8(self) -> Weights:
        return Weights(*([quantize(matrix) for matrix in matrices] for matrices in self[:4]), norm=self.norm)

    def bytes_a_layer(self) -> int:
        first = [matrices[0] for matrices in self[:4]]
        return sum(each.values.nbytes if isinstance(each, Fp8Tensor) else each.nbytes for each in first)


class Batch(NamedTuple):
    """What a layer reads. mixed stands for what attention would give."""

    residual: torch.Tensor
    mixed: torch.Tensor

    @classmethod
    def draw(cls, tokens: int) -> Batch:
        return cls(random(tokens, HIDDEN), random(tokens, MIXED))


def layer(of: Weights, index: int, batch: Batch, multiply: Linear = linear) -> None:
    multiply(batch.residual, of.qkv[index], of.norm)
    multiply(batch.mixed, of.output[index], residual=batch.residual)
    gated = multiply(batch.residual, of.gate_up[index], of.norm, gated=True)
    multiply(gated, of.down[index], residual=batch.residual)


def library_layer(of: Weights, index: int, batch: Batch) -> None:
    plain_matmul(rms_norm(batch.residual, *of.norm), of.qkv[index])
    batch.residual.addmm_(batch.mixed, of.output[index].t())
    gated = swiglu(plain_matmul(rms_norm(batch.residual, *of.norm), of.gate_up[index]))
    batch.residual.addmm_(gated, of.down[index].t())


def fastest_library_us(launches: list[Callable[[], object]]) -> tuple[str, float]:
    times_us = {}
    for name, setting in LIBRARIES.items():
        torch.backends.cuda.preferred_blas_library(setting)
        times_us[name] = median_us(launches)
    torch.backends.cuda.preferred_blas_library("default")
    return min(times_us.items(), key=lambda item: item[1])


def row(work: str, tokens: int, nbytes: int, ours_us: float, library: tuple[str, float]) -> Row:
    share = nbytes / READ_BYTES_PER_US / ours_us
    return Row(
        work=f"{work}, tokens: {tokens}; {share:.0%} of 4.3 TB/s",
        unit="us",
        value=ours_us,
        peer=library[0],
        peer_value=library[1],
        ratio=library[1] / ours_us,
        limit_share=share,
    )


def measure_layer() -> list[Row]:
    of = Weights.draw()
    rows = []
    for tokens in TOKENS:
        batch = Batch.draw(tokens)
        check(f"norm and matmul, {tokens}", partial(linear, batch.residual, of.qkv[0], of.norm))
        check(
            f"norm, matmul and activation, {tokens}",
            partial(linear, batch.residual, of.gate_up[0], of.norm, gated=True),
        )
        check(
            f"matmul and addition, {tokens}",
            lambda batch=batch: linear(batch.mixed, of.output[0], residual=batch.residual.clone()),
        )
        ours_us = median_us([partial(layer, of, index, batch) for index in range(LAYERS)])
        library = fastest_library_us([partial(library_layer, of, index, batch) for index in range(LAYERS)])
        rows.append(row("layer", tokens, of.bytes_a_layer(), ours_us, library))
    return rows


def measure_fp8_layer() -> list[Row]:
    """A layer with FP8 weights and quantized tokens; its peer is the layer in bf16."""
    wide = Weights.draw()
    of = wide.in_fp8()
    rows = []
    for tokens in TOKENS + MANY_TOKENS:
        batch = Batch.draw(tokens)
        check(f"FP8 norm and matmul, {tokens}", partial(fp8_linear, batch.residual, of.qkv[0], of.norm))
        check(
            f"FP8 norm, matmul and activation, {tokens}",
            partial(fp8_linear, batch.residual, of.gate_up[0], of.norm, gated=True),
        )
        times_us = []
        for weights_of_type, multiply in ((of, fp8_linear), (wide, linear)):
            batch.residual.normal_()  # each layer adds to it
            times_us.append(
                median_us([partial(layer, weights_of_type, index, batch, multiply) for index in range(LAYERS)])
            )
        rows.append(row("FP8 layer", tokens, of.bytes_a_layer(), times_us[0], ("bf16", times_us[1])))
    return rows


def measure_matmul(work: str, output_size: int, input_size: int) -> list[Row]:
    nbytes = output_size * input_size * TYPE.itemsize
    matrices = weights(output_size, input_size, LAYERS if nbytes < CACHE_BYTES else 2)
    rows = []
    for tokens in TOKENS:
        hidden = random(tokens, input_size)
        ours_us = median_us([partial(linear, hidden, matrix) for matrix in matrices])
        library = fastest_library_us([partial(plain_matmul, hidden, matrix) for matrix in matrices])
        rows.append(row(f"{work} {output_size:,} x {input_size:,}", tokens, nbytes, ours_us, library))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fp8", action="store_true", help="Measure the layer with FP8 weights against bf16 alone.")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    if arguments.fp8:
        rows = measure_fp8_layer()
    else:
        rows = measure_layer()
        rows += [row for work, shape in SHAPES.items() for row in measure_matmul(work, *shape)]
    versions = {"torch": str(torch.__version__), "triton": str(triton.__version__), "cuda": str(torch.version.cuda)}
    write_result(rows, versions)


if __name__ == "__main__":
    main()
