"""How much memory an engine takes, and what for: measured, never guessed."""

from __future__ import annotations

import torch

from meltcore.engine.messages import MemoryRow
from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.scheduler import pages_for
from meltcore.errors import ConfigError
from meltcore.models.decoder import Decoder

# What a step needs beside weights and pages, until a profiled step says better: activations, workspaces, fragmentation.
RESERVE_SHARE = 0.08
# On a CPU, cached pages share memory with everything else: a quarter of what is free unless the user says otherwise.
HOST_SHARE = 0.25


def plan_pages(
    model: Decoder, *, memory_bytes: int | None, max_model_len: int, max_num_seqs: int, cache_dtype: torch.dtype
) -> tuple[int, list[MemoryRow]]:
    """How many pages fit, and the memory table. Raises ConfigError where one full sequence does not fit."""
    device = model.embedding.device
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    (group,) = model.cache_groups()
    page_bytes = group.page_bytes(PAGE_SIZE, cache_dtype.itemsize)
    budget = memory_bytes if memory_bytes is not None else weights + _free_bytes(device)
    reserve = int(budget * RESERVE_SHARE)
    wanted = pages_for(max_model_len) * max_num_seqs
    fitting = max(0, (budget - weights - reserve) // page_bytes)
    if fitting < pages_for(max_model_len):
        largest = fitting * PAGE_SIZE
        needed = _size(page_bytes * pages_for(max_model_len))
        advice = f"Set --max-model-len {largest} or less, or raise --memory." if largest else "Raise --memory."
        raise ConfigError(
            f"{_size(budget)} hold the weights ({_size(weights)}), a reserve of {_size(reserve)} and pages for "
            f"{largest} tokens; --max-model-len {max_model_len} needs {needed} of pages. {advice}"
        )
    pages = min(wanted, fitting)
    rows = [
        MemoryRow("weights", weights),
        MemoryRow("KV pages", pages * page_bytes, f"{pages:,} pages of {PAGE_SIZE} tokens"),
        MemoryRow("reserve", reserve, "activations and workspaces"),
    ]
    return pages, rows


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(host_available_bytes() * HOST_SHARE)


def host_available_bytes() -> int:
    """MemAvailable of /proc/meminfo, in bytes."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable line; set --memory")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
