"""How long an engine takes to sleep, and to wake until its first token or sound, against the rate of pinned copies.

One run measures one model with random weights. Weights are copied to pinned host memory and back, at the same
addresses, so that CUDA graphs stay; caches are dropped. Wake to first token is to take at most 1.5 times as long as a
copy of the same bytes at the rate of the run. All cycles must give the same tokens, and the device must have the same
bytes in use in every cycle, asleep and awake, as NVML counts them.

    python benchmarks/sleep_wake.py --model Qwen/Qwen3-0.6B
    python benchmarks/sleep_wake.py --model /dev/shm/gemma-3-27b-q4_0.gguf  # of random_gguf.py; only its header is read
    python benchmarks/sleep_wake.py --model ai4bharat/IndicF5
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from bench_output import Row, Target, need_gpu, write_result

from meltcore.common.errors import MeltcoreError
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.synthesis.engine import SynthesisTask
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.models.checkpoints.checkpoint import find_task
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.synthesis import Synthesize
from meltcore.settings.config import EngineConfig

SOON = Target(1.5, of="value", better="lower")
COPY_BYTES, COPIES = 2**30, 4
TEXT = "letters of words that take some seconds to speak, and no end of a sentence"


class Subject:
    """An engine, and the request whose first result ends a wake."""

    def __init__(self, args: argparse.Namespace) -> None:
        is_speech = find_task(args.model, dummy=True).name == "synthesis"
        config = EngineConfig(
            model=args.model,
            load_format="dummy",
            device=args.device,
            memory_bytes=int(args.memory_gib * 2**30) if args.memory_gib else None,
            enable_sleep_mode=True,
            **({} if is_speech else {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len}),
        )
        self.engine: Any = BatchEngine(SynthesisTask(config)) if is_speech else GenerationEngine(config)
        self._is_speech = is_speech
        self._requests = 0
        self.first = "first sound" if is_speech else "first token"

    def answer(self) -> tuple[float, bytes]:
        """Run one request. Returns the seconds until its first result, and all results."""
        self._requests += 1
        name, started = str(self._requests), time.perf_counter()
        if self._is_speech:
            voice = self.engine.task.ready().voices[0]
            self.engine.add(Synthesize(request_id=name, text=TEXT, voice=voice, seed=1))
        else:
            sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            self.engine.add(AddRequest(name, [*range(300, 428)], sampling))
        first_s, results = 0.0, b""
        while self.engine.has_work:
            for output in self.engine.step().outputs:
                first_s = first_s or time.perf_counter() - started
                if getattr(output, "error", None):
                    sys.exit(f"the request has failed: {output.error}")
                results += output.samples if self._is_speech else repr(output.token_ids).encode()
        return first_s, results


def copy_rate(device: torch.device) -> float:
    """Bytes per second of copies from pinned host memory."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    rate = COPIES * COPY_BYTES / (time.perf_counter() - started)
    del target, host
    torch.cuda.empty_cache()
    return rate


def used_bytes_counter(device: torch.device) -> Callable[[], int]:
    """Return a function that reads the device's bytes in use from NVML; on a CPU it returns 0."""
    if device.type == "cpu":
        return lambda: 0
    from meltcore.common.gpus.driver import Nvml

    nvml = Nvml()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = next(gpu for gpu in nvml.gpus() if uuid in nvml.uuid(gpu))
    return lambda: nvml.memory_bytes(handle)[0]


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def measure(args: argparse.Namespace) -> list[Row]:
    device = torch.device(args.device)
    built_s, subject = seconds_of(lambda: Subject(args))
    used_bytes, is_gpu = used_bytes_counter(device), device.type == "cuda"
    rate = copy_rate(device) if is_gpu else 0.0
    _, results = subject.answer()  # nothing is cached, as after waking: a cached prefix changes the last bits of logits
    warm_s, _ = subject.answer()
    print(f"built in {built_s:.1f} s; pinned copies {rate / 1e9:.1f} GB/s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in ("sleep", "wake", "first")}
    asleep, awake, copied_bytes, failures = [], [], 0, 0
    slept: Any = None
    keep: Literal["host", "disk"] = "host"
    for cycle in range(args.cycles):
        sleep_s, slept = seconds_of(lambda: subject.engine.sleep(keep))
        asleep.append(used_bytes())
        wake_s, copied_bytes = seconds_of(subject.engine.wake)
        first_s, found = subject.answer()
        awake.append(used_bytes())
        failures += found != results
        for name, seconds in (("sleep", sleep_s), ("wake", wake_s), ("first", wake_s + first_s)):
            times[name].append(seconds)
        print(
            f"cycle {cycle}: sleep {sleep_s:.3f} s, wake {wake_s:.3f} s, {subject.first} {wake_s + first_s:.3f} s, "
            f"in use {asleep[-1]} asleep, {awake[-1]} awake, same {found == results}",
            flush=True,
        )
    disk_sleep_s, _ = seconds_of(lambda: subject.engine.sleep("disk"))
    disk_wake_s, dropped_bytes = seconds_of(subject.engine.wake)
    failures += subject.answer()[1] != results
    medians = {name: statistics.median(values) for name, values in times.items()}
    invalid = f"{failures} of {args.cycles + 1} cycles gave other results" if failures else None
    floor_s = copied_bytes / rate if rate else 0.0
    rows = [
        Row(work="freed asleep", unit="GB", value=slept.freed_bytes / 1e9, invalid=invalid),
        Row(work="resident asleep, context not counted", unit="GB", value=slept.resident_bytes / 1e9),
        Row(work="weights copied", unit="GB", value=copied_bytes / 1e9),
        Row(work="first sleep, which pins host memory", unit="s", value=times["sleep"][0]),
        Row(work="sleep", unit="s", value=medians["sleep"]),
        Row(work="wake", unit="s", value=medians["wake"]),
        Row(work=f"wake to {subject.first}", unit="s", value=medians["first"]),
        Row(work=f"{subject.first} of an awake engine", unit="s", value=warm_s),
        Row(work="sleep, weights dropped", unit="s", value=disk_sleep_s),
        Row(work="wake, random weights made again", unit="s", value=disk_wake_s),
    ]
    if is_gpu:
        spread = max(max(values[1:]) - min(values[1:]) for values in (asleep, awake)) if args.cycles > 1 else 0
        rows += [
            Row(work="pinned copies", unit="GB/s", value=rate / 1e9),
            Row(work="in use asleep by NVML", unit="GB", value=asleep[-1] / 1e9),
            Row(work="wake over copy", unit="x", value=medians["wake"] / floor_s, target=SOON, invalid=invalid),
            Row(
                work=f"wake to {subject.first} over copy",
                unit="x",
                value=medians["first"] / floor_s,
                target=SOON,
                invalid=invalid,
            ),
            Row(
                work=f"NVML bytes, largest difference between cycles 2 to {args.cycles}",
                unit="MB",
                value=spread / 1e6,
                target=Target(0.0, better="lower"),
            ),
        ]
    assert dropped_bytes >= 0
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="Hub id, folder or GGUF file; weights are random.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--memory-gib", type=float, help="Memory of the engine; default: all that is free.")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    if args.device != "cpu":
        need_gpu()
    try:
        rows = measure(args)
    except MeltcoreError as error:
        sys.exit(str(error))
    write_result(rows, {"torch": str(torch.__version__)}, subject=args.model.split("/")[-1])


if __name__ == "__main__":
    main()
