"""Every fact of a GPU that a snapshot holds: its key, its words, the feature it hangs on, and how to ask for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pynvml
from pynvml import NVMLError

from meltcore.hardware.nvml import Nvml
from meltcore.hardware.products import Feature, lacks
from meltcore.hardware.select import Gpu
from meltcore.results.snapshot import NOT_APPLICABLE, UNKNOWN, Fact

# fixed: drift when it changes. counter: drift when it grows. moment: a reading that changes all the time, never drift.
Kind = Literal["fixed", "counter", "moment"]

# FP32 lanes of an SM, by compute capability (CUDA programming guide, "arithmetic instructions").
_LANES = {(8, 0): 64, (7, 0): 64, (7, 5): 64}
_LANES_OF_OTHERS = 128

_ANCESTORS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "SAME",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


@dataclass(frozen=True)
class Asked:
    key: str
    name: str
    unit: str
    kind: Kind
    ask: Callable[[Nvml, Any], Fact]
    feature: Feature | None = None


def _sms(nvml: Nvml, board: Any) -> int:
    return nvml.cores(board) // _LANES.get(nvml.compute_capability(board), _LANES_OF_OTHERS)


FACTS: tuple[Asked, ...] = (
    Asked("memory_bytes", "memory", "bytes", "fixed", lambda nvml, gpu: nvml.memory_bytes(gpu)[1], "own_memory"),
    Asked("vbios", "VBIOS", "", "fixed", lambda nvml, gpu: nvml.vbios(gpu)),
    Asked("bus_id", "PCI bus id", "", "fixed", lambda nvml, gpu: nvml.bus_id(gpu)),
    Asked("compute_capability", "compute capability", "", "fixed",
          lambda nvml, gpu: ".".join(map(str, nvml.compute_capability(gpu)))),
    Asked("sm_count", "SMs", "", "fixed", _sms),
    Asked("sm_clock_max_mhz", "SM clock, most", "MHz", "fixed", lambda nvml, gpu: nvml.sm_clock_max_mhz(gpu)),
    Asked("memory_clock_max_mhz", "memory clock, most", "MHz", "fixed",
          lambda nvml, gpu: nvml.memory_clock_max_mhz(gpu), "own_memory"),
    Asked("memory_bus_bits", "memory bus", "bits", "fixed", lambda nvml, gpu: nvml.memory_bus_bits(gpu)),
    Asked("power_limit_w", "power limit", "W", "fixed", lambda nvml, gpu: nvml.power_limits_w(gpu)[0]),
    Asked("power_limit_default_w", "power limit of the product", "W", "fixed",
          lambda nvml, gpu: nvml.power_limits_w(gpu)[1]),
    Asked("sm_clock_mhz", "SM clock now", "MHz", "moment", lambda nvml, gpu: nvml.sm_clock_mhz(gpu)),
    Asked("memory_clock_mhz", "memory clock now", "MHz", "moment",
          lambda nvml, gpu: nvml.memory_clock_mhz(gpu), "own_memory"),
    Asked("temperature_c", "temperature", "°C", "moment", lambda nvml, gpu: nvml.temperature_c(gpu)),
    Asked("pcie_generation", "PCIe generation now", "", "moment", lambda nvml, gpu: nvml.pcie_link(gpu)[0], "pcie"),
    Asked("pcie_width", "PCIe width now", "lanes", "fixed", lambda nvml, gpu: nvml.pcie_link(gpu)[1], "pcie"),
    Asked("pcie_generation_max", "PCIe generation here, most", "", "fixed",
          lambda nvml, gpu: nvml.pcie_link_max(gpu)[0], "pcie"),
    Asked("pcie_width_max", "PCIe width here, most", "lanes", "fixed",
          lambda nvml, gpu: nvml.pcie_link_max(gpu)[1], "pcie"),
    Asked("gpu_pcie_generation_max", "PCIe generation of the GPU", "", "fixed",
          lambda nvml, gpu: nvml.gpu_pcie_generation_max(gpu), "pcie"),
    Asked("pcie_replays", "PCIe replays", "", "counter", lambda nvml, gpu: nvml.pcie_replays(gpu), "pcie"),
    Asked("ecc_on", "ECC", "", "fixed", lambda nvml, gpu: nvml.ecc_mode(gpu), "ecc"),
    Asked("ecc_corrected", "ECC corrected since the driver loaded", "", "counter",
          lambda nvml, gpu: nvml.ecc_errors(gpu, uncorrected=False), "ecc"),
    Asked("ecc_uncorrected", "ECC uncorrected since the driver loaded", "", "counter",
          lambda nvml, gpu: nvml.ecc_errors(gpu, uncorrected=True), "ecc"),
    Asked("ecc_corrected_lifetime", "ECC corrected, lifetime", "", "counter",
          lambda nvml, gpu: nvml.ecc_lifetime(gpu, uncorrected=False), "ecc"),
    Asked("ecc_uncorrected_lifetime", "ECC uncorrected, lifetime", "", "counter",
          lambda nvml, gpu: nvml.ecc_lifetime(gpu, uncorrected=True), "ecc"),
    Asked("rows_remapped_corrected", "rows remapped, correctable", "", "counter",
          lambda nvml, gpu: nvml.remapped_rows(gpu)[0], "remapped_rows"),
    Asked("rows_remapped_uncorrected", "rows remapped, uncorrectable", "", "counter",
          lambda nvml, gpu: nvml.remapped_rows(gpu)[1], "remapped_rows"),
    Asked("row_remap_pending", "row remapping pending", "", "fixed",
          lambda nvml, gpu: nvml.remapped_rows(gpu)[2], "remapped_rows"),
    Asked("row_remap_failed", "row remapping failed", "", "fixed",
          lambda nvml, gpu: nvml.remapped_rows(gpu)[3], "remapped_rows"),
    Asked("recovery_action", "recovery action the driver asks for", "", "fixed",
          lambda nvml, gpu: nvml.recovery_action(gpu), "recovery_action"),
    Asked("mig_on", "MIG", "", "fixed", lambda nvml, gpu: nvml.mig_mode(gpu), "mig"),
    Asked("persistence", "persistence mode", "", "fixed", lambda nvml, gpu: nvml.persistence(gpu)),
    Asked("clock_reasons", "clock reasons, bit mask", "", "moment", lambda nvml, gpu: nvml.clock_reasons(gpu)),
    Asked("processes", "processes on it", "", "moment", lambda nvml, gpu: len(nvml.processes(gpu))),
    Asked("nvlinks", "NVLinks", "", "fixed", lambda nvml, gpu: nvml.nvlinks(gpu), "nvlink"),
)  # fmt: skip
FACT_BY_KEY = {fact.key: fact for fact in FACTS}
_OF_THE_SLICE = ("memory_bytes", "processes")


def ask(nvml: Nvml, gpu: Gpu, fact: Asked) -> Fact:
    """The fact, NOT_APPLICABLE where the driver and the product table agree that there is none, or UNKNOWN."""
    try:
        return fact.ask(nvml, gpu.handle if fact.key in _OF_THE_SLICE else gpu.board)
    except NVMLError as error:
        unsupported = error.value == pynvml.NVML_ERROR_NOT_SUPPORTED
        if unsupported and fact.feature is not None and lacks(gpu.info.product, fact.feature):
            return NOT_APPLICABLE
        return UNKNOWN


def path_between(nvml: Nvml, first: Gpu, second: Gpu) -> str:
    """By PCIe, in nvidia-smi's words."""
    try:
        level = nvml.common_ancestor(first.board, second.board)
    except NVMLError:
        return UNKNOWN
    return _ANCESTORS.get(level, f"LEVEL_{level}")
