"""`meltcore bench` from end to end: find the GPUs, watch them, run all of them at once, put the result together."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meltcore.bench import workload
from meltcore.bench.assemble import Watched, assemble
from meltcore.bench.claim import claimed
from meltcore.bench.device import Device, DeviceRun
from meltcore.bench.engine_process import OWN_PROGRAM, STALL_LIMIT_S, EngineError
from meltcore.bench.plan import CPU_LEVELS, DEFAULT_S, SHORTEST_S, cpu_settings, gpu_settings
from meltcore.bench.telemetry import memory_in_use_bytes, total_memory_bytes
from meltcore.errors import ConfigError
from meltcore.hardware.fake import FakeGpu
from meltcore.hardware.monitor import Monitor
from meltcore.hardware.nvml import NoDriverError
from meltcore.hardware.recording import Sample, read_recording
from meltcore.hardware.sampler import Setup
from meltcore.report import save
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.runfolder import RunFolder
from meltcore.results.score import ScoredRun, ScoreLevel

SAMPLES_FILE = "samples.jsonl"
INTERVAL_S = 0.1
_FIRST_SAMPLE_LIMIT_S = 10.0
_AFTERGLOW_S = 3 * INTERVAL_S  # a sample after the end is needed to know the energy at the end

OnLevel = Callable[[Device, ScoreLevel, bool], None]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`gpus` as of --gpu. `precision`: a name in workload.PRECISIONS. `model`: a checkpoint with real weights; None
    takes random ones of Qwen3-0.6B's shapes.

    `levels`, `program` (what speaks engine/json_lines.py), `fake_gpus` and `stall_limit_s` are for tests.
    """

    duration_s: float = DEFAULT_S
    gpus: str | None = None
    cpu: bool = False
    precision: str = "bf16"
    model: str | None = None
    out: Path = Path("runs")
    arguments: tuple[str, ...] = ()
    levels: tuple[int, ...] | None = None
    program: tuple[str, ...] = OWN_PROGRAM
    fake_gpus: list[FakeGpu] | None = None
    stall_limit_s: float = STALL_LIMIT_S

    def __post_init__(self) -> None:
        if not SHORTEST_S <= self.duration_s < math.inf:
            raise ConfigError(f"--duration must be at least {SHORTEST_S:g} s; got {self.duration_s:g}")
        if self.precision not in workload.PRECISIONS:
            raise ConfigError(f"--precision must be one of {', '.join(workload.PRECISIONS)}; got {self.precision}")
        if self.cpu and self.precision != "bf16":
            raise ConfigError(f"--precision {self.precision} needs a GPU; a CPU computes in float32")
        if self.cpu and self.gpus is not None:
            raise ConfigError("--cpu and --gpu exclude each other")


def run_bench(config: BenchConfig, say: Callable[[str], None], on_level: OnLevel) -> tuple[RunFolder, ScoredRun]:
    """Run everything and write the run folder; engines and sampler end whatever happens.

    An interruption or an engine that fails half way leaves a partial result that says so. Raises ConfigError for GPUs
    that are not there or measured by another bench, EngineError where no engine started.
    """
    started, clock_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    fingerprint = take_fingerprint(config.arguments)
    stopping = threading.Event()
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.kept_if_used(config.out, "bench"))
        monitor = _watch(config, folder, stack)
        devices = (
            [_cpu(config, fingerprint.cpu)] if monitor is None else _gpus(config, monitor, fingerprint.memory_bytes)
        )
        stack.enter_context(claimed(devices))
        levels = config.levels or (CPU_LEVELS if monitor is None else workload.LEVELS)
        runs = [
            stack.enter_context(_device_run(config, device, levels, folder, stopping, on_level)) for device in devices
        ]
        say(_announcement(config, devices))
        with _interruptions_set(stopping):
            _each(runs, DeviceRun.start)
            if stopping.is_set():
                raise KeyboardInterrupt
            if all(run.failure for run in runs):
                raise EngineError(f"{runs[0].device.label}: {runs[0].failure}")
            began_s = time.monotonic()
            _each(runs, lambda run: run.climb(began_s))
            interrupted = stopping.is_set()
            watched = _stop_watching(monitor, began_s)
            stack.close()  # nothing may run any more when the result is written
            result = assemble(
                runs,
                watched,
                workload.PRECISIONS[config.precision],
                began_s=began_s,
                levels=levels,
                planned_s=config.duration_s,
                started=started,
                duration_s=time.monotonic() - clock_s,
                fingerprint=fingerprint,
                interrupted=interrupted,
            )
            save(folder, result)
    return folder, result


