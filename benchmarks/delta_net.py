"""Gated DeltaNet against the device's limits: decode by copy bandwidth, prefill by bytes and by GEMMs.

Qwen3.5-35B-A3B's shapes (16 key heads, 32 value heads, all of 128), bf16, random data. Every number is the median of
CUDA graph replays, with states larger than the L2 cache; every result is compared with the reference first.

    python benchmarks/delta_net.py             # the table and benchmarks/results/delta_net/h200.json
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
from bench_output import Row, Target, need_gpu, write_result

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import CHUNK, GatedDeltaParams, GatedDeltaShape, make_chunk_indices
from meltcore.kernels.gated_delta.convolution import convolve_chunks
from meltcore.kernels.gated_delta.intra_chunk import prepare_chunks
from meltcore.kernels.gated_delta.layer import gated_delta_net
from meltcore.kernels.gated_delta.state_scan import ScanLaunch, norm_chunks, scan_chunks
from meltcore.kernels.launch import force_implementation

SHAPE = GatedDeltaShape(key_heads=16, heads=32, key_dim=128, value_dim=128, kernel=4)
TYPE = torch.bfloat16
STATE_BYTES = 4 * SHAPE.heads * SHAPE.key_dim * SHAPE.value_dim
CACHE_BYTES = 2**28  # states of a graph's launches together: several times any L2
DISTANCE = 1e-2  # of two bf16 bodies
DECODE_TARGET = Target(0.8, of="ratio")


def copied_bytes_per_us() -> float:
    """Copy bandwidth, bytes read plus bytes written, of a kernel: a memcpy within a graph may be slower."""
    source, target = torch.randn(2, 2**29, device="cuda")
    return 2 * source.nbytes / median_us([lambda: torch.neg(source, out=target)] * 3)


def make_params(slots: int) -> GatedDeltaParams:
    """Weights as in the published initialization, and random states."""
    conv = torch.randn(SHAPE.conv_channels, SHAPE.kernel, device="cuda").to(TYPE) / 2
    a_log = torch.empty(SHAPE.heads, device="cuda").uniform_(0.01, 16).log()
    conv_states = torch.randn(slots, SHAPE.kernel, SHAPE.conv_channels, device="cuda").to(TYPE)
    return GatedDeltaParams(
        *(conv, a_log, torch.ones(SHAPE.heads, device="cuda"), conv.new_ones(SHAPE.value_dim), 1e-6, SHAPE.key_heads),
        *(conv_states, torch.randn(slots, *SHAPE[1:4], device="cuda")),
    )


class Work(NamedTuple):
    """Sequences of `length` new tokens each: 1 in decode, else whole prompts."""

    sequences: int
    length: int

    @property
    def name(self) -> str:
        if self.length == 1:
            return f"decode, {self.sequences} sequence{'s' * (self.sequences != 1)}"
        return f"prefill, {self.sequences} x {self.length:,} tokens"

    @property
    def bytes(self) -> int:
        """Bytes of the projection and the outputs; states and rings are written, and in decode also read."""
        token = (SHAPE.width + SHAPE.heads * SHAPE.value_dim) * TYPE.itemsize
        ring = SHAPE.conv_channels * TYPE.itemsize
        slot = 2 * STATE_BYTES + SHAPE.kernel * ring if self.length == 1 else STATE_BYTES + SHAPE.kernel * ring
        return self.sequences * (self.length * token + slot)

    @property
    def flops(self) -> int:
        """Operations of the GEMMs of chunks and states, without the triangular inverse."""
        keys, values = SHAPE.key_dim, SHAPE.value_dim
        token = 2 * (2 * CHUNK * keys + 2 * CHUNK * values + 3 * keys * values)
        return self.sequences * self.length * SHAPE.heads * token

    def metadata(self, first_slot: int) -> AttentionMetadata:
        nothing = torch.empty(0, dtype=torch.int64, device="cuda")
        decodes = self.sequences if self.length == 1 else 0
        sequence = torch.arange(self.sequences, device="cuda")
        return AttentionMetadata(
            page_table=nothing,
            rows=nothing,
            context_lens=sequence + 1000 if decodes else 0 * sequence,
            slot_mapping=nothing,
            num_decodes=decodes,
            query_tiles=nothing,
            padded_index=nothing,
            padded_groups=[],
            state_slots=sequence.flip(0) + first_slot,
            query_start_loc=torch.arange(self.sequences + 1, device="cuda") * self.length,
            chunk_indices=torch.from_numpy(make_chunk_indices([self.length] * self.sequences, decodes)).cuda(),
        )


class Case:
    """A work with its data. Launches take turns over slots, enough of them to miss the L2 cache."""

    def __init__(self, work: Work) -> None:
        self.work = work
        copies = max(4, min(64, CACHE_BYTES // (work.sequences * STATE_BYTES))) if work.length == 1 else 1
        slots = 1 + copies * work.sequences
        self.params = make_params(slots)
        self.conv_states, self.states = self.params.conv_states, self.params.recurrent_states
        self.projected = torch.randn(work.sequences * work.length, SHAPE.width, device="cuda").to(TYPE)
        self.steps = [work.metadata(1 + copy * work.sequences) for copy in range(copies)]

    def call(self, metadata: AttentionMetadata) -> torch.Tensor:
        return gated_delta_net(self.projected, self.params, metadata)

    def check(self) -> None:
        """Compare outputs and states with the reference, from the same initial states."""
        begun = self.states.clone(), self.conv_states.clone()
        ours = self.call(self.steps[0]), self.states.clone(), self.conv_states.clone()
        self.states.copy_(begun[0])
        self.conv_states.copy_(begun[1])
        force_implementation("reference")
        expected = self.call(self.steps[0]), self.states, self.conv_states
        force_implementation(None)
        for one, other in zip(ours, expected, strict=True):
            distance = float((one.float() - other.float()).norm() / other.float().norm())
            if not distance <= DISTANCE:
                raise SystemExit(f"{self.work.name}: relative distance {distance:.2e} from the reference")

    def measure_us(self) -> float:
        self.check()
        return median_us([partial(self.call, metadata) for metadata in self.steps * self.repeats])

    @property
    def repeats(self) -> int:
        return 1 if len(self.steps) > 1 else 5

    def prefill_parts(self) -> dict[str, Callable[..., object]]:
        """The kernels of prefill by name; the scan takes launch parameters."""
        (metadata,) = self.steps
        out = torch.empty(len(self.projected), SHAPE.heads * SHAPE.value_dim, dtype=TYPE, device="cuda")
        given = self.params, metadata, SHAPE
        convolve = partial(convolve_chunks, self.projected, *given)
        convolved = convolve()
        prepare = partial(prepare_chunks, self.projected, convolved, *given)
        scan = partial(scan_chunks, self.projected, convolved, prepare(), *given)
        norm = partial(norm_chunks, self.projected, scan(), *given, out)
        return {"convolution": convolve, "chunks": prepare, "scan": scan, "norm": norm}


DECODES = [Work(sequences, 1) for sequences in (1, 8, 64, 256)]
PREFILLS = [Work(1, 1024), Work(8, 1024), Work(1, 8192)]


def measure() -> list[Row]:
    bandwidth, rate = copied_bytes_per_us(), matmul_flops_per_us()
    rows = [
        Row(work="copy of 2 GiB, read and written", unit="TB/s", value=bandwidth / 1e6),
        Row(work="bf16 GEMM of 8192^3", unit="TFLOP/s", value=rate / 1e6),
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
                target=DECODE_TARGET if work == Work(64, 1) else None,
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
    parser.add_argument("--sweep", action="store_true", help="Sweep launch parameters instead.")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    if arguments.sweep:
        sweep()
        return
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    write_result(measure(), versions)


if __name__ == "__main__":
    main()
