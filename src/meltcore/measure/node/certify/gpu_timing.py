"""Times GEMMs and other GPU work with CUDA events. Only probes may import this module, as it imports torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_cuda: Any = torch.cuda  # Event and Stream have no annotations
GROUP_S = 0.05
WARMUP_S = 0.3  # clocks rise and settle; the first collectives and copies allocate
MAX_LAUNCHES = 1000

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp8": torch.bfloat16}
# Consecutive GEMMs read different buffers that together exceed every L2 cache (50 to 126 MB).
_ROTATED_BYTES = 256 * 2**20
_MAX_BUFFERS = 16

Launch = Callable[[int], object]


def measure_rates(
    devices: Sequence[int],
    launch: Launch,
    work: float,
    seconds: float,
    launch_group_s: float = GROUP_S,
    uses_graph: bool = False,
    warmup_s: float | None = None,
    agree: Callable[[float], float] | None = None,
    max_launches: int = MAX_LAUNCHES,
) -> list[list[float]]:
    """Return the work per second of each device: one sample per `launch_group_s`, over `seconds`.

    `launch(device)` enqueues `work` once on the device's current stream. Several launches form a group, at most
    `max_launches` of them, which is timed as a whole. With `uses_graph` a group is captured once and replayed, so that
    the launch overhead is not measured; `launch` must then allocate nothing. `agree` maps the time of one launch to a
    value that all ranks of a collective share, since all must launch equally often.
    """
    launch_s = max(_launch_s(device, launch) for device in devices)
    if agree is not None:
        launch_s = agree(launch_s)
    count = max(1, min(max_launches, round(launch_group_s / launch_s)))
    groups = {
        device: _capture_graph(device, launch, count) if uses_graph else _launch_loop(device, launch, count)
        for device in devices
    }
    _time_groups(devices, groups, max(1, round((WARMUP_S if warmup_s is None else warmup_s) / (count * launch_s))))
    times = _time_groups(devices, groups, max(4, round(seconds / (count * launch_s))))
    return [[count * work / time_s for time_s in times[device]] for device in devices]


def _launch_s(device: int, launch: Launch) -> float:
    with torch.cuda.device(device):
        for _ in range(3):
            launch(device)
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            launch(device)
        end.record()
        end.synchronize()
        return float(max(1e-6, start.elapsed_time(end) / 5e3))


def _launch_loop(device: int, launch: Launch, count: int) -> Callable[[], None]:
    def launch_group() -> None:
        for _ in range(count):
            launch(device)

    return launch_group


def _capture_graph(device: int, launch: Launch, count: int) -> Callable[[], None]:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A stream of this GPU: torch's default capture stream stays on the GPU that captured first, and a capture for
        # another GPU would be empty. "thread_local": NCCL's watchdog threads query events during the capture.
        with torch.cuda.graph(graph, stream=_cuda.Stream(), capture_error_mode="thread_local"):
            for _ in range(count):
                launch(device)
        return graph.replay


def _time_groups(devices: Sequence[int], groups: dict[int, Callable[[], None]], count: int) -> dict[int, list[float]]:
    """Run each device's group of launches `count` times. Return the seconds of every run by CUDA events, by device.

    The time that a device idles while others are slower does not count. At most two groups are in flight, so that
    a stop takes effect quickly.
    """
    events: dict[int, list[tuple[Any, Any]]] = {device: [] for device in devices}
    for index in range(count):
        for device in devices:
            with torch.cuda.device(device):
                start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
                start.record()
                groups[device]()
                end.record()
                events[device].append((start, end))
        if index >= 1:
            for device in devices:
                events[device][index - 1][1].synchronize()
    for device in devices:
        torch.cuda.synchronize(device)
    return {device: [start.elapsed_time(end) / 1e3 for start, end in pairs] for device, pairs in events.items()}


def random_matrix(rows: int, columns: int, dtype: str, device: int, seed: int) -> torch.Tensor:
    """Return [rows, columns] normal values from the device's counter-based generator: equal on GPUs of one type.

    Zeros would draw less power and make a GPU look up to 13 % faster.
    """
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(seed)
    values = torch.randn(rows, columns, device=f"cuda:{device}", dtype=torch.float32, generator=generator)
    return values.to(_DTYPES[dtype])


def gemm_launcher(dtype: str, m: int, n: int, k: int, device: int) -> Callable[[], torch.Tensor]:
    """Return a function that enqueues one GEMM [m, k] x [k, n] on the next of its buffers and returns the output.

    The function allocates nothing. fp8 takes e4m3 inputs with one scale each and writes bf16.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    pair_bytes = (m * k + k * n) * (4 if dtype == "tf32" else 1 if dtype == "fp8" else 2)
    count = max(1, min(_MAX_BUFFERS, -(-_ROTATED_BYTES // pair_bytes)))
    lhs = [random_matrix(m, k, dtype, device, seed) for seed in range(count)]
    rhs = [random_matrix(n, k, dtype, device, 1000 + seed).t() for seed in range(count)]
    out = torch.empty(m, n, device=f"cuda:{device}", dtype=_DTYPES[dtype])
    index = 0
    if dtype == "fp8":
        unit_scale = torch.ones((), device=f"cuda:{device}")
        lhs = [lhs_buffer.to(torch.float8_e4m3fn) for lhs_buffer in lhs]
        rhs = [rhs_buffer.t().to(torch.float8_e4m3fn).t() for rhs_buffer in rhs]

    def launch() -> torch.Tensor:
        nonlocal index
        lhs_buffer, rhs_buffer = lhs[index], rhs[index]
        index = (index + 1) % count
        if dtype == "fp8":
            torch._scaled_mm(
                lhs_buffer, rhs_buffer, unit_scale, unit_scale, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
            )
        else:
            torch.mm(lhs_buffer, rhs_buffer, out=out)
        return out

    return launch


def gemm_rates(
    devices: Sequence[int], dtype: str, shape: tuple[int, int, int], seconds: float, launch_group_s: float = GROUP_S,
    uses_graph: bool = False,
) -> list[list[float]]:  # fmt: skip
    """Return TFLOP/s samples of GEMMs of shape (m, n, k), on all devices concurrently."""
    m, n, k = shape
    launchers = {device: gemm_launcher(dtype, m, n, k, device) for device in devices}

    def launch(device: int) -> None:
        launchers[device]()

    return measure_rates(
        devices, launch, 2 * m * n * k / 1e12, seconds, launch_group_s=launch_group_s, uses_graph=uses_graph
    )
