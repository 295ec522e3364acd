"""A scripted node: fake GPUs, a clock that only programs advance, and programs with scripted results.

The fake GPUs and the samples use the node's clock, so a scripted change during a check happens during that check.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fake_gpu import FakeGpu, FakeNvml

from meltcore.common.gpus.reader import GpuReader, Sample
from meltcore.common.gpus.select import GpuDevice, select_gpus
from meltcore.common.gpus.xid import XidWatch
from meltcore.common.process import CompletedRun
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, decode_job, encode
from meltcore.measure.node.node import Node, Telemetry

_STEPS = 4  # samples during a short program; a long one is sampled every second

# Values of H200 SXM GPUs, measured or (without a measurement) plausible; the first prefix of a key that matches counts.
H200_VALUES: tuple[tuple[str, float], ...] = (
    ("gemm/bf16/8192x8192", 792.0),
    ("gemm/bf16/4096x4096x", 735.0),
    ("gemm/bf16/4096x14336", 672.0),
    ("gemm/bf16", 691.0),
    ("gemm/fp16", 780.0),
    ("gemm/tf32", 400.0),
    ("gemm/fp8", 1500.0),
    ("memory/copy", 4280.0),
    ("memory/read", 4400.0),
    ("memory/write", 4300.0),
    ("host_load", 90.0),
    ("pulse", 80.0),
    ("patterns", 400.0),
    ("host/host-to-device", 54.5),
    ("host/device-to-host", 55.0),
    ("peers/unidirectional", 386.5),
    ("peers/bidirectional", 775.0),
    ("sustained", 690.0),
    ("corruption", 900.0),
    ("collectives/all_reduce/2/64MiB", 270.0),
    ("collectives/all_reduce/2", 328.0),
    ("collectives", 362.0),
)

# Values of H200 NVL boards whose pairs are joined by six NVLinks each, from a published report of such a node; those
# that it does not state are plausible.
H200_NVL_VALUES: tuple[tuple[str, float], ...] = (
    ("gemm/bf16/8192x8192", 720.0),
    ("gemm/bf16", 620.0),
    ("gemm/fp16", 700.0),
    ("gemm/tf32", 340.0),
    ("gemm/fp8", 1230.0),
    ("peers/unidirectional", 133.26),
    ("peers/bidirectional", 264.0),
    ("sustained", 600.0),
    ("collectives/all_reduce/2/4MiB", 14.29),
    ("collectives/all_reduce/2", 109.4),
    ("collectives", 91.0),
    *H200_VALUES,
)

HEALTHY_HOST = {
    "/proc/1/stat": "1 (init) S 0 1",
    "/proc/77/stat": "77 (kworker/u8:1 (x)) I 2 0",
    "/sys/class/nvme/nvme0/state": "live\n",
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    "/sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    "/sys/class/infiniband/mlx5_1/ports/1/phys_state": "3: Disabled\n",
}

Measure = Callable[[ProbeRequest, tuple[int, ...]], ProbeResult | None]
Program = Callable[[Sequence[str], Mapping[str, str]], CompletedRun]


def h200_nvl_board(visible: int = 2) -> list[FakeGpu]:
    """Returns the first `visible` GPUs of a board of four H200 NVL: 18 NVLinks each, six to every other GPU."""
    bus_ids = [f"0000:{index + 1:02x}:00.0" for index in range(4)]
    return [
        FakeGpu(
            name="NVIDIA H200 NVL",
            uuid=f"GPU-{index:08d}-nvl",
            bus_id=bus_ids[index],
            readings={"sm_clock_max_mhz": 1785, "power_limit_w": 600, "power_limit_default_w": 600},
            link_peers=[peer_bus_id for peer_bus_id in bus_ids if peer_bus_id != bus_ids[index] for _ in range(6)],
        )
        for index in range(visible)
    ]


def healthy_result(
    request: ProbeRequest, gpus: tuple[int, ...], values: Sequence[tuple[str, float]] = H200_VALUES
) -> ProbeResult:
    """Returns a healthy result, with a spread of a percent between GPUs and between samples."""
    level = next(value for start, value in values if request.key.startswith(start)) * (1 + 0.004 * (sum(gpus) % 4))
    details: dict[str, str | int] = {
        "wrong": 0,
        "compared": 9000,
        "digest": "5eed",
        "bytes": 110 * 2**30,
        "passes": 1,
        "ms": 10_000,
    }
    samples = [level * (1 + 0.003 * step) for step in (-1, 0, 1, 0)]
    return ProbeResult(key=request.key, gpus=gpus, samples=samples, details=details)


@dataclass
class FakeNode(Node):
    """A node without GPUs for tests.

    `measure` returns the result for each target of each probe request, or None for none.

    `program` replaces all programs other than probes. A probe advances the clock by `probe_s`. `hung`: probes that run
    into their limit; `crashed`: probes that end with status 1, with their standard error. Those of `crashed_late` have
    written all results before. The folders of `denied` cannot be read.
    """

    fakes: list[FakeGpu]
    measure: Measure
    program: Program = lambda _command, _environment: CompletedRun(127, b"", b"no such program")
    hung: set[str] = field(default_factory=set)
    crashed: dict[str, str] = field(default_factory=dict)
    crashed_late: set[str] = field(default_factory=set)
    probe_s: float = 2.0
    files: dict[str, str] = field(default_factory=dict)
    denied: tuple[str, ...] = ()
    on_host: bool = True
    clock_error: float | None = 0.01
    log: str | None = "6,1,0,-;Linux version 6.8\n"
    probes: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._now_s = 0.0
        self._telemetry: list[FakeTelemetry] = []
        super().__init__(FakeNvml(self.fakes, clock=self.now_s))

    def gpus(self, requested: str | None = None) -> list[GpuDevice]:
        """Returns the selected GPUs, as of --gpu."""
        return select_gpus(self.nvml, requested, {})

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def read(self, path: Path) -> str | None:
        return self._files().get(str(path))

    def names(self, folder: Path) -> list[str] | None:
        paths = [Path(path).relative_to(folder) for path in self._files() if Path(path).is_relative_to(folder)]
        return None if str(folder) in self.denied else sorted({path.parts[0] for path in paths})

    def _files(self) -> dict[str, str]:
        return {**HEALTHY_HOST, **self.files}

    def sees_host_processes(self) -> bool:
        return self.on_host

    def clock_error_s(self) -> float | None:
        return self.clock_error

    def kernel_log(self) -> str | None:
        return self.log

    def run(self, command: Sequence[str], stdin: bytes, environment: Mapping[str, str], limit_s: float) -> CompletedRun:
        if "meltcore.measure.node.certify.probe" not in command:
            self._advance(self.probe_s)
            return self.program(command, environment)
        name = command[-1]
        self.probes.append((name, dict(environment)))
        hung = name in self.hung
        self._advance(limit_s if hung else self.probe_s)
        if name in self.crashed:
            return CompletedRun(1, b"", self.crashed[name].encode())
        requests = [] if hung else decode_job(stdin).requests
        results = (self.measure(request, target) for request in requests for target in request.targets())
        lines = b"".join(encode(result) + b"\n" for result in results if result is not None)
        return CompletedRun(None if hung else int(name in self.crashed_late), lines, b"waiting\n" if hung else b"")

    def telemetry(self, path: Path, gpus: Sequence[GpuDevice], interval_s: float) -> Telemetry:
        self._telemetry.append(FakeTelemetry(self, gpus))
        return self._telemetry[-1]

    def _advance(self, seconds: float) -> None:
        steps = max(_STEPS, round(seconds))
        for step in range(steps + 1):
            for telemetry in self._telemetry:
                telemetry.take()
            if step < steps:
                self._now_s += seconds / steps


class FakeTelemetry:
    """Samples the scripted GPUs in this process whenever the node's clock advances."""

    def __init__(self, node: FakeNode, gpus: Sequence[GpuDevice]) -> None:
        self._node = node
        self._readers = [GpuReader(node.nvml, gpu) for gpu in gpus]
        self._watch = XidWatch(node.nvml, gpus)
        self._samples: list[list[Sample]] = [[] for _ in gpus]

    def take(self) -> None:
        """Takes a sample of each GPU."""
        xids = self._watch.take()
        for position, reader in enumerate(self._readers):
            sample = reader.read(position, xids[position])
            sample.t_s = self._node.now_s()
            self._samples[position].append(sample)

    def since(self, from_s: float) -> list[list[Sample]] | None:
        """Returns the samples of each GPU since a time."""
        return [[sample for sample in gpu_samples if sample.t_s >= from_s] for gpu_samples in self._samples]

    def close(self) -> None:
        """Does nothing."""
