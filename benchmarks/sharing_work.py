"""Work of gpu_sharing.py: two synthetic kernels, interactive and busy loops of them, streams with a share of SMs."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch.cuda import ExternalStream, Stream

from meltcore.engine.host.step_pacing import StepPacing
from meltcore.settings.config import EngineSharing

Kind = Literal["decode", "gemm"]
WARM_UNITS = 3


class Sizes(NamedTuple):
    """Sizes of the kernels. copy_mb: megabytes read, and written, per launch; gemm: rows and columns of a matrix."""

    copy_mb: int
    copy_buffers: int
    copy_launches: int  # of a unit, what a step is made of
    gemm: int
    gemm_launches: int


FULL = Sizes(copy_mb=32, copy_buffers=32, copy_launches=64, gemm=8192, gemm_launches=4)
SMALL = Sizes(copy_mb=1, copy_buffers=4, copy_launches=8, gemm=256, gemm_launches=2)


class Order(msgspec.Struct, kw_only=True):
    """What one side does from `start_s` (monotonic) on, for `seconds`."""

    role: Literal["interactive", "busy"]
    kind: Kind
    start_s: float
    seconds: float
    steps: int = 1  # of an interactive request, each of one unit; the host waits for each
    units: int = 1  # of a busy step
    rate: float = 0.0  # interactive requests/s, Poisson
    sharing: EngineSharing | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """What one side did: latencies of interactive requests, and units of the kernel with the time that they took."""

    latencies_s: list[float] = []
    units: int = 0
    elapsed_s: float = 0.0
    waited_s: float = 0.0  # of it in step pacing
    unit_s: float = 0.0  # alone, measured before the start


class Work:
    """One of the two kernels, as a CUDA graph of one unit on a stream of its own; on a CPU, launch by launch."""

    def __init__(self, kind: Kind, sizes: Sizes, stream: Stream | None) -> None:
        """Allocate and capture. stream: None on a CPU."""
        self._stream = stream
        device = "cpu" if stream is None else "cuda"
        dtype = torch.float32 if stream is None else torch.bfloat16
        torch.manual_seed(0)
        if kind == "decode":
            elements = sizes.copy_mb * 2**20 // 2
            source = torch.randn(sizes.copy_buffers, elements, device=device).to(dtype)
            target = torch.empty_like(source)
            launches = [
                (torch.add, (source[index % sizes.copy_buffers], 1.0), target[index % sizes.copy_buffers])
                for index in range(sizes.copy_launches)
            ]
        else:
            left, right = (torch.randn(sizes.gemm, sizes.gemm, device=device).to(dtype) for _ in range(2))
            launches = [(torch.mm, (left, right), torch.empty_like(left))] * sizes.gemm_launches
        self._launches: list[tuple[Callable[..., Any], tuple[Any, ...], torch.Tensor]] = launches
        self._graph: torch.cuda.CUDAGraph | None = None
        if stream is not None:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                self._launch()
                stream.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    self._launch()
        for _ in range(WARM_UNITS):
            self.step(1)
        began_s = time.monotonic()
        for _ in range(WARM_UNITS):
            self.step(1)
        self.unit_s = (time.monotonic() - began_s) / WARM_UNITS

    def _launch(self) -> None:
        for function, arguments, out in self._launches:
            function(*arguments, out=out)

    def step(self, units: int) -> None:
        """Compute `units` units and wait for them."""
        if self._graph is None or self._stream is None:
            for _ in range(units):
                self._launch()
            return
        with torch.cuda.stream(self._stream):
            for _ in range(units):
                self._graph.replay()
        self._stream.synchronize()


def run_order(order: Order, work: Work) -> Outcome:
    """Run one side until its time is over."""
    pacing = None if order.sharing is None else StepPacing(order.sharing)
    wait_until(order.start_s)
    run = run_interactive if order.role == "interactive" else run_busy
    outcome = run(order, work, pacing)
    outcome.unit_s = work.unit_s
    outcome.waited_s = 0.0 if pacing is None else pacing.waited_s
    return outcome


def run_interactive(order: Order, work: Work, pacing: StepPacing | None) -> Outcome:
    """Answer requests that arrive at random, one after the other; a latency begins at the arrival."""
    rng = random.Random(1)
    outcome = Outcome()
    arrival_s = order.start_s + rng.expovariate(order.rate)
    while arrival_s < order.start_s + order.seconds and time.monotonic() < order.start_s + 2 * order.seconds:
        wait_until(arrival_s)
        next_s = arrival_s + rng.expovariate(order.rate)
        for step in range(order.steps):
            if pacing is not None:
                pacing.begin_step()
            work.step(1)
            if pacing is not None:
                waits = next_s < time.monotonic()  # the next request is here already
                pacing.end_step(has_work=waits or step + 1 < order.steps)
        outcome.latencies_s.append(time.monotonic() - arrival_s)
        outcome.units += order.steps
        arrival_s = next_s
    outcome.elapsed_s = time.monotonic() - order.start_s
    return outcome


def run_busy(order: Order, work: Work, pacing: StepPacing | None) -> Outcome:
    """Compute one step after another."""
    outcome = Outcome()
    while time.monotonic() < order.start_s + order.seconds:
        units = order.units
        if pacing is not None and (limit_s := pacing.begin_step().limit_s) is not None:
            units = max(1, min(units, int(limit_s / work.unit_s)))
        work.step(units)
        if pacing is not None:
            pacing.end_step(has_work=True)
        outcome.units += units
    outcome.elapsed_s = time.monotonic() - order.start_s
    return outcome


def wait_until(when_s: float) -> None:
    """Sleep, and look at the clock for the last 0.2 ms."""
    while (left_s := when_s - time.monotonic()) > 0:
        time.sleep(max(0.0, left_s - 0.0002))


# --- streams -------------------------------------------------------------------------------------------------------


def plain_stream(priority: int) -> Stream:
    """A stream of this process. priority: -1 goes before 0 where blocks of both are pending."""
    return Stream(priority=priority)


def green_streams(num_sms: int) -> tuple[Stream, Stream, tuple[int, int]]:
    """Streams of two green contexts, the first with `num_sms` SMs, the second with the others, and both numbers.

    Raises RuntimeError with the driver's error where there are none.
    """
    from cuda.bindings import driver

    def call(name: str, *arguments: object) -> Any:
        error, *values = getattr(driver, name)(*arguments)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error.name}")
        return values[0] if len(values) == 1 else values

    torch.zeros(1, device="cuda")  # the primary context
    device = call("cuDeviceGet", torch.cuda.current_device())
    sm_type = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    every_sm = call("cuDeviceGetDevResource", device, sm_type)
    groups, _count, rest = call("cuDevSmResourceSplitByCount", 1, every_sm, 0, num_sms)
    streams = []
    for resource in (groups[0], rest):
        description = call("cuDevResourceGenerateDesc", [resource], 1)
        flag = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = call("cuGreenCtxCreate", description, device, flag)
        flag = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        handle = call("cuGreenCtxStreamCreate", context, flag, 0)
        streams.append(ExternalStream(int(handle)))
    return streams[0], streams[1], (groups[0].sm.smCount, rest.sm.smCount)


# --- processes -----------------------------------------------------------------------------------------------------


def serve_one(device: str, sizes: Sizes) -> None:
    """Run the orders of standard input, one JSON line each, on one stream; print an outcome per line."""
    stream = None if device == "cpu" else plain_stream(0)
    works = {kind: Work(kind, sizes, stream) for kind in ("decode", "gemm")}
    if device == "cpu":
        torch.set_num_threads(1)
    answer({"ready": True})
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        answer(run_order(order, works[order.kind]))


class PairOrder(msgspec.Struct, kw_only=True):
    """Orders for the two threads of a process, and the means: streams alike, with priorities, or of green contexts."""

    means: Literal["streams", "priority", "green"]
    num_sms: int = 0  # of the interactive side's green context
    interactive: Order
    busy: Order


def serve_pair(sizes: Sizes) -> None:
    """Run PairOrders in two threads of this process; print both outcomes per line."""
    sys.setswitchinterval(0.0005)  # a thread that wants the interpreter gets it soon
    streams: dict[str, tuple[Stream, Stream, tuple[int, int]]] = {}
    works: dict[tuple[str, int, str], Work] = {}
    torch.cuda.init()
    answer({"ready": True})
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=PairOrder)
        key = f"{order.means}{order.num_sms}"
        if key not in streams:
            priorities = (-1, 0) if order.means == "priority" else (0, 0)
            streams[key] = (
                green_streams(order.num_sms)
                if order.means == "green"
                else (plain_stream(priorities[0]), plain_stream(priorities[1]), (0, 0))
            )
            works.clear()  # of other streams
        answer(_run_pair(order, key, streams[key], sizes, works))


def _run_pair(
    order: PairOrder,
    key: str,
    streams: tuple[Stream, Stream, tuple[int, int]],
    sizes: Sizes,
    works: dict[tuple[str, int, str], Work],
) -> dict[str, Any]:
    sides = (order.interactive, order.busy)
    for side, each in enumerate(sides):
        if (name := (key, side, each.kind)) not in works:
            works[name] = Work(each.kind, sizes, streams[side])
    start_s = time.monotonic() + 0.05
    with ThreadPoolExecutor(2) as pool:
        runs = {}
        for side, each in enumerate(sides):
            each.start_s = start_s
            runs[each.role] = pool.submit(run_order, each, works[key, side, each.kind])
    return {"sms": streams[2], **{role: run.result() for role, run in runs.items()}}


def answer(value: object) -> None:
    """Print one line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def new_folder() -> Path:
    """A folder of this run, in memory where there is such a place."""
    memory = Path("/dev/shm")  # noqa: S108  # only this user may enter what mkdtemp makes there
    return Path(tempfile.mkdtemp(prefix="sharing-", dir=memory if memory.is_dir() else None))
