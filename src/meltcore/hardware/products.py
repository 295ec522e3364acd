"""What products are known to lack, so that a value missing for good is told from one that should be there.

Only absences are listed: a product this table does not know is expected to have everything, and a value that cannot be
read there is UNKNOWN. Sources: NVIDIA's product pages and the support notes of the NVML API reference.
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
    "recovery_action",
    "remapped_rows",
    "utilization",
]

# Numbers of nvmlDeviceArchitecture_t.
VOLTA, AMPERE, HOPPER = 5, 7, 9

_CONSUMER = r"GeForce|TITAN|\bMX\d+"
_INTEGRATED = r"\bGB10\b|Orin|Thor|Xavier|Tegra"  # GPU and CPU share one memory and no PCIe link
_WORKSTATION = r"\bRTX\b|Quadro"
_GDDR_SERVER = r"\b(A2|A10|A10G|A16|A40|L2|L4|L20|L40|L40S|T4|T4G|P4|P40|M40|M60)\b"
_SMALL_WORKSTATION = r"\bT(400|500|600|1000|1200)\b|Quadro [KMP]\d+"

_LACKING: dict[Feature, str] = {
    "ecc": "|".join((_CONSUMER, _INTEGRATED, _SMALL_WORKSTATION)),
    # NVML gives the memory's temperature on boards with HBM.
    "memory_temperature": "|".join((_CONSUMER, _INTEGRATED, _WORKSTATION, _GDDR_SERVER, _SMALL_WORKSTATION)),
    "own_memory": _INTEGRATED,
    "pcie": _INTEGRATED,
    "gpm": "|".join((_CONSUMER, _INTEGRATED)),
    # The workstation cards from Ada on have no bridge; older ones are before GPM.
    "gpm_nvlink": "|".join((_CONSUMER, _INTEGRATED, _WORKSTATION, _GDDR_SERVER)),
}
_LACKING["nvlink"] = _LACKING["gpm_nvlink"]
_LACKING["recovery_action"] = _LACKING["gpm"]
_LACKING["remapped_rows"] = _LACKING["ecc"]
# A100, A30, H100, H200, B200 and their kin can be sliced, and the RTX PRO 6000; others cannot.
_LACKING["mig"] = "|".join((_CONSUMER, _INTEGRATED, r"RTX (?!PRO 6000)", "Quadro", _GDDR_SERVER, _SMALL_WORKSTATION))
_FIRST_ARCHITECTURE: dict[Feature, int] = {
    "energy": VOLTA,
    "mig": AMPERE,
    "remapped_rows": AMPERE,
    "gpm": HOPPER,
    "gpm_nvlink": HOPPER,
    "recovery_action": HOPPER,
}


@dataclass(frozen=True)
class Product:
    """`architecture` as NVML numbers it, None where it would not say. `mig`: a slice of a GPU."""

    name: str
    architecture: int | None
    mig: bool = False


def lacks(product: Product, feature: Feature) -> bool:
    """Whether `product` is known to have no such thing. False also for what this table has never heard of."""
    first = _FIRST_ARCHITECTURE.get(feature)
    if first is not None and product.architecture is not None and product.architecture < first:
        return True
    if feature == "utilization":
        return product.mig  # NVML keeps it for whole GPUs
    pattern = _LACKING.get(feature)
    return pattern is not None and re.search(pattern, product.name) is not None
