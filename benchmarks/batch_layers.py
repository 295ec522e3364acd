"""The layers of a decode step of Qwen3-0.6B in one launch, for 5 to 16 sequences. Prepared: it has not run on a GPU.

The engine does not use this kernel (docs/decisions/persistent-decode.md). It is timed beside `layer_gemms`, which the
engine uses, and beside a chain of kernels. Before that, its distance from float32 arithmetic must be the chain's, and
its repeats must have the same bits, with steps of other sizes between them.

    python benchmarks/batch_layers.py                   the table and benchmarks/results/batch_layers/h200.json
    python benchmarks/batch_layers.py --in-flight 3     another number of copies in flight
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from attention import read_bytes_per_us
from bench_output import Row, Target, need_gpu, write_result
from layer_gemms import HEAD_DIM, LAYERS, PAGE_SIZE, SCALE, Step, distance, draw, time_us

from meltcore.kernels.nvrtc import INSTRUCTIONS, CudaKernel
from meltcore.kernels.persistent.decode_layers import (
    SHARED_BYTES,
    SIZES,
    DecodeLayer,
    decode_layers_reference,
    supports,
)

FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    [INSTRUCTIONS, FOLDER / "batch_layers_instructions.cu", FOLDER / "batch_layers.cu"], "batch_layers", suffix="a"
)
MAX_TOKENS = 16
IN_FLIGHT = 2
BLOCKS, THREADS, SLOTS = 128, 12 * 32, 12
SETS = 3  # of exchanged values, as in batch_layers.cu
# A block has parts of the attention of at most two sequences that it shares: sums, maximum and total of each head.
PART_BYTES = BLOCKS * 2 * SIZES.heads * (4 * HEAD_DIM + 16)
QKV_ROWS = (SIZES.heads + 2 * SIZES.kv_heads) * HEAD_DIM
TOKEN_BYTES = 2 * (QKV_ROWS + SIZES.heads * HEAD_DIM + 2 * SIZES.hidden + SIZES.intermediate)
SET_BYTES = MAX_TOKENS * TOKEN_BYTES + PART_BYTES

COUNTS = (5, 8, 10, 12, 16)
REPEATS = 1000
FARTHEST = 1.5  # times the chain's distance from float32 arithmetic
TARGET = Target(1.03, of="ratio")


@cache
def kernel_macros(layers: int, page_size: int, in_flight: int = IN_FLIGHT) -> tuple[tuple[str, int], ...]:
    """The constants that the kernel is compiled with."""
    return (
        ("HIDDEN", SIZES.hidden),
        ("HEADS", SIZES.heads),
        ("KV_HEADS", SIZES.kv_heads),
        ("INTERMEDIATE", SIZES.intermediate),
        ("LAYERS", layers),
        ("PAGE_SIZE", page_size),
        ("BLOCKS", BLOCKS),
        ("SLOTS", SLOTS),
        ("IN_FLIGHT", in_flight),
    )


class BatchLayers:
    """Layers that `decode_layers.supports` returns True for, ready to launch."""

    def __init__(
        self, layers: Sequence[DecodeLayer], rotary: torch.Tensor, scale: float, in_flight: int = IN_FLIGHT
    ) -> None:
        """Takes the addresses of weights and caches. scale: of the scores; rotary: see `rotary_table`."""
        device = rotary.device
        self.layers, self.rotary, self.scale = layers, rotary, scale
        self.macros = kernel_macros(len(layers), layers[0].keys.shape[1], in_flight)
        addresses = [
            [each.data_ptr() for each in (layer.qkv, layer.output, layer.gate_up, layer.down, layer.keys, layer.values)]
            for layer in layers
        ]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Copies, next to each other: an address that must be loaded first would delay every layer.
        norms = [
            (layer.attention_norm.weight, layer.mlp_norm.weight, layer.head_norms.query, layer.head_norms.key)
            for layer in layers
        ]
        self.norms = torch.cat([weight for of_layer in norms for weight in of_layer])
        # -1 is EMPTY: no block has written it yet.
        self.exchange = torch.full((SETS * SET_BYTES // 2,), -1, dtype=torch.int16, device=device)
        self.first_set = torch.zeros(1, dtype=torch.int32, device=device)

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """The residual stream after all layers, as `DecodeLayers.run` computes it, of up to MAX_TOKENS tokens."""
        first, out = self.layers[0], torch.empty_like(hidden)
        KERNEL.launch(
            (BLOCKS,),
            THREADS,
            self.macros,
            [
                *(self.pointers, self.norms, hidden, out, positions, rows, page_table, self.rotary),
                *(self.exchange, self.first_set, len(hidden), page_table.stride(0)),
                *(first.attention_norm.eps, first.head_norms.eps, self.scale * math.log2(math.e)),
            ],
            hidden.device,
            shared_bytes=SHARED_BYTES,
            cooperative=True,
            pdl=False,
        )
        return out


def as_float(part: Any) -> Any:
    """A part of a layer in float32."""
    if isinstance(part, torch.Tensor):
        return part.float()
    return type(part)(*map(as_float, part)) if isinstance(part, tuple) else part


def check(kernel: BatchLayers, step: Step) -> None:
    """Ends the script if the kernel is farther from float32 arithmetic than the chain: outputs, new keys and values."""
    arguments = step.positions, step.table, step.rows
    position = int(step.positions[0])  # of all sequences
    new = step.table[:, position // PAGE_SIZE], position % PAGE_SIZE

    def caches(layers: Sequence[DecodeLayer]) -> list[torch.Tensor]:
        return [each for layer in layers for each in (layer.keys, layer.values)]

    def stored(layers: Sequence[DecodeLayer]) -> torch.Tensor:
        return torch.stack([each[new] for each in caches(layers)])

    wide = [DecodeLayer(*map(as_float, layer)) for layer in step.layers]
    expected = decode_layers_reference(wide, step.hidden.float(), step.rotary, SCALE, *arguments)
    distances = []
    for form in (lambda: kernel.run(step.hidden, *arguments), lambda: step.chain(step.hidden.clone())):
        for each in caches(step.layers):
            each[new] = 0
        output = form()
        distances.append((distance(output, expected), distance(stored(step.layers), stored(wide))))
    ours, chain = distances
    print(f"{len(step.rows)} sequences: distance of outputs, new keys and values {ours}, of the chain's {chain}")
    if not all(one <= FARTHEST * other for one, other in zip(ours, chain, strict=True)):
        raise SystemExit("the kernel is farther from float32 arithmetic than the chain")


def check_repeats(kernel: BatchLayers, steps: Sequence[Step]) -> None:
    """Ends the script if repeats have other bits, with steps of other sizes between them."""

    def run_all() -> list[torch.Tensor]:
        return [kernel.run(step.hidden, step.positions, step.table, step.rows) for step in steps]

    expected, graph = run_all(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run_all()
    for repeat in range(REPEATS):
        graph.replay()
        if not all(map(torch.equal, outputs, expected)):
            raise SystemExit(f"repeat {repeat} has other bits")


def measure(kernel: BatchLayers, step: Step, bandwidth: float) -> list[Row]:
    """A row beside each other form of the layers. bandwidth: bytes per us, the limit for weights, keys and values."""
    weights = sum(each.nbytes for layer in step.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    tokens = int(step.positions.sum())
    caches = 2 * 2 * tokens * SIZES.kv_heads * HEAD_DIM * len(step.layers)

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return kernel.run(hidden, step.positions, step.table, step.rows)

    forms = {"layer_gemms": step.fuse, "chain": step.chain}
    peers_us = {name: time_us(form, step.hidden.clone()) for name, form in forms.items()}
    ours_us = time_us(run, step.hidden)
    return [
        Row(
            work=f"{len(step.rows)} sequences of {int(step.positions[0]) + 1} tokens, beside {peer}",
            unit="us",
            value=ours_us,
            peer=peer,
            peer_value=peer_us,
            ratio=peer_us / ours_us,
            target=TARGET,
            limit_share=(weights + caches) / bandwidth / ours_us,
        )
        for peer, peer_us in peers_us.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=700, help="tokens of each sequence (default 700)")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help=f"copies at a time (default {IN_FLIGHT})")
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    layers = draw(max(COUNTS) * -(-args.context // PAGE_SIZE))
    steps = [Step(layers, count, args.context) for count in COUNTS]
    rotary = steps[0].rotary
    if not supports(layers, len(rotary)):
        raise SystemExit("needs a Hopper GPU with at least 128 SMs")
    kernel = BatchLayers(layers, rotary, SCALE, args.in_flight)
    for step in steps:
        check(kernel, step)
    check_repeats(kernel, steps)
    bandwidth = read_bytes_per_us()
    rows = [row for step in steps for row in measure(kernel, step, bandwidth)]
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    write_result(rows, versions, [f"{LAYERS} layers"], subject=f"{args.in_flight} copies in flight")


if __name__ == "__main__":
    main()
