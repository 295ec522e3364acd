"""What GPU types of each architecture run: tables for the docs, and the GPU score's ladder within their memory.

The memory plan and the scheduler are the engine's own, and compute on a machine without a GPU. Nothing here is a speed.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import PagePool
from meltcore.engine.core.request import Request
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.memory.memory_plan import MemoryPlan, ModelShape, plan_memory
from meltcore.kernels.architectures import shared_kib
from meltcore.measure.node.certify.expectations import PRIORS
from meltcore.measure.score import workload
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, group_layers
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
MIB = 2**20
# Of the memory that NVML reports, what a CUDA context and its libraries take before an engine allocates: an assumption.
CONTEXT_BYTES = 600 * MIB
QWEN3_06B = ModelShape(2 * workload.NUM_PARAMETERS, 151_936, group_layers([FullAttentionSpec(8, 128)] * 28), 2, 2)
_FEW_SCRIPTS = 5  # up to which the table names them
_ROUNDS = 4  # of as many requests as run concurrently


@dataclass(frozen=True)
class GpuType:
    """NVML's name, compute capability as 10 * major + minor, SMs, and the memory that NVML reports."""

    name: str
    capability: int
    sms: int
    memory_mib: int
    quoted: str = ""  # what was measured without a result file

    @property
    def state(self) -> str:
        """What was measured on it, alone or several together, by the files of benchmarks/results/."""
        stem = re.sub(r"[^a-z0-9]+", "-", self.name.lower().removeprefix("nvidia ")).strip("-")
        files = [path for path in RESULTS.glob("*/*.json") if re.fullmatch(rf"{stem}(-x\d+)?", path.stem)]
        scripts = sorted({path.parent.name for path in files})
        if len(scripts) > _FEW_SCRIPTS:
            return "measured"
        state = f"measured: {', '.join(scripts)} alone" if scripts else "compiled only"
        return f"{state}; {self.quoted}" if self.quoted else state


# Data sheets; memory as NVML reports it.
GPU_TYPES = [
    GpuType("NVIDIA A100-SXM4-80GB", 80, 108, 81_920),
    GpuType("NVIDIA GeForce RTX 3090", 86, 82, 24_576),
    GpuType("NVIDIA GeForce RTX 4080", 89, 76, 16_376),
    GpuType("NVIDIA GeForce RTX 4090", 89, 128, 24_564),
    GpuType("NVIDIA L40S", 89, 142, 46_068),
    GpuType("NVIDIA H100 80GB HBM3", 90, 132, 81_559, quoted="one run of an earlier state, no result file"),
    GpuType("NVIDIA H200", 90, 132, 143_771),
    GpuType("NVIDIA B200", 100, 148, 183_359),
    GpuType("NVIDIA GeForce RTX 5090", 120, 170, 32_607),
]
# One GPU type for each memory size of the ladder's table.
LADDER_TYPES = [each for each in GPU_TYPES if each.name.endswith(("RTX 4080", "RTX 4090", "RTX 5090"))]


class LevelRun(NamedTuple):
    """One level of the ladder. running: most requests in one step; preemptions: until `finished` requests had ended."""

    concurrency: int
    running: int
    finished: int
    preemptions: int

    @property
    def queued(self) -> int:
        """Requests that wait while the others run."""
        return self.concurrency - self.running


def score_plan(memory_mib: int) -> MemoryPlan:
    """The engine's memory plan under `meltcore bench` on an idle GPU. Raises ConfigError where nothing fits."""
    settings = workload.gpu_settings(None, memory_mib * MIB)
    return plan_memory(
        QWEN3_06B,
        memory_bytes=memory_mib * MIB - CONTEXT_BYTES,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        may_run_fewer=False,
        snapshots=False,
    )


def run_level(memory_mib: int, concurrency: int) -> LevelRun:
    """Schedule a level of the ladder, each finished request replaced by the next, for some rounds of requests.

    Raises RuntimeError where the scheduler stands still, AssertionError where its pages are inconsistent.
    """
    settings, plan = workload.gpu_settings(None, memory_mib * MIB), score_plan(memory_mib)
    scheduler = Scheduler(
        PagePool(plan.pages),
        None,
        max_num_seqs=plan.max_num_seqs,
        penalty_slots=plan.penalty_slots,
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        max_model_len=settings["max_model_len"],
    )
    sampling = SamplingParams(max_tokens=workload.OUTPUT_TOKENS, ignore_eos=True)

    def send(number: int) -> None:
        prompt = array("I", workload.prompt(number, QWEN3_06B.vocab_size))
        scheduler.add(Request(AddRequest(str(number), prompt, sampling), number, frozenset(), None))

    sent, finished, running = 0, 0, 0
    wanted = _ROUNDS * min(concurrency, plan.max_num_seqs)
    while finished < wanted:
        # The queue holds what could start soon, not all of 10,000: only the order of waiting requests matters.
        waiting = min(concurrency, plan.max_num_seqs + wanted) - (sent - finished)
        for _ in range(waiting):
            send(sent)
            sent += 1
        open_before = len(scheduler.running) + scheduler.waiting_count
        chunks: list[Chunk] = scheduler.schedule()
        if not chunks:
            raise RuntimeError(f"no progress after {finished} requests at concurrency {concurrency}")
        running = max(running, len(scheduler.running))
        scheduler.update(chunks, [[0] for chunk in chunks if chunk.samples])
        finished += open_before - len(scheduler.running) - scheduler.waiting_count
    scheduler.pool.check()
    return LevelRun(concurrency, running, finished, scheduler.preemptions)


def types_table() -> list[str]:
    """The GPU types, what is known of each, and the requests of the GPU score that run concurrently."""
    lines = [
        "| GPU type | architecture | SMs | memory | shared memory per block | state | certify priors | run, wait |",
        "|---|---|--:|--:|--:|---|---|--:|",
    ]
    for each in GPU_TYPES:
        running = score_plan(each.memory_mib).max_num_seqs
        lines.append(
            f"| {each.name.removeprefix('NVIDIA ')} | sm_{each.capability} | {each.sms} | {each.memory_mib:,} MiB "
            f"| {shared_kib(each.capability)} KiB | {each.state} | {'shipped' if each.name in PRIORS else 'none'} "
            f"| {running:,}, {10_000 - running:,} |"
        )
    return lines


def ladder_table() -> list[str]:
    """Requests that run, wait and are preempted at each level of the GPU score, by memory."""
    names = [
        f"{round(each.memory_mib / 1024)} GB ({each.name.removeprefix('NVIDIA GeForce ')})" for each in LADDER_TYPES
    ]
    lines = [f"| concurrency | {' | '.join(names)} |", f"|--:|{'---|' * len(names)}"]
    for concurrency in workload.LEVELS:
        cells = []
        for each in LADDER_TYPES:
            level = run_level(each.memory_mib, concurrency)
            share = 100 * level.preemptions / level.finished
            preempted = f", {share:.1f} preempted per 100" if level.preemptions else ""
            cells.append(f"{level.running} run, {level.queued:,} wait{preempted}")
        lines.append(f"| {concurrency:,} | {' | '.join(cells)} |")
    return lines


TABLES = {"gpu types": types_table, "score ladder": ladder_table}
