"""Lists the metrics that the monitor reads, and the names of NVML's clock event reasons."""

from dataclasses import dataclass
from typing import Final, Literal

from meltcore.common.gpus.gpu_types import Feature

Absent = Literal["NOT_APPLICABLE", "UNKNOWN"]
# NVML reports "not supported", and the table of GPU types confirms that the GPU type lacks the feature.
NOT_APPLICABLE: Final = "NOT_APPLICABLE"
# The value should be readable and is not: an old driver, a missing permission, a fault. UNKNOWN never counts as zero.
UNKNOWN: Final = "UNKNOWN"
Value = int | float | Absent

# gauge: a level, summarized by mean and maximum. counter: only grows, summarized by its increase. fixed: one value.
MetricType = Literal["gauge", "counter", "fixed"]


@dataclass(frozen=True)
class GpuMetric:
    """One metric. `feature` is the GPU feature that the metric needs. A health verdict needs each `required` metric."""

    key: str
    name: str
    unit: str
    type: MetricType = "gauge"
    feature: Feature | None = None
    required: bool = False


# NVML's utilization is the fraction of its last window (1/6 to 1 s) in which at least one kernel was resident: one
# thread on one of 132 SMs counts as 100 %, and several samples at 100 ms read the same window. The monitor shows it
# because users expect it; no verdict uses it. `sm_active_percent` is the metric that utilization is often mistaken for.
UTILIZATION_NOTE = "NVML utilization only says that a kernel was resident; it is shown and never judged"

METRICS: tuple[GpuMetric, ...] = (
    GpuMetric("temperature_c", "GPU temperature", "°C"),
    GpuMetric("memory_temperature_c", "memory temperature", "°C", feature="memory_temperature"),
    GpuMetric("power_w", "power", "W"),
    GpuMetric("energy_j", "energy", "J", "counter", "energy"),
    GpuMetric("sm_clock_mhz", "SM clock", "MHz", required=True),
    GpuMetric("memory_clock_mhz", "memory clock", "MHz", feature="own_memory"),
    GpuMetric("sw_thermal_slowdown_s", "software thermal slowdown", "s", "counter"),
    GpuMetric("hw_thermal_slowdown_s", "hardware thermal slowdown", "s", "counter"),
    GpuMetric("hw_power_brake_s", "power brake", "s", "counter"),
    GpuMetric("memory_used_bytes", "memory used", "bytes", feature="own_memory"),
    GpuMetric("memory_total_bytes", "memory", "bytes", "fixed", "own_memory"),
    GpuMetric("ecc_corrected", "ECC errors, corrected", "", "counter", "ecc", required=True),
    GpuMetric("ecc_uncorrected", "ECC errors, uncorrected", "", "counter", "ecc", required=True),
    GpuMetric("pcie_generation", "PCIe generation", "", feature="pcie"),
    GpuMetric("pcie_width", "PCIe width", "lanes", feature="pcie"),
    GpuMetric("pcie_generation_max", "PCIe generation, maximum", "", "fixed", "pcie"),
    GpuMetric("pcie_width_max", "PCIe width, maximum", "lanes", "fixed", "pcie"),
    GpuMetric("pcie_replays", "PCIe replays", "", "counter", "pcie"),
    GpuMetric("nvml_utilization_percent", "NVML utilization", "%", feature="utilization"),
    GpuMetric("sm_active_percent", "SM active", "%", feature="gpm"),
    GpuMetric("sm_occupancy_percent", "SM occupancy", "%", feature="gpm"),
    GpuMetric("tensor_percent", "tensor cores", "%", feature="gpm"),
    GpuMetric("dram_bandwidth_percent", "DRAM bandwidth", "%", feature="gpm"),
    GpuMetric("pcie_tx_mib_per_s", "PCIe sent", "MiB/s", feature="gpm"),
    GpuMetric("pcie_rx_mib_per_s", "PCIe received", "MiB/s", feature="gpm"),
    GpuMetric("nvlink_tx_mib_per_s", "NVLink sent", "MiB/s", feature="gpm_nvlink"),
    GpuMetric("nvlink_rx_mib_per_s", "NVLink received", "MiB/s", feature="gpm_nvlink"),
)
METRIC_BY_KEY = {metric.key: metric for metric in METRICS}

GPU_IDLE = "GPU_IDLE"
SW_POWER_CAP = "SW_POWER_CAP"
# Bits of nvmlClocksEventReasons, in the order of the API.
_CLOCK_REASONS: dict[int, str] = {
    0x1: GPU_IDLE,
    0x2: "APPLICATION_CLOCKS",
    0x4: SW_POWER_CAP,
    0x8: "HW_SLOWDOWN",
    0x10: "SYNC_BOOST",
    0x20: "SW_THERMAL_SLOWDOWN",
    0x40: "HW_THERMAL_SLOWDOWN",
    0x80: "HW_POWER_BRAKE",
    0x100: "DISPLAY_CLOCKS",
    0x200: "BOARD_LIMIT",
    0x400: "RELIABILITY",
}
# Reasons that a healthy GPU with enough cooling and power never gives. SW_POWER_CAP is not one of them: every large
# GEMM reaches the power limit by design.
SLOWDOWNS = ("HW_SLOWDOWN", "HW_THERMAL_SLOWDOWN", "HW_POWER_BRAKE", "SW_THERMAL_SLOWDOWN")
# Counters of the time spent slowed down. They also see what happens between two samples.
SLOWDOWN_COUNTERS = ("hw_thermal_slowdown_s", "hw_power_brake_s", "sw_thermal_slowdown_s")


def clock_reason_names(mask: int) -> list[str]:
    """Return the names of the clock event reasons whose bits are set in `mask`. An unknown bit is named REASON_0x..."""
    unnamed = [1 << bit for bit in range(mask.bit_length()) if mask & 1 << bit and 1 << bit not in _CLOCK_REASONS]
    return [name for bit, name in _CLOCK_REASONS.items() if mask & bit] + [f"REASON_{bit:#x}" for bit in unnamed]
