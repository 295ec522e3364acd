"""Whether a network's weights fit into the memory of their device: asked before they are allocated.

A GPU that is too small says so in words of its allocator; a host gives more memory than it has, and then kills whoever
uses it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from meltcore.errors import ConfigError

GIB = 2**30


def require_room(name: str, weight_bytes: int, device: torch.device, ranks: int) -> None:
    """Raises ConfigError where `device` has too little free. Ranks on a CPU, each with so much, share its memory."""
    if device.type == "cpu":
        needed, free = weight_bytes * ranks, host_available_bytes()
        where, advice = "of host memory are available", "a smaller --dtype or model takes less"
    elif device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, to be used again
        needed, free = weight_bytes, torch.cuda.mem_get_info(device)[0] + kept
        where, advice = f"are free on {device}", "--tp shares them out among GPUs"
    else:  # tensors without memory
        return
    if needed > free:
        raise ConfigError(
            f"{name}: the weights take {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB {where}; {advice}"
        )


def host_available_bytes() -> int:
    """MemAvailable of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable line; set --memory")
