"""Measures what processes take of a GPU beside their budgets: a row of src/meltcore/fleet/plan/context_memory.json.

NVML's used bytes are read before any process, then with one process after another: a CUDA context, torch with cuBLAS,
and an engine of each task with dummy weights after its warm-up and some requests. What torch has reserved is
subtracted, and what the engine's plan counts for CUDA graphs outside of torch. Nothing else may use the GPU meanwhile.

    python benchmarks/context_memory.py --row row.json     # prints the steps, writes the row
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.process import end_group, start
from meltcore.fleet.plan.context_memory import ContextMemory
from meltcore.fleet.plan.machine import read_gpus

MIB = 2**20
LIMIT_S = 300.0  # for a process to be ready, kernels compiled
END_LIMIT_S = 20.0
SETTLE_S = 1.0  # from a process's answer to the reading, and from its end to the next


def context() -> dict[str, int]:
    import torch

    torch.zeros(1, device="cuda")
    return reserved()


def library() -> dict[str, int]:
    import torch

    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    (left @ left).sum().item()
    return reserved()


def generation() -> dict[str, int]:
    return _generation(enforce_eager=True)


def generation_graphs() -> dict[str, int]:
    return _generation(enforce_eager=False)


def _generation(*, enforce_eager: bool) -> dict[str, int]:
    from meltcore.offline.llm import LLM
    from meltcore.protocol.sampling_params import SamplingParams

    llm = LLM(
        "Qwen/Qwen3-0.6B",
        load_format="dummy",
        memory_bytes=8 * 2**30,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enforce_eager=enforce_eager,
    )
    sampling = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True, seed=1)
    llm.generate([[5] * length for length in (8, 700, 3000)], sampling)
    return reserved(0 if enforce_eager else llm.engine.outside_bytes)


def translation() -> dict[str, int]:
    from meltcore.engine.translation.engine import translation_engine
    from meltcore.protocol.translation import Translate
    from meltcore.settings.config import EngineConfig

    model = "ai4bharat/indictrans2-en-indic-1B"
    config = EngineConfig(model=model, load_format="dummy", memory_bytes=6 * 2**30)
    engine = translation_engine(config, lambda _stage, _part: None)
    for index in range(16):
        engine.add(Translate(request_id=str(index), token_ids=[*range(10, 40 + index)]))
    while engine.has_work:
        engine.step()
    return reserved(engine.outside_bytes)


def transcription() -> dict[str, int]:
    import numpy as np

    from meltcore.offline.transcriber import Transcriber

    transcriber = Transcriber(
        "ai4bharat/indic-conformer-600m-multilingual", load_format="dummy", memory_bytes=6 * 2**30
    )
    clip = np.random.default_rng(0).normal(0, 0.1, 16_000 * 20).astype(np.float32)
    transcriber.transcribe([(clip, 16_000)] * 4, "hi")
    return reserved(transcriber._engine.outside_bytes)


def synthesis() -> dict[str, int]:
    from meltcore.offline.synthesizer import Synthesizer

    synthesizer = Synthesizer("ai4bharat/IndicF5", load_format="dummy", memory_bytes=6 * 2**30)
    synthesizer.synthesize("A sentence of some words.", voice=synthesizer.voices[0])
    return reserved(synthesizer._engine.outside_bytes)


def reserved(graphs: int = 0) -> dict[str, int]:
    """What torch has reserved, and what the plan counts for CUDA graphs beside it."""
    import torch

    torch.cuda.synchronize()
    return {"reserved": torch.cuda.memory_reserved(), "graphs": graphs}


STEPS: dict[str, Callable[[], dict[str, int]]] = {
    each.__name__: each
    for each in (context, library, generation, generation_graphs, translation, transcription, synthesis)
}
TASKS = ("generation", "translation", "transcription", "synthesis")


def main() -> int:
    """Measure all steps, or be the process of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=Path, help="Write the row as JSON.")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(STEPS[args.step]()), flush=True)
        sys.stdin.read()  # until the parent has read NVML
        return 0
    gpus, driver = read_gpus()
    if not gpus:
        raise SystemExit("needs an NVIDIA GPU")
    idle = gpus[0].used_bytes
    print(f"{gpus[0].name}, driver {driver}: {idle / MIB:.0f} MiB without a process", flush=True)
    beside: dict[str, int] = {}
    for step in STEPS:
        try:
            beside[step] = measure(step, idle)
        except RuntimeError as error:
            print(f"{step:18} failed: {error}", flush=True)
    missing = [task for task in TASKS if task not in beside]
    if missing:
        print(f"no row: {', '.join(missing)} failed")
        return 1
    row = ContextMemory(
        gpu=gpus[0].name,
        driver=driver,
        driver_bytes=idle,
        processes={task: beside[task] for task in TASKS},
        measured=datetime.now(UTC).date().isoformat(),
    )
    text = msgspec.json.encode(row).decode()
    print(text)
    if args.row:
        args.row.write_text(f"[{text}]\n")
    return 0


def measure(step: str, idle: int) -> int:
    """Return the bytes that the process of a step takes beside what torch has reserved. Raises RuntimeError."""
    process = start([sys.executable, __file__, "--step", step], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    began_s = time.monotonic()
    try:
        answer = _answer(process)
        time.sleep(SETTLE_S)
        used = read_gpus()[0][0].used_bytes - idle
    finally:
        if process.stdin is not None:
            process.stdin.close()
        end_group(process, END_LIMIT_S)
        time.sleep(SETTLE_S)
    found = used - answer["reserved"] - answer["graphs"]
    graphs = f", planned for graphs {answer['graphs'] / MIB:.0f} MiB" if answer["graphs"] else ""
    print(
        f"{step:18} NVML {used / MIB:8.0f} MiB, torch reserved {answer['reserved'] / MIB:8.0f} MiB, "
        f"beside {found / MIB:6.0f} MiB{graphs} ({time.monotonic() - began_s:.0f} s)",
        flush=True,
    )
    return found


def _answer(process: Any) -> dict[str, int]:
    import select

    assert process.stdout is not None
    deadline_s = time.monotonic() + LIMIT_S
    line = b""
    while time.monotonic() < deadline_s:
        if select.select([process.stdout], [], [], 1.0)[0]:
            line = process.stdout.readline()
            if line.startswith(b"{"):
                found: dict[str, int] = json.loads(line)
                return found
            if not line:
                raise RuntimeError(f"it ended with status {process.wait(10)}")
    raise RuntimeError(f"no answer within {LIMIT_S:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
