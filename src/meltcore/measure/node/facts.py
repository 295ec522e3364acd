"""Defines the facts of a GPU in a snapshot: their keys, names, units, required features and read functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pynvml
from pynvml import NVMLError

from meltcore.common.gpus.driver import Nvml
from meltcore.common.gpus.gpu_types import Feature
from meltcore.common.gpus.reader import absent_value
from meltcore.common.gpus.select import GpuDevice
from meltcore.measure.documents.node import UNKNOWN, Fact

# fixed: a change is a difference between snapshots. counter: growth is one. reading: varies all the time, never one.
FactType = Literal["fixed", "counter", "reading"]

# FP32 units per SM by compute capability (CUDA programming guide, "arithmetic instructions").
_CORES_PER_SM = {(8, 0): 64, (7, 0): 64, (7, 5): 64}
_CORES_PER_SM_DEFAULT = 128

_TOPOLOGY_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "SAME",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


@dataclass(frozen=True)
class FactSpec:
    """One fact. `read(nvml, handle)` returns its value for a GPU.

    `feature` is the feature that a GPU type needs for the fact, or None.
    """

    key: str
    name: str
    unit: str
    type: FactType
    read: Callable[[Nvml, Any], Fact]
    feature: Feature | None = None


def _num_sms(nvml: Nvml, device: Any) -> int:
    return nvml.cores(device) // _CORES_PER_SM.get(nvml.compute_capability(device), _CORES_PER_SM_DEFAULT)


FACTS: tuple[FactSpec, ...] = (
    FactSpec(
        "memory_bytes", "memory", "bytes", "fixed", lambda nvml, device: nvml.memory_bytes(device)[1], "own_memory"
    ),
    FactSpec("vbios", "VBIOS", "", "fixed", lambda nvml, device: nvml.vbios(device)),
    FactSpec("inforom", "infoROM", "", "fixed", lambda nvml, device: nvml.inforom(device)),
    FactSpec("fabric_state", "fabric state", "", "fixed", lambda nvml, device: nvml.fabric(device)[0]),
    FactSpec("fabric_status", "fabric status", "", "fixed", lambda nvml, device: nvml.fabric(device)[1]),
    FactSpec("fabric_health", "fabric health, bit mask", "", "fixed", lambda nvml, device: nvml.fabric(device)[2]),
    FactSpec("bus_id", "PCI bus id", "", "fixed", lambda nvml, device: nvml.bus_id(device)),
    FactSpec(
        "compute_capability",
        "compute capability",
        "",
        "fixed",
        lambda nvml, device: ".".join(map(str, nvml.compute_capability(device))),
    ),
    FactSpec("sm_count", "SMs", "", "fixed", _num_sms),
    FactSpec(
        "sm_clock_max_mhz", "SM clock, maximum", "MHz", "fixed", lambda nvml, device: nvml.sm_clock_max_mhz(device)
    ),
    FactSpec(
        "memory_clock_max_mhz",
        "memory clock, maximum",
        "MHz",
        "fixed",
        lambda nvml, device: nvml.memory_clock_max_mhz(device),
        "own_memory",
    ),
    FactSpec("memory_bus_bits", "memory bus", "bits", "fixed", lambda nvml, device: nvml.memory_bus_bits(device)),
    FactSpec(
        "power_limit_w", "power limit", "W", "fixed", lambda nvml, device: nvml.power_limits_w(device)[0], "power_limit"
    ),
    FactSpec(
        "power_limit_default_w",
        "power limit, default",
        "W",
        "fixed",
        lambda nvml, device: nvml.power_limits_w(device)[1],
        "power_limit",
    ),
    FactSpec("sm_clock_mhz", "SM clock now", "MHz", "reading", lambda nvml, device: nvml.sm_clock_mhz(device)),
    FactSpec(
        "memory_clock_mhz",
        "memory clock now",
        "MHz",
        "reading",
        lambda nvml, device: nvml.memory_clock_mhz(device),
        "own_memory",
    ),
    FactSpec("temperature_c", "temperature", "°C", "reading", lambda nvml, device: nvml.temperature_c(device)),
    FactSpec(
        "pcie_generation", "PCIe generation now", "", "reading", lambda nvml, device: nvml.pcie_link(device)[0], "pcie"
    ),
    FactSpec("pcie_width", "PCIe width now", "lanes", "fixed", lambda nvml, device: nvml.pcie_link(device)[1], "pcie"),
    FactSpec(
        "pcie_generation_max",
        "PCIe generation, slot maximum",
        "",
        "fixed",
        lambda nvml, device: nvml.pcie_link_max(device)[0],
        "pcie",
    ),
    FactSpec(
        "pcie_width_max",
        "PCIe width, slot maximum",
        "lanes",
        "fixed",
        lambda nvml, device: nvml.pcie_link_max(device)[1],
        "pcie",
    ),
    FactSpec(
        "gpu_pcie_generation_max",
        "PCIe generation, GPU maximum",
        "",
        "fixed",
        lambda nvml, device: nvml.gpu_pcie_generation_max(device),
        "pcie",
    ),
    FactSpec("pcie_replays", "PCIe replays", "", "counter", lambda nvml, device: nvml.pcie_replays(device), "pcie"),
    FactSpec("ecc_on", "ECC", "", "fixed", lambda nvml, device: nvml.ecc_mode(device), "ecc"),
    FactSpec(
        "ecc_corrected",
        "ECC corrected since the driver loaded",
        "",
        "counter",
        lambda nvml, device: nvml.ecc_errors(device, is_uncorrected=False),
        "ecc",
    ),
    FactSpec(
        "ecc_uncorrected",
        "ECC uncorrected since the driver loaded",
        "",
        "counter",
        lambda nvml, device: nvml.ecc_errors(device, is_uncorrected=True),
        "ecc",
    ),
    FactSpec(
        "ecc_corrected_lifetime",
        "ECC corrected, lifetime",
        "",
        "counter",
        lambda nvml, device: nvml.ecc_errors(device, is_uncorrected=False, is_lifetime=True),
        "ecc",
    ),
    FactSpec(
        "ecc_uncorrected_lifetime",
        "ECC uncorrected, lifetime",
        "",
        "counter",
        lambda nvml, device: nvml.ecc_errors(device, is_uncorrected=True, is_lifetime=True),
        "ecc",
    ),
    FactSpec(
        "rows_remapped_corrected",
        "rows remapped, correctable",
        "",
        "counter",
        lambda nvml, device: nvml.remapped_rows(device)[0],
        "remapped_rows",
    ),
    FactSpec(
        "rows_remapped_uncorrected",
        "rows remapped, uncorrectable",
        "",
        "counter",
        lambda nvml, device: nvml.remapped_rows(device)[1],
        "remapped_rows",
    ),
    FactSpec(
        "row_remap_pending",
        "row remapping pending",
        "",
        "fixed",
        lambda nvml, device: nvml.remapped_rows(device)[2],
        "remapped_rows",
    ),
    FactSpec(
        "row_remap_failed",
        "row remapping failed",
        "",
        "fixed",
        lambda nvml, device: nvml.remapped_rows(device)[3],
        "remapped_rows",
    ),
    FactSpec(
        "recovery_action",
        "recovery action",
        "",
        "fixed",
        lambda nvml, device: nvml.recovery_action(device),
        "recovery_action",
    ),
    FactSpec("mig_on", "MIG", "", "fixed", lambda nvml, device: nvml.mig_mode(device), "mig"),
    FactSpec("persistence", "persistence mode", "", "fixed", lambda nvml, device: nvml.persistence(device)),
    FactSpec(
        "clock_reasons", "clock reasons, bit mask", "", "reading", lambda nvml, device: nvml.clock_reasons(device)
    ),
    FactSpec("processes", "compute processes", "", "reading", lambda nvml, device: len(nvml.processes(device))),
    FactSpec("nvlinks", "NVLinks", "", "fixed", lambda nvml, device: nvml.nvlinks(device), "nvlink"),
    # The last fact, so that it covers the calls for all others.
    FactSpec("slow_call_s", "slow driver call", "s", "reading", lambda nvml, device: nvml.slow_call_s(device)),
)
FACT_BY_KEY = {fact.key: fact for fact in FACTS}
_MIG_FACTS = ("memory_bytes", "processes")


def read_fact(nvml: Nvml, gpu: GpuDevice, fact: FactSpec) -> Fact:
    """Return the value of a fact, NOT_APPLICABLE if the GPU type lacks the fact, or UNKNOWN if reading failed."""
    try:
        return fact.read(nvml, gpu.handle if fact.key in _MIG_FACTS else gpu.device)
    except NVMLError as error:
        return absent_value(error, gpu.info.gpu_type, fact.feature)


def pcie_path(nvml: Nvml, first: GpuDevice, second: GpuDevice) -> str:
    """Return the PCIe path between two GPUs in nvidia-smi's terms: PIX, PXB, PHB, NODE, SYS."""
    try:
        level = nvml.common_ancestor(first.device, second.device)
    except NVMLError:
        return UNKNOWN
    return _TOPOLOGY_LEVELS.get(level, f"LEVEL_{level}")
