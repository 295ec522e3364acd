"""Runs `meltcore bench`: finds, monitors and measures the GPUs concurrently, and writes the result."""

from __future__ import annotations

import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.driver import NoDriverError
from meltcore.common.gpus.reader import Sample
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.score import ScoredRun, ScoreLevel
from meltcore.measure.documents.values.scores import find_reference, ratios
from meltcore.measure.load.run.surroundings import SurroundingsMonitor, machine_cautions
from meltcore.measure.node.monitor.recording import read_recording
from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings
from meltcore.measure.report.render import save_document
from meltcore.measure.score import workload
from meltcore.measure.score.assemble import MonitoredRun, assemble, memory_in_use_bytes, total_memory_bytes
from meltcore.measure.score.config import BenchConfig
from meltcore.measure.score.device import Device, DeviceRun
from meltcore.measure.score.engine_process import EngineError
from meltcore.measure.score.plan import ScorePlan, make_plan

SAMPLES_FILE = "samples.jsonl"
INTERVAL_S = 0.1
_FIRST_SAMPLE_LIMIT_S = 10.0
_LAST_SAMPLES_S = 3 * INTERVAL_S  # a sample after the end is needed for the energy at the end

OnLevel = Callable[[Device, ScoreLevel, bool], None]


def run_bench(config: BenchConfig, report: Callable[[str], None], on_level: OnLevel) -> tuple[RunFolder, ScoredRun]:
    """Run everything, write the run folder, and return folder and result. Engines and sampler always end.

    `report` takes a line for the user. An interruption or a failing engine leaves a partial result that says so. Raises
    ConfigError for a reference that cannot be read, and for GPUs that do not exist or that another bench measures.
    Raises EngineError if no engine started.
    """
    # Both refuse bad input before minutes of measuring.
    reference = None if config.reference is None else find_reference(config.reference)
    plan = make_plan(config)
    started, clock_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    fingerprint = take_fingerprint(config.arguments)
    stop_event = threading.Event()
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.create_or_remove(config.out, "bench"))
        monitor = _start_monitor(config, folder, stack)
        devices = (
            [_cpu(config, fingerprint.cpu)] if monitor is None else _gpus(config, monitor, fingerprint.memory_bytes)
        )
        stack.enter_context(claim(devices))
        levels = ladder_concurrencies(monitor is None)
        runs = [
            stack.enter_context(_device_run(config, plan, device, levels, folder, stop_event, on_level))
            for device in devices
        ]
        report(_announcement(config, plan, devices))
        with _set_on_interrupt(stop_event):
            _run_concurrently(runs, DeviceRun.start)
            if stop_event.is_set():
                raise KeyboardInterrupt
            if all(run.failure for run in runs):
                raise EngineError(f"{runs[0].device.label}: {runs[0].failure}")
            surroundings_monitor = SurroundingsMonitor()
            surroundings_monitor.start()
            began_s = time.monotonic()
            _run_concurrently(runs, lambda run: run.run(began_s))
            cautions = machine_cautions(surroundings_monitor.finish())
            is_interrupted = stop_event.is_set()
            recording = _stop_monitor(monitor, began_s)
            stack.close()  # engines and sampler end before the result is written
            result = assemble(
                runs,
                recording,
                plan,
                began_s=began_s,
                concurrencies=levels,
                planned_s=config.duration_s,
                started=started,
                duration_s=time.monotonic() - clock_s,
                fingerprint=fingerprint,
                interrupted=is_interrupted,
            )
            result.notes += [f"{text.capitalize()}: the score may be too low." for text in cautions.values()]
            result.score.references = ratios(result.score, reference)
            save_document(folder.result_path, result)
    return folder, result


def ladder_concurrencies(is_cpu: bool) -> tuple[int, ...]:
    """Return the concurrency of each level."""
    return workload.CPU_LEVELS if is_cpu else workload.LEVELS


