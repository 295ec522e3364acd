"""Every number the monitor reads: its key, unit, kind, and the product feature it hangs on."""

from dataclasses import dataclass
from typing import Final, Literal

from meltcore.hardware.products import Feature

Absent = Literal["NOT_APPLICABLE", "UNKNOWN"]
# NVML says "not supported", and the product table agrees that this product has no such thing. Neutral.
NOT_APPLICABLE: Final = "NOT_APPLICABLE"
# It should be readable and is not: an old driver, a missing permission, a fault. Never taken for zero.
UNKNOWN: Final = "UNKNOWN"
Value = int | float | Absent

# gauge: a level, summed up by its mean and maximum. counter: only grows, summed up by its increase. fixed: one value.
Kind = Literal["gauge", "counter", "fixed"]


@dataclass(frozen=True)
class Metric:
    """`feature`: what a product must have for this to be readable. `judged`: a verdict needs it (health.py)."""

    key: str
    name: str
    unit: str
    kind: Kind = "gauge"
    feature: Feature | None = None
    judged: bool = False


# NVML's utilization is the share of its last window (1/6 to 1 s) with at least one kernel resident. One thread on one
# of 132 SMs makes it 100 %, and at 100 ms the same window is read several times. So it is shown, because people look
# for it, and no verdict uses it. SM activity, below, is what it is taken for.
UTILIZATION_NOTE = "NVML utilization only says that some kernel was resident; it is shown and never judged"

METRICS: tuple[Metric, ...] = (
    Metric("temperature_c", "GPU temperature", "°C"),
    Metric("memory_temperature_c", "memory temperature", "°C", feature="memory_temperature"),
    Metric("power_w", "power", "W"),
    Metric("energy_j", "energy", "J", "counter", "energy"),
    Metric("sm_clock_mhz", "SM clock", "MHz", judged=True),
    Metric("memory_clock_mhz", "memory clock", "MHz", feature="own_memory"),
    Metric("sw_thermal_slowdown_s", "software thermal slowdown", "s", "counter"),
    Metric("hw_thermal_slowdown_s", "hardware thermal slowdown", "s", "counter"),
    Metric("hw_power_brake_s", "power brake", "s", "counter"),
    Metric("memory_used_bytes", "memory used", "bytes", feature="own_memory"),
    Metric("memory_total_bytes", "memory", "bytes", "fixed", "own_memory"),
    Metric("ecc_corrected", "ECC errors, corrected", "", "counter", "ecc", judged=True),
    Metric("ecc_uncorrected", "ECC errors, uncorrected", "", "counter", "ecc", judged=True),
    Metric("pcie_generation", "PCIe generation", "", feature="pcie"),
    Metric("pcie_width", "PCIe width", "lanes", feature="pcie"),
    Metric("pcie_generation_max", "PCIe generation, most", "", "fixed", "pcie"),
    Metric("pcie_width_max", "PCIe width, most", "lanes", "fixed", "pcie"),
    Metric("pcie_replays", "PCIe replays", "", "counter", "pcie"),
    Metric("nvml_utilization_percent", "NVML utilization", "%", feature="utilization"),
    Metric("sm_active_percent", "SM active", "%", feature="gpm"),
    Metric("sm_occupancy_percent", "SM occupancy", "%", feature="gpm"),
    Metric("tensor_percent", "tensor cores", "%", feature="gpm"),
    Metric("dram_bandwidth_percent", "DRAM bandwidth", "%", feature="gpm"),
    Metric("pcie_tx_mib_per_s", "PCIe sent", "MiB/s", feature="gpm"),
    Metric("pcie_rx_mib_per_s", "PCIe received", "MiB/s", feature="gpm"),
    Metric("nvlink_tx_mib_per_s", "NVLink sent", "MiB/s", feature="gpm_nvlink"),
    Metric("nvlink_rx_mib_per_s", "NVLink received", "MiB/s", feature="gpm_nvlink"),
)
BY_KEY = {metric.key: metric for metric in METRICS}
