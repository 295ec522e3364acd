"""Lists the features that GPU types lack. A value that cannot be read is NOT_APPLICABLE if its feature is listed here.

The table lists absences only. A GPU type that is not in it is expected to have every feature, so a value that cannot be
read there is UNKNOWN. Sources: NVIDIA's data sheets and the support notes of the NVML API reference.
"""

import re
from dataclasses import dataclass
from typing import Literal

Feature = Literal[
    "ecc",
    "energy",
    "gpm",
    "gpm_nvlink",
    "memory_temperature",
    "mig",
    "nvlink",
    "own_memory",
    "pcie",
    "power_limit",
    "recovery_action",
    "remapped_rows",
    "utilization",
]

# Values of nvmlDeviceArchitecture_t.
VOLTA, AMPERE, HOPPER = 5, 7, 9

_CONSUMER = r"GeForce|TITAN|\bMX\d+"
_INTEGRATED = r"\bGB10\b|Orin|Thor|Xavier|Tegra"  # GPU and CPU share one memory and no PCIe link
_WORKSTATION = r"\bRTX\b|Quadro"
_GDDR_SERVER = r"\b(A2|A10|A10G|A16|A40|L2|L4|L20|L40|L40S|T4|T4G|P4|P40|M40|M60)\b"
_SMALL_WORKSTATION = r"\bT(400|500|600|1000|1200)\b|Quadro [KMP]\d+"

_GPM = "|".join((_CONSUMER, _INTEGRATED))
_ECC = "|".join((_CONSUMER, _INTEGRATED, _SMALL_WORKSTATION))
# Workstation cards from Ada on have no NVLink bridge; older ones do not have GPM.
_NVLINK = "|".join((_CONSUMER, _INTEGRATED, _WORKSTATION, _GDDR_SERVER))
_MISSING_FEATURES: dict[Feature, str] = {
    "ecc": _ECC,
    "remapped_rows": _ECC,
    # NVML reports a memory temperature on boards with HBM.
    "memory_temperature": "|".join((_CONSUMER, _INTEGRATED, _WORKSTATION, _GDDR_SERVER, _SMALL_WORKSTATION)),
    "own_memory": _INTEGRATED,
    "pcie": _INTEGRATED,
    "power_limit": _INTEGRATED,
    "gpm": _GPM,
    "recovery_action": _GPM,
    "gpm_nvlink": _NVLINK,
    "nvlink": _NVLINK,
    # MIG exists on data center GPUs from A100 on (A100, A30, H100, H200, B200, ...) and on the RTX PRO 6000.
    "mig": "|".join((_CONSUMER, _INTEGRATED, r"RTX (?!PRO 6000)", "Quadro", _GDDR_SERVER, _SMALL_WORKSTATION)),
}
_FIRST_ARCHITECTURE: dict[Feature, int] = {
    "energy": VOLTA,
    "mig": AMPERE,
    "remapped_rows": AMPERE,
    "gpm": HOPPER,
    "gpm_nvlink": HOPPER,
    "recovery_action": HOPPER,
}


@dataclass(frozen=True)
class GpuType:
    """A type of GPU. `architecture` is NVML's number, or None if it is unreadable. `mig` is True for a MIG device."""

    name: str
    architecture: int | None
    mig: bool = False


def lacks_feature(gpu_type: GpuType, feature: Feature) -> bool:
    """Return whether `gpu_type` is known to lack `feature`. A type that the table does not list lacks no feature."""
    first = _FIRST_ARCHITECTURE.get(feature)
    if first is not None and gpu_type.architecture is not None and gpu_type.architecture < first:
        return True
    if feature == "utilization":
        return gpu_type.mig  # NVML reports utilization for whole GPUs only
    pattern = _MISSING_FEATURES.get(feature)
    return pattern is not None and re.search(pattern, gpu_type.name) is not None