@contextmanager
def claim(devices: Sequence[Device]) -> Iterator[None]:
    """Lock the GPUs against other benchmarks on this machine: concurrent scores on one GPU would be wrong.

    A claim is a name in Linux's abstract socket namespace, which leaves no file and ends with the process. Containers
    with their own network namespace do not see it. Raises ConfigError for a GPU that another benchmark has locked.
    """
    with ExitStack() as stack:
        for device in devices:
            if device.uuid is None:
                continue
            lock_socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                lock_socket.bind(f"\0meltcore bench {device.uuid}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise ConfigError(f"{device.label} is being measured by another meltcore bench") from error
        yield


def _start_monitor(config: BenchConfig, folder: RunFolder, stack: ExitStack) -> Monitor | None:
    """Start and return the GPU monitor, or None for a run on the CPU. Raises ConfigError without an NVIDIA driver."""
    if config.cpu:
        return None
    settings = SamplerSettings(
        path=str(folder.path / SAMPLES_FILE), gpus=config.gpus, split_mig=True, interval_s=INTERVAL_S
    )
    try:
        return stack.enter_context(Monitor(settings))
    except NoDriverError as error:
        raise ConfigError(f"{error}; --cpu measures on the CPU") from error


def _gpus(config: BenchConfig, monitor: Monitor, host_bytes: int) -> list[Device]:
    samples = _first_samples(monitor)
    devices = []
    for gpu_index, info in enumerate(monitor.start.gpus):
        gpu_samples = [sample for sample in samples if sample.gpu == gpu_index]
        memory_bytes, in_use_bytes = total_memory_bytes(gpu_samples, host_bytes), memory_in_use_bytes(gpu_samples)
        if memory_bytes is None:
            raise ConfigError(f"{info.label}: NVML does not report its memory, which the engine needs")
        devices.append(
            Device(
                name=info.name,
                label=info.label,
                monitor_index=gpu_index,
                uuid=info.uuid,
                memory_bytes=memory_bytes,
                memory_in_use_bytes=in_use_bytes,
                settings=workload.gpu_settings(
                    config.model, memory_bytes, config.precision, in_use_bytes=in_use_bytes or 0
                ),
            )
        )
    return devices


def _first_samples(monitor: Monitor) -> list[Sample]:
    """Wait for at least one sample of each GPU, up to the time limit, and return the samples."""
    samples: list[Sample] = []
    end_s = time.monotonic() + _FIRST_SAMPLE_LIMIT_S
    while len({sample.gpu for sample in samples}) < len(monitor.start.gpus) and time.monotonic() < end_s:
        time.sleep(INTERVAL_S / 2)
        samples += monitor.new_samples()
    return samples


def _cpu(config: BenchConfig, name: str) -> Device:
    return Device(name=name, label="CPU", settings=workload.cpu_settings(config.model))


def _device_run(
    config: BenchConfig,
    plan: ScorePlan,
    device: Device,
    levels: Sequence[int],
    folder: RunFolder,
    stop_event: threading.Event,
    on_level: OnLevel,
) -> DeviceRun:
    name = "cpu" if device.monitor_index is None else device.monitor_index
    return DeviceRun(
        device=replace(device, settings={**device.settings, "max_model_len": plan.context}),
        concurrencies=levels,
        duration_s=config.duration_s,
        log_path=folder.path / f"engine-{name}.log",
        is_interrupted=stop_event.is_set,
        on_level=on_level,
        prompt=plan.prompt,
        grid=plan.grid,
    )


def _announcement(config: BenchConfig, plan: ScorePlan, devices: Sequence[Device]) -> str:
    first = devices[0]
    weights = "random weights" if first.settings.get("load_format") == "dummy" else "its weights"
    names = ", ".join(f"{device.label} ({device.name})" for device in devices)
    model = Path(str(first.settings["model"])).name
    cells = f", {config.sweep_cells} cells" * config.sweep
    return f"{plan.name}: {model} with {weights} on {names}{cells}, about {config.duration_s:.0f} s"


@contextmanager
def _set_on_interrupt(stop_event: threading.Event) -> Iterator[None]:
    """Make Ctrl-C set `stop_event` instead of raising, so that the devices' threads end without losing measurements.

    A second Ctrl-C, or one after the measurement, has no effect. Only the main thread is ever interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, lambda *_: stop_event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _run_concurrently(runs: Sequence[DeviceRun], function: Callable[[DeviceRun], None]) -> None:
    """Call `function` on all devices concurrently, except devices that have failed."""
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(function, run) for run in runs if run.failure is None]
    for future in futures:
        future.result()


def _stop_monitor(monitor: Monitor | None, began_s: float) -> MonitoredRun | None:
    if monitor is None:
        return None
    ended_s = time.monotonic()
    time.sleep(_LAST_SAMPLES_S)
    monitor.stop()
    return MonitoredRun(read_recording(monitor.path), (began_s, ended_s))
