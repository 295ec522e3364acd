"""Computes the expectation of each metric, from topology, shipped priors and the user's baseline.

The strictest expectation counts. Topology expectations need no table of GPU types: links times speed, SMs times clock,
PCIe generation and width, bus width times memory clock. The constants here are the fractions of such ceilings that
healthy GPUs reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.node import Certificate, Expectation, GpuSnapshot

# Healthy machines differ by a few percent; acceptance floors of cloud providers are 85 to 90 %.
PRIOR_FLOOR = 0.90
# GEMMs run at the power limit, where GPUs of one type differ more: most H200s reach 662 to 688 TFLOP/s at 8192^3,
# others 769 and 791-799, and an independent program measures the same on each of them (2026-11).
GEMM_FLOOR = 0.80
# For the user's own node, between runs.
BASELINE_FLOOR = 0.95

# Dense floating-point operations per clock and SM with float32 accumulation (NVIDIA's architecture papers), by compute
# capability. GeForce GPUs accumulate in float32 at half the rate.
_BF16_PER_CLOCK: dict[str, int] = {"8.0": 2048, "9.0": 4096}
_GEFORCE_BF16_PER_CLOCK: dict[str, int] = {"8.6": 512, "8.9": 512, "12.0": 512}
_RELATIVE_RATE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}
# Dense bf16 TFLOP/s of data sheets, by NVML's exact name: boards of one chip differ in clock and power. A name that is
# not here has no data-sheet peak, and never that of another type.
BF16_PEAKS: dict[str, float] = {
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 836.0,
    "NVIDIA H100 80GB HBM3": 989.4,
}
# Data sheets count at a lower clock than NVML's maximum, which the fractions below refer to (H200 SXM).
_OVER_DATA_SHEET = 1980 / 1830

# H200 SXM: 791-799 of 1,070 TFLOP/s at 8192^3 and 667-695 at model shapes; power keeps it below its maximum clock.
_GEMM_FRACTION = {"square": 0.70, "model": 0.60}
_FP8_FRACTION = {"square": 0.66, "model": 0.50}

# H200 SXM: copy 4,270-4,290 and read 4,380-4,450 of 4,917 GB/s.
_MEMORY_FRACTION = {"copy": 0.85, "read": 0.87, "write": 0.80}

# GB/s per lane in one direction, after line coding (PCI-SIG), by PCIe generation.
_PCIE_LANE_GBPS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_PCIE_FRACTION = 0.86  # H200 SXM: 53-55 of 63 GB/s

_PEER_FRACTION = 0.81  # of links x speed: 386-396 of 478 by NVSwitch, 133 of 159 by a bridge
# Ring collectives from 1 GiB on: bus bandwidth as a fraction of links x speed, by operation and number of GPUs.
# Two H200 SXM: all-reduce 328-330 of 478 GB/s, all-gather 266, reduce-scatter 277; four: 352-356, and 325-332.
_RING_FRACTION = {("all_reduce", 2): 0.66, ("all_gather", 2): 0.55, ("reduce_scatter", 2): 0.57}
_MULTI_GPU_RING_FRACTION = {"all_reduce": 0.74, "all_gather": 0.69, "reduce_scatter": 0.69}


# --- topology --------------------------------------------------------------------------------------------------------


def gemm_ceiling(gpu: GpuSnapshot, dtype: str) -> float | None:
    """Return the TFLOP/s of a GPU with every SM at the maximum clock.

    Returns None if a fact is missing, or if the architecture's rate is unknown.
    """
    sms, clock_mhz = gpu.number("sm_count"), gpu.number("sm_clock_max_mhz")
    rates = _GEFORCE_BF16_PER_CLOCK if "GeForce" in gpu.name else _BF16_PER_CLOCK
    rate = rates.get(str(gpu.facts.get("compute_capability")))
    if sms is None or clock_mhz is None or rate is None:
        return None
    return sms * clock_mhz * 1e6 * rate * _RELATIVE_RATE[dtype] / 1e12


def data_sheet_peak(name: str, dtype: str) -> float | None:
    """Return the dense TFLOP/s of exactly this GPU type by its data sheet, or None if the table lacks the type."""
    peak = BF16_PEAKS.get(name)
    return None if peak is None else peak * _RELATIVE_RATE[dtype]


def gemm_expectation(gpu: GpuSnapshot, dtype: str, shape: str) -> Expectation | None:
    """Return the expected TFLOP/s, by data sheet or else by the GPU's own SMs and clock.

    `shape` is "square" or "model". Returns None if the SMs, the clock or the architecture are unknown.
    """
    fraction = (_FP8_FRACTION if dtype == "fp8" else _GEMM_FRACTION)[shape]
    ceiling, peak = gemm_ceiling(gpu, dtype), data_sheet_peak(gpu.name, dtype)
    if ceiling is None or peak is None:  # also of a known type whose SMs or clock cannot be read
        return _topology(ceiling, fraction, "SMs x maximum clock", GEMM_FLOOR)
    return _topology(peak, fraction * _OVER_DATA_SHEET, f"data sheet of {gpu.name}", GEMM_FLOOR)


def memory_expectation(gpu: GpuSnapshot, operation: str) -> Expectation | None:
    """Return the expected GB/s of device memory, or None if a fact is missing.

    `operation` is "copy", "read" or "write".
    """
    bits, clock_mhz = gpu.number("memory_bus_bits"), gpu.number("memory_clock_max_mhz")
    ceiling = None if bits is None or clock_mhz is None else bits / 8 * clock_mhz * 2 / 1e3
    return _topology(ceiling, _MEMORY_FRACTION[operation], "bus width x memory clock")


def host_expectation(gpu: GpuSnapshot) -> Expectation | None:
    """Return the expected GB/s between host and device in one direction, or None if a fact is missing."""
    generation, width = gpu.number("pcie_generation_max"), gpu.number("pcie_width_max")
    lane_gbps = None if generation is None else _PCIE_LANE_GBPS.get(int(generation))
    ceiling = None if lane_gbps is None or width is None else lane_gbps * width
    return _topology(ceiling, _PCIE_FRACTION, f"PCIe {generation:g} x {width:g}" if ceiling else "")


def peer_expectation(link_gbps: float | None, links: int, directions: int) -> Expectation | None:
    """Return the expected GB/s between two GPUs, or None if `link_gbps` is None.

    `link_gbps` is the sum over the links between the two GPUs in one direction.
    """
    ceiling = None if link_gbps is None else link_gbps * directions
    return _topology(ceiling, _PEER_FRACTION, f"{links} NVLinks x speed")


def collective_expectation(link_gbps: float | None, operation: str, gpus: int) -> Expectation | None:
    """Return the expected bus bandwidth of a ring in GB/s.

    `link_gbps` is the lowest speed between neighbors of the ring, in GB/s. Returns None if it is None, and for an
    all-to-all, which is no ring and was not measured.
    """
    fraction = _RING_FRACTION.get((operation, gpus), _MULTI_GPU_RING_FRACTION.get(operation))
    if fraction is None:
        return None
    return _topology(link_gbps, fraction, "NVLinks x speed, ring")


def _topology(
    ceiling: float | None, fraction: float, basis: str, floor_fraction: float = PRIOR_FLOOR
) -> Expectation | None:
    if ceiling is None or ceiling <= 0:
        return None
    return Expectation(
        source="topology",
        value=fraction * ceiling,
        floor=floor_fraction * fraction * ceiling,
        basis=f"{basis} = {ceiling:.0f}, {100 * fraction:.0f} % of it",
    )


# --- priors ----------------------------------------------------------------------------------------------------------

_MEASURED_SOURCE = "measured on H200 SXM nodes, torch 2.11, driver 580, 2026-11-20"
_MAMF = "ml-engineering, MAMF table (2026-08): 794.5 at the best shape, taken at 0.9 for this one"
_MAMF_FP8 = "ml-engineering, MAMF table (2026-08): 1,453 at the best shape"
_NVBANDWIDTH = "nvbandwidth on 8 x H200 SXM, vendor's published table"
_NCCL_TESTS = "nccl-tests on 8 x H200 SXM, ring without NVLS"
_NVL_SOURCE = "published 4 x H200 NVL node report (2026): its own test of an NV6 pair"
_RTX_5090_SOURCE = "torch-performance-test-data issues 15, 96, 124 (2025-2026): the lowest of three cards"


@dataclass(frozen=True)
class Prior:
    """A published or measured value of a healthy GPU, with its source."""

    value: float
    source: str


_HOPPER_SXM_LINKS = {
    "peers/unidirectional": Prior(386.0, f"{_MEASURED_SOURCE}: 386-387; nvbandwidth 396"),
    "peers/bidirectional": Prior(772.0, "twice the unidirectional value; nvbandwidth 784"),
    "collectives/all_reduce/2/1GiB": Prior(328.0, _MEASURED_SOURCE),
    "collectives/all_reduce/2/64MiB": Prior(269.0, _MEASURED_SOURCE),
    "collectives/all_reduce/4/4GiB": Prior(355.0, f"{_NCCL_TESTS}: 363 at 8 GiB"),
    "collectives/all_reduce/8/4GiB": Prior(360.0, f"{_NCCL_TESTS}: 367 at 16 GiB"),
    "collectives/all_gather/8/4GiB": Prior(355.0, f"{_NCCL_TESTS}: 361"),
    "collectives/reduce_scatter/8/4GiB": Prior(355.0, f"{_NCCL_TESTS}: 363"),
}

# By NVML's exact name of the GPU type and the key of the row. Other types have topology and baseline only.
PRIORS: dict[str, dict[str, Prior]] = {
    "NVIDIA H200": {
        "gemm/bf16/8192x8192x8192": Prior(780.0, f"{_MEASURED_SOURCE}: 791-799; 662 to 769 on others"),
        "gemm/bf16/4096x4096x4096": Prior(730.0, f"{_MEASURED_SOURCE}: 726-741"),
        "gemm/bf16/16384x16384x8192": Prior(690.0, f"{_MEASURED_SOURCE}: 688-695"),
        "gemm/bf16/4096x14336x4096": Prior(670.0, f"{_MEASURED_SOURCE}: 667-678"),
        "gemm/fp8/8192x8192x8192": Prior(1453.0, f"{_MEASURED_SOURCE}: 1,498-1,511; {_MAMF_FP8}"),
        "memory/copy": Prior(4270.0, f"{_MEASURED_SOURCE}: 4,270-4,290, read and write counted"),
        "memory/read": Prior(4380.0, f"{_MEASURED_SOURCE}: 4,380-4,450"),
        "host/host-to-device": Prior(54.0, f"{_MEASURED_SOURCE}: 53-55"),
        "host/device-to-host": Prior(55.0, _MEASURED_SOURCE),
        "sustained/bf16": Prior(690.0, f"{_MEASURED_SOURCE}: 16384x16384x8192, the most power-hungry shape"),
        **_HOPPER_SXM_LINKS,
    },
    "NVIDIA H200 NVL": {
        "gemm/bf16/8192x8192x8192": Prior(720.0, _NVL_SOURCE),
        "peers/unidirectional": Prior(133.0, _NVL_SOURCE),
        "collectives/all_reduce/2/1GiB": Prior(109.0, _NVL_SOURCE),
    },
    "NVIDIA H100 80GB HBM3": {
        "gemm/bf16/8192x8192x8192": Prior(715.0, _MAMF),
        "host/device-to-host": Prior(52.8, "nvbandwidth issue 24 (2024): 52.8 on all eight GPUs of a node"),
        **_HOPPER_SXM_LINKS,
    },
    "NVIDIA GeForce RTX 5090": {
        "gemm/bf16/8192x8192x8192": Prior(234.0, _RTX_5090_SOURCE),
        "gemm/fp16/8192x8192x8192": Prior(223.0, _RTX_5090_SOURCE),
        "gemm/tf32/8192x8192x8192": Prior(114.0, _RTX_5090_SOURCE),
    },
}


def shipped_expectation(gpus: Sequence[GpuSnapshot], key: str) -> Expectation | None:
    """Return the shipped expectation, or None for MIG devices, for GPUs of several types, and for an unknown type."""
    names = {gpu.name for gpu in gpus}
    if len(names) != 1 or any(gpu.mig for gpu in gpus):
        return None
    published = PRIORS.get(names.pop(), {}).get(key)
    if published is None:
        return None
    floor = (GEMM_FLOOR if is_power_limited(key) else PRIOR_FLOOR) * published.value
    return Expectation(source="prior", value=published.value, floor=floor, basis=published.source)


# --- baseline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A node's own values from an earlier certificate: `values[key][uuids]`, with the UUIDs joined by "+".

    `medians[key]` is used for other GPUs whose type is in `gpu_types`.
    """

    taken: str
    gpu_types: list[str]
    values: dict[str, dict[str, float]]
    medians: dict[str, float]

    def expectation(self, gpus: Sequence[GpuSnapshot], key: str) -> Expectation | None:
        """Return the expectation of `gpus` for the metric `key`, or None if the baseline has no value."""
        value = self.values.get(key, {}).get("+".join(gpu.uuid for gpu in gpus))
        basis = f"the same GPUs on {self.taken}"
        if value is None and {gpu.name for gpu in gpus} <= set(self.gpu_types):
            value, basis = self.medians.get(key), f"median of the baseline's GPUs on {self.taken}"
        if value is None:
            return None
        return Expectation(source="baseline", value=value, floor=BASELINE_FLOOR * value, basis=basis)


