"""What healthy GPUs of exactly known products gave, each figure with its source.

Keys are those of the checks' rows. A product that is not here is judged by its topology and by the user's baseline.
"""

from dataclasses import dataclass

_OURS = "measured on H200 SXM nodes, torch 2.11, driver 580, 2026-11-20"
_MAMF = "ml-engineering, MAMF table (2026-08): 794.5 at the best shape, taken at 0.9 for this one"
_MAMF_FP8 = "ml-engineering, MAMF table (2026-08): 1,453 at the best shape"
_NVB = "nvbandwidth on 8 x H200 SXM, vendor's published table"
_NCCL = "nccl-tests on 8 x H200 SXM, ring without NVLS"
_NVL = "published 4 x H200 NVL node report (2026): its own test of an NV6 pair"
_5090 = "torch-performance-test-data issues 15, 96, 124 (2025-2026): the least of three cards"


@dataclass(frozen=True)
class Prior:
    value: float
    source: str


_HOPPER_SXM_LINKS = {
    "peers/one-way": Prior(386.0, f"{_OURS}: 386-387; nvbandwidth 396"),
    "peers/both-ways": Prior(772.0, "twice the one-way figure; nvbandwidth 784"),
    "collectives/all_reduce/2/1GiB": Prior(328.0, _OURS),
    "collectives/all_reduce/2/64MiB": Prior(269.0, _OURS),
    "collectives/all_reduce/4/4GiB": Prior(355.0, f"{_NCCL}: 363 at 8 GiB"),
    "collectives/all_reduce/8/4GiB": Prior(360.0, f"{_NCCL}: 367 at 16 GiB"),
    "collectives/all_gather/8/4GiB": Prior(355.0, f"{_NCCL}: 361"),
    "collectives/reduce_scatter/8/4GiB": Prior(355.0, f"{_NCCL}: 363"),
}

# By NVML's exact product name.
PRIORS: dict[str, dict[str, Prior]] = {
    "NVIDIA H200": {
        "product/bf16/8192x8192x8192": Prior(780.0, f"{_OURS}: 791-799; 662 to 769 on others"),
        "product/bf16/4096x4096x4096": Prior(730.0, f"{_OURS}: 726-741"),
        "product/bf16/16384x16384x8192": Prior(690.0, f"{_OURS}: 688-695"),
        "product/bf16/4096x14336x4096": Prior(670.0, f"{_OURS}: 667-678"),
        "product/fp8/8192x8192x8192": Prior(1453.0, f"{_OURS}: 1,498-1,511; {_MAMF_FP8}"),
        "memory/copy": Prior(4270.0, f"{_OURS}: 4,270-4,290, read and write counted"),
        "memory/read": Prior(4380.0, f"{_OURS}: 4,380-4,450"),
        "host/to-device": Prior(54.0, f"{_OURS}: 53-55"),
        "host/to-host": Prior(55.0, _OURS),
        "sustained/bf16": Prior(690.0, f"{_OURS}: 16384x16384x8192, the most power-hungry shape"),
        **_HOPPER_SXM_LINKS,
    },
    "NVIDIA H200 NVL": {
        "product/bf16/8192x8192x8192": Prior(720.0, _NVL),
        "peers/one-way": Prior(133.0, _NVL),
        "collectives/all_reduce/2/1GiB": Prior(109.0, _NVL),
    },
    "NVIDIA H100 80GB HBM3": {
        "product/bf16/8192x8192x8192": Prior(715.0, _MAMF),
        "host/to-host": Prior(52.8, "nvbandwidth issue 24 (2024): 52.8 on all eight GPUs of a node"),
        **_HOPPER_SXM_LINKS,
    },
    "NVIDIA GeForce RTX 5090": {
        "product/bf16/8192x8192x8192": Prior(234.0, _5090),
        "product/fp16/8192x8192x8192": Prior(223.0, _5090),
        "product/tf32/8192x8192x8192": Prior(114.0, _5090),
    },
}