def _watch(config: BenchConfig, folder: RunFolder, stack: ExitStack) -> Monitor | None:
    """The sampler; None for a run on the CPU, because it was asked for or there is no NVIDIA driver."""
    if config.cpu:
        return None
    setup = Setup(
        path=str(folder.path / SAMPLES_FILE),
        gpus=config.gpus,
        in_slices=True,
        interval_s=INTERVAL_S,
        fake=config.fake_gpus,
    )
    try:
        return stack.enter_context(Monitor(setup))
    except NoDriverError:
        if config.gpus is not None:
            raise
        return None


def _gpus(config: BenchConfig, monitor: Monitor, host_bytes: int) -> list[Device]:
    first = _first_samples(monitor)
    devices = []
    for position, info in enumerate(monitor.start.gpus):
        mine = [sample for sample in first if sample.gpu == position]
        memory_bytes, in_use_bytes = total_memory_bytes(mine, host_bytes), memory_in_use_bytes(mine)
        if memory_bytes is None:
            raise ConfigError(f"{info.label}: NVML does not say how much memory it has, and the engine needs to know")
        devices.append(
            Device(
                name=info.name,
                label=info.label,
                position=position,
                uuid=info.uuid,
                memory_bytes=memory_bytes,
                memory_in_use_bytes=in_use_bytes,
                settings=gpu_settings(config.model, memory_bytes, config.precision, in_use_bytes=in_use_bytes or 0),
            )
        )
    return devices


def _first_samples(monitor: Monitor) -> list[Sample]:
    """One of each GPU at least, unless one gives none in a long time."""
    samples: list[Sample] = []
    end_s = time.monotonic() + _FIRST_SAMPLE_LIMIT_S
    while len({sample.gpu for sample in samples}) < len(monitor.start.gpus) and time.monotonic() < end_s:
        time.sleep(INTERVAL_S / 2)
        samples += monitor.new_samples()
    return samples


def _cpu(config: BenchConfig, name: str) -> Device:
    return Device(name=name, label="CPU", settings=cpu_settings(config.model))


def _device_run(
    config: BenchConfig,
    device: Device,
    levels: Sequence[int],
    folder: RunFolder,
    stopping: threading.Event,
    on_level: OnLevel,
) -> DeviceRun:
    place = "cpu" if device.position is None else device.position
    return DeviceRun(
        device=device,
        levels_wanted=levels,
        duration_s=config.duration_s,
        log_path=folder.path / f"engine-{place}.log",
        stop=stopping.is_set,
        on_level=on_level,
        program=config.program,
        stall_limit_s=config.stall_limit_s,
    )


def _announcement(config: BenchConfig, devices: Sequence[Device]) -> str:
    first = devices[0]
    weights = "random weights" if first.settings.get("load_format") == "dummy" else "its weights"
    names = ", ".join(f"{device.label} ({device.name})" for device in devices)
    model, work = Path(str(first.settings["model"])).name, workload.PRECISIONS[config.precision].name
    return f"{work}: {model} with {weights} on {names}, about {config.duration_s:.0f} s"


@contextmanager
def _interruptions_set(stopping: threading.Event) -> Iterator[None]:
    """A Ctrl-C inside is no exception: the devices' threads see `stopping`, and what was measured is kept.

    One that comes when all is measured, or a second one, changes nothing. Only the main thread is ever interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stopping.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _each(runs: Sequence[DeviceRun], work: Callable[[DeviceRun], None]) -> None:
    """Do it on all devices at once, those that have failed left out."""
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(work, run) for run in runs if run.failure is None]
    for future in futures:
        future.result()


def _stop_watching(monitor: Monitor | None, began_s: float) -> Watched | None:
    if monitor is None:
        return None
    ended_s = time.monotonic()
    time.sleep(_AFTERGLOW_S)
    monitor.stop()
    return Watched(read_recording(monitor.path), (began_s, ended_s))
