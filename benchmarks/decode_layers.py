"""The layers of a decode step of Qwen3-0.6B in one launch, as the engine runs it, beside a chain of kernels.

Random weights, 28 layers with weights and caches of their own, shuffled pages, one CUDA graph. Before steps are timed,
their distance from float32 arithmetic must be the chain's, and repeats must have the same bits, with steps of other
sizes between them.

    python benchmarks/decode_layers.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from attention import median_us, read_bytes_per_us
from bench_output import Row, Target, need_gpu, write_result

from meltcore.kernels.attention.decode import decode_attention
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.norm import Norm
from meltcore.kernels.persistent.decode_layers import (
    MAX_TOKENS,
    SIZES,
    DecodeLayer,
    DecodeLayers,
    decode_layers_reference,
    supports,
)
from meltcore.kernels.rotary import rotary_table

LAYERS, PAGE_SIZE, HEAD_DIM, MAX_PAGES = 28, 64, 128, 640
SCALE = HEAD_DIM**-0.5
COUNTS = (1, 2, 3, 5, 8, 10, 12, 16)
CONTEXTS = (128, 700, 2048)
LONG = ((1, 8192), (1, 32768), (4, 8192), (16, 8192), (4, 32768))  # sequences, tokens of each
REPEATS = 1000
FARTHEST = 1.5  # times the chain's distance from float32 arithmetic
TARGET = Target(1.0, of="ratio")


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


def pages_of(context: int) -> int:
    return -(-context // PAGE_SIZE)


class Step:
    """One decode step of sequences of one length. pages: of the caches, all if not given."""

    def __init__(
        self,
        layers: list[DecodeLayer],
        rotary: torch.Tensor,
        sequences: int,
        context: int,
        pages: torch.Tensor | None = None,
    ) -> None:
        self.layers, self.rotary, self.context = layers, rotary, context
        used = pages_of(context)
        pages = torch.randperm(layers[0].keys.shape[0], device="cuda") if pages is None else pages
        self.table = torch.zeros(sequences, MAX_PAGES, dtype=torch.int64, device="cuda")
        self.table[:, :used] = pages[: sequences * used].view(sequences, used)
        self.rows = torch.arange(sequences, device="cuda")
        self.positions = torch.full((sequences,), context - 1, device="cuda")
        self.hidden = random(sequences, SIZES.hidden)

    def one_launch(self, kernel: DecodeLayers) -> torch.Tensor:
        return kernel.run(self.hidden, self.positions, self.table, self.rows)

    def chain(self, hidden: torch.Tensor) -> torch.Tensor:
        """Adds all layers to the residual stream `hidden`, in place."""
        for layer in self.layers:
            qkv = linear(hidden, layer.qkv, layer.attention_norm)
            params = AttentionParams(layer.head_norms, self.rotary, layer.keys, layer.values, SCALE, None)
            mixed = decode_attention(qkv, params, self.positions, self.table, self.rows).flatten(1)
            linear(mixed, layer.output, residual=hidden)
            gated = linear(hidden, layer.gate_up, layer.mlp_norm, gated=True)
            linear(gated, layer.down, residual=hidden)
        return hidden


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def as_float(part: Any) -> Any:
    """A part of a layer in float32."""
    if isinstance(part, torch.Tensor):
        return part.float()
    return type(part)(*map(as_float, part)) if isinstance(part, tuple) else part


def check(kernel: DecodeLayers, step: Step) -> None:
    """Ends the script if the kernel is farther from float32 arithmetic than the chain: outputs, new keys and values."""
    position = step.context - 1
    new = step.table[:, position // PAGE_SIZE], position % PAGE_SIZE

    def caches(layers: Sequence[DecodeLayer]) -> list[torch.Tensor]:
        return [each for layer in layers for each in (layer.keys, layer.values)]

    def stored(layers: Sequence[DecodeLayer]) -> torch.Tensor:
        return torch.stack([each[new] for each in caches(layers)])

    wide = [DecodeLayer(*map(as_float, layer)) for layer in step.layers]
    arguments = step.positions, step.table, step.rows
    expected = decode_layers_reference(wide, step.hidden.float(), step.rotary, SCALE, *arguments)
    distances = []
    for form in (lambda: step.one_launch(kernel), lambda: step.chain(step.hidden.clone())):
        for each in caches(step.layers):
            each[new] = 0
        output = form()
        distances.append((distance(output, expected), distance(stored(step.layers), stored(wide))))
    ours, chain = distances
    print(f"{len(step.rows)} sequences: distance of outputs, new keys and values {ours}, of the chain's {chain}")
    if not all(one <= FARTHEST * other for one, other in zip(ours, chain, strict=True)):
        raise SystemExit("the kernel is farther from float32 arithmetic than the chain")


def check_repeats(kernel: DecodeLayers, layers: list[DecodeLayer], rotary: torch.Tensor, context: int) -> None:
    """Ends the script if repeats have other bits, with steps of other sizes between them, on pages of their own."""
    used = pages_of(context)
    pages = torch.randperm(sum(COUNTS) * used, device="cuda").split([count * used for count in COUNTS])
    steps = [Step(layers, rotary, count, context, own) for count, own in zip(COUNTS, pages, strict=True)]
    expected, graph = [step.one_launch(kernel) for step in steps], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [step.one_launch(kernel) for step in steps]
    for repeat in range(REPEATS):
        graph.replay()
        if not all(map(torch.equal, outputs, expected)):
            raise SystemExit(f"repeat {repeat} has other bits")
    print(f"{REPEATS} repeats have the same bits")


def time_us(form: Callable[[], object]) -> float:
    return median_us([form])


def measure(kernel: DecodeLayers, step: Step, bandwidth: float) -> Row:
    """bandwidth: bytes per us, the limit for weights, keys and values."""
    weights = sum(each.nbytes for layer in step.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    caches = 2 * 2 * int(step.positions.sum()) * SIZES.kv_heads * HEAD_DIM * len(step.layers)
    hidden = step.hidden.clone()
    chain_us, ours_us = time_us(lambda: step.chain(hidden)), time_us(lambda: step.one_launch(kernel))
    return Row(
        work=f"{len(step.rows)} sequences of {step.context:,} tokens",
        unit="us",
        value=ours_us,
        peer="chain",
        peer_value=chain_us,
        ratio=chain_us / ours_us,
        target=TARGET,
        limit_share=(weights + caches) / bandwidth / ours_us,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    works = [(count, context) for context in CONTEXTS for count in COUNTS] + list(LONG)
    layers = draw(max(count * pages_of(context) for count, context in works))
    if not supports(layers):
        raise SystemExit("needs a Hopper GPU with at least 128 SMs")
    rotary = rotary_table(HEAD_DIM, MAX_PAGES * PAGE_SIZE, 1e6, layers[0].qkv.device)
    kernel = DecodeLayers(layers, rotary, SCALE)
    few = layers[:4]  # float32 copies of all caches would not fit
    for count in (1, 3, 10, MAX_TOKENS):
        check(DecodeLayers(few, rotary, SCALE), Step(few, rotary, count, 700))
    check_repeats(kernel, layers, rotary, 700)
    bandwidth = read_bytes_per_us()
    rows = [measure(kernel, Step(layers, rotary, *work), bandwidth) for work in works]
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    write_result(rows, versions, [f"{LAYERS} layers"])


if __name__ == "__main__":
    main()
