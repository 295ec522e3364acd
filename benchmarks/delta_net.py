"""Gated DeltaNet against the device's limits: decode by copy bandwidth, prefill by bytes and by matrix products.

Qwen3.5-35B-A3B's shapes (16 key heads, 32 value heads, all of 128), bf16, random data. Every number is the median of
CUDA graph replays, with states larger than the L2 cache; every result is compared with the torch body first.

    python benchmarks/delta_net.py             # the table and benchmarks/results/delta_net.json
    python benchmarks/delta_net.py --sweep     # the parts of prefill, and other launches of its scan; printed only
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from attention import matmul_flops_per_us, median_us
from bench_output import Row, need_gpu, write_result

from meltcore.kernels.delta import CHUNK, DeltaShape, DeltaWeights
from meltcore.kernels.delta_chunks import prepare_chunks
from meltcore.kernels.delta_convolve import convolve_chunks
from meltcore.kernels.delta_net import delta_net
from meltcore.kernels.delta_places import delta_chunks
from meltcore.kernels.delta_scan import ScanLaunch, norm_chunks, scan_chunks
from meltcore.kernels.dispatch import force_reference
from meltcore.kernels.paged_attention import Segments

SHAPE = DeltaShape(key_heads=16, heads=32, key_dim=128, value_dim=128, kernel=4)
TYPE = torch.bfloat16
STATE_BYTES = 4 * SHAPE.heads * SHAPE.key_dim * SHAPE.value_dim
CACHE_BYTES = 2**28  # states of a graph's launches together: several times any L2
DISTANCE = 1e-2  # of two bf16 bodies
DECODE_REACH = 0.8


def copied_bytes_per_us() -> float:
    """Bytes read and bytes written, by a kernel: what copies within a graph may be slower."""
    source, target = torch.randn(2, 2**29, device="cuda")
    return 2 * source.nbytes / median_us([lambda: torch.neg(source, out=target)] * 3)


def make_weights() -> DeltaWeights:
    """As the published initialisation has them."""
    conv = torch.randn(SHAPE.conv_channels, SHAPE.kernel, device="cuda").to(TYPE) / 2
    a_log = torch.empty(SHAPE.heads, device="cuda").uniform_(0.01, 16).log()
    return DeltaWeights(conv, a_log, torch.ones(SHAPE.heads, device="cuda"), conv.new_ones(SHAPE.value_dim), 1e-6)


class Work(NamedTuple):
    """Sequences of `length` new tokens each: 1 in decode, else whole prompts."""

    sequences: int
    length: int

    @property
    def name(self) -> str:
        if self.length == 1:
            return f"decode, {self.sequences} sequences"
        return f"prefill, {self.sequences} x {self.length:,} tokens"

    @property
    def bytes(self) -> int:
        """The product read once and the outputs written once; states written, and read in decode; rings alike."""
        token = (SHAPE.width + SHAPE.heads * SHAPE.value_dim) * TYPE.itemsize
        ring = SHAPE.conv_channels * TYPE.itemsize
        slot = 2 * STATE_BYTES + SHAPE.kernel * ring if self.length == 1 else STATE_BYTES + SHAPE.kernel * ring
        return self.sequences * (self.length * token + slot)

    @property
    def flops(self) -> int:
        """Of the products of chunks and states, the triangular inverse left out."""
        keys, values = SHAPE.key_dim, SHAPE.value_dim
        token = 2 * (2 * CHUNK * keys + 2 * CHUNK * values + 3 * keys * values)
        return self.sequences * self.length * SHAPE.heads * token

    def segments(self, first_slot: int) -> Segments:
        nothing = torch.empty(0, dtype=torch.int64, device="cuda")
        decodes = self.sequences if self.length == 1 else 0
        sequence = torch.arange(self.sequences, device="cuda")
        return Segments(
            page_table=nothing,
            rows=nothing,
            starts=sequence + 1000 if decodes else 0 * sequence,
            slots=nothing,
            decodes=decodes,
            tiles=nothing,
            places=nothing,
            groups=[],
            state_slots=sequence.flip(0) + first_slot,
            first_tokens=torch.arange(self.sequences + 1, device="cuda") * self.length,
            chunks=torch.from_numpy(delta_chunks([self.length] * self.sequences, decodes)).cuda(),
        )


class Case:
    """A work with its data. Launches take turns over slots, enough of them to miss the L2 cache."""

    def __init__(self, work: Work) -> None:
        self.work = work
        copies = max(4, min(64, CACHE_BYTES // (work.sequences * STATE_BYTES))) if work.length == 1 else 1
        slots = 1 + copies * work.sequences
        self.weights = make_weights()
        self.projected = torch.randn(work.sequences * work.length, SHAPE.width, device="cuda").to(TYPE)
        self.conv_states = torch.randn(slots, SHAPE.kernel, SHAPE.conv_channels, device="cuda").to(TYPE)
        self.states = torch.randn(slots, *SHAPE[1:4], device="cuda")
        self.segments = [work.segments(1 + copy * work.sequences) for copy in range(copies)]

    def call(self, segments: Segments) -> torch.Tensor:
        return delta_net(self.projected, self.weights, self.conv_states, self.states, segments, SHAPE.key_heads)

    def check(self) -> None:
        """Outputs and states, from the same beginning."""
        begun = self.states.clone(), self.conv_states.clone()
        ours = self.call(self.segments[0]), self.states.clone(), self.conv_states.clone()
        self.states.copy_(begun[0])
        self.conv_states.copy_(begun[1])
        force_reference(True)
        expected = self.call(self.segments[0]), self.states, self.conv_states
        force_reference(False)
        for one, other in zip(ours, expected, strict=True):
            distance = float((one.float() - other.float()).norm() / other.float().norm())
            if not distance <= DISTANCE:
                raise SystemExit(f"{self.work.name}: relative distance {distance:.2e} from the reference")

    def measure_us(self) -> float:
        self.check()
        return median_us([partial(self.call, segments) for segments in self.segments * self.repeats])

    @property
    def repeats(self) -> int:
        return 1 if len(self.segments) > 1 else 5

    def prefill_parts(self) -> dict[str, Callable[..., object]]:
        """What prefill consists of; the scan takes a launch."""
        (segments,) = self.segments
        out = torch.empty(len(self.projected), SHAPE.heads * SHAPE.value_dim, dtype=TYPE, device="cuda")
        where = segments.first_tokens, segments.chunks
        slot_of = segments.starts, segments.state_slots
        convolve = partial(convolve_chunks, self.projected, self.weights, self.conv_states, *slot_of, *where, 0, SHAPE)
        convolved = convolve()
        prepare = partial(prepare_chunks, self.projected, convolved, self.weights, *where, 0, SHAPE)
        caches = self.conv_states, self.states, *slot_of, segments.first_tokens
        scan = partial(scan_chunks, self.projected, convolved, prepare(), *caches, 0, SHAPE)
        norm = partial(norm_chunks, self.projected, scan(), self.weights, *where, 0, SHAPE, out)
        return {"convolution": convolve, "chunks": prepare, "scan": scan, "norm": norm}


DECODES = [Work(sequences, 1) for sequences in (1, 8, 64, 256)]
PREFILLS = [Work(1, 1024), Work(8, 1024), Work(1, 8192)]


def measure() -> list[Row]:
    bandwidth, rate = copied_bytes_per_us(), matmul_flops_per_us()
    rows = [
        Row(work="copy of 2 GiB, read and written", unit="TB/s", value=bandwidth / 1e6),
        Row(work="bf16 product of 8192^3", unit="TFLOP/s", value=rate / 1e6),
    ]
    for work in DECODES + PREFILLS:
        time_us = Case(work).measure_us()
        moved_us, computed_us = work.bytes / bandwidth, work.flops / rate
        floor_us = max(moved_us, computed_us)
        rows.append(
            Row(
                work=work.name,
                unit="us",
                value=time_us,
                peer=f"{work.bytes / 1e6:,.1f} MB, {work.flops / 1e9:,.1f} GFLOP: {moved_us:.1f}, {computed_us:.1f} us",
                peer_value=floor_us,
                ratio=floor_us / time_us,
                reach=DECODE_REACH if work == Work(64, 1) else None,
                limit_share=floor_us / time_us,
            )
        )
    return rows


def sweep() -> None:
    """Best first."""
    for work in PREFILLS:
        case = Case(work)
        print(f"{work.name}; chosen {case.measure_us():.1f} us")
        parts = case.prefill_parts()
        print(*(f"  {median_us([part] * 5):8.1f} us  {name}" for name, part in parts.items()), sep="\n")
        timed = []
        for values, stages in itertools.product((16, 32, 64, 128), (1, 2, 3)):
            launch = ScanLaunch(values, stages)
            try:
                timed.append((median_us([partial(parts["scan"], launch)] * 5), launch))
            except triton.runtime.errors.OutOfResources:
                continue
        print(*(f"  {time_us:8.1f} us  {launch}" for time_us, launch in sorted(timed)[:8]), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other launch parameters instead")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    if arguments.sweep:
        sweep()
        return
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    write_result("delta_net", measure(), versions)


if __name__ == "__main__":
    main()