def make_baseline(certificate: Certificate) -> Baseline:
    """Return a baseline of the values that passed, were recorded, or had no expectation.

    Raises ConfigError for a certificate that FAILs: a faulty node is no reference.
    """
    if certificate.verdict == "FAIL":
        raise ConfigError(
            f"the certificate of {certificate.started} says FAIL and cannot be a baseline: fix the node first"
        )
    values: dict[str, dict[str, float]] = {}
    for row in (row for check in certificate.checks for row in check.rows):
        is_usable = row.verdict in ("PASS", "RECORDED") or (row.verdict == "UNKNOWN" and not row.expectations)
        if is_usable and row.measured is not None:
            uuids = "+".join(certificate.snapshot.gpus[gpu].uuid for gpu in row.gpus)
            values.setdefault(row.key, {})[uuids] = row.measured
    return Baseline(
        taken=certificate.started,
        gpu_types=sorted({gpu.name for gpu in certificate.snapshot.gpus}),
        values=values,
        medians={key: median(measured.values()) for key, measured in values.items()},
    )


# --- all -------------------------------------------------------------------------------------------------------------


def is_power_limited(key: str) -> bool:
    """Return whether a metric is measured at the power limit, where GPUs of one type differ most."""
    return key.startswith(("gemm/", "sustained/"))


def strictest_expectation(expectations: Sequence[Expectation]) -> Expectation | None:
    """Return the expectation with the highest floor, or None without expectations.

    A slow node's baseline lowers no limit.
    """
    return max(expectations, key=lambda expectation: expectation.floor, default=None)


def is_usable(value: float | None) -> bool:
    """Return whether a value is a plausible speed: finite and above zero."""
    return value is not None and math.isfinite(value) and value > 0
