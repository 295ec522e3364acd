"""The layers of a decode step of Qwen3-0.6B: one launch between two attentions against a chain of kernels.

Random weights, 28 layers with weights and caches of their own, shuffled pages, one CUDA graph. "without attention" is
the same layers with nothing between two launches. Printed only.

    python benchmarks/layer_gemms.py --sequences 5,10,16 --context 700
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from attention import median_us
from bench_output import need_gpu

from meltcore.kernels.attention.decode import decode_attention
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.norm import Norm
from meltcore.kernels.persistent.decode_layers import SIZES, DecodeLayer
from meltcore.kernels.persistent.layer_gemms import LayerGemms
from meltcore.kernels.rotary import rotary_table

LAYERS, PAGE_SIZE, HEAD_DIM, MAX_PAGES = 28, 64, 128, 640
SCALE = HEAD_DIM**-0.5


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale


def draw(pages: int, layers: int = LAYERS) -> list[DecodeLayer]:
    hidden, heads, kv_heads, intermediate = SIZES

    def norm(size: int) -> torch.Tensor:
        return random(size).abs() + 0.5

    return [
        DecodeLayer(
            Norm(norm(hidden), 1e-6),
            random((heads + 2 * kv_heads) * HEAD_DIM, hidden, scale=hidden**-0.5),
            HeadNorms(norm(HEAD_DIM), norm(HEAD_DIM), 1e-6),
            random(hidden, heads * HEAD_DIM, scale=0.02),
            Norm(norm(hidden), 1e-6),
            random(2 * intermediate, hidden, scale=hidden**-0.5),
            random(hidden, intermediate, scale=0.02),
            random(pages, PAGE_SIZE, kv_heads, HEAD_DIM),
            random(pages, PAGE_SIZE, kv_heads, HEAD_DIM),
        )
        for _ in range(layers)
    ]


class Step:
    """One decode step of sequences of one length."""

    def __init__(self, layers: list[DecodeLayer], sequences: int, context: int) -> None:
        self.layers = layers
        used, pages = -(-context // PAGE_SIZE), layers[0].keys.shape[0]
        self.table = torch.zeros(sequences, MAX_PAGES, dtype=torch.int64, device="cuda")
        self.table[:, :used] = torch.randperm(pages, device="cuda")[: sequences * used].view(sequences, used)
        self.rows = torch.arange(sequences, device="cuda")
        self.positions = torch.full((sequences,), context - 1, device="cuda")
        self.rotary = rotary_table(HEAD_DIM, MAX_PAGES * PAGE_SIZE, 1e6, self.table.device)
        self.hidden = random(sequences, SIZES.hidden)
        self.fused = LayerGemms(layers, self.rotary, SCALE)
        self.mixed = random(sequences, SIZES.heads * HEAD_DIM)

    def chain(self, hidden: torch.Tensor, *, attends: bool = True) -> torch.Tensor:
        for layer in self.layers:
            qkv = linear(hidden, layer.qkv, layer.attention_norm)
            params = AttentionParams(layer.head_norms, self.rotary, layer.keys, layer.values, SCALE, None)
            mixed = self.mixed
            if attends:
                mixed = decode_attention(qkv, params, self.positions, self.table, self.rows).flatten(1)
            linear(mixed, layer.output, residual=hidden)
            gated = linear(hidden, layer.gate_up, layer.mlp_norm, gated=True)
            linear(gated, layer.down, residual=hidden)
        return hidden

    def fuse(self, hidden: torch.Tensor, *, attends: bool = True) -> torch.Tensor:
        if attends:
            return self.fused.run(hidden, self.positions, self.table, self.rows)
        for index in range(len(self.layers)):
            self.fused.launch(index, self.mixed, hidden)
        return hidden


def time_us(run: Callable[..., Any], hidden: torch.Tensor, **options: bool) -> float:
    return median_us([lambda: run(hidden, **options)])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", default="5,8,10,12,16")
    parser.add_argument("--context", type=int, default=700)
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    counts = [int(count) for count in args.sequences.split(",")]
    layers = draw(max(counts) * -(-args.context // PAGE_SIZE))
    print("sequences: chain, fused us per step; without attention; us per layer of both; distance; repeats that differ")
    for count in counts:
        step = Step(layers, count, args.context)
        outputs = [step.fuse(step.hidden.clone()) for _ in range(20)]
        apart = distance(outputs[0], step.chain(step.hidden.clone()))
        differ = sum(not torch.equal(output, outputs[0]) for output in outputs)
        times = [time_us(run, step.hidden.clone()) for run in (step.chain, step.fuse)]
        bare = [time_us(run, step.hidden.clone(), attends=False) for run in (step.chain, step.fuse)]
        per_layer = [time / LAYERS for time in (*times, *bare)]
        print(
            f"{count:4}: {times[0]:7.1f} {times[1]:7.1f}; {bare[0]:7.1f} {bare[1]:7.1f}; "
            + " ".join(f"{time:.2f}" for time in per_layer)
            + f"; {apart:.2e}; {differ}",
            flush=True,
        )


if __name__ == "__main__":
    main()
