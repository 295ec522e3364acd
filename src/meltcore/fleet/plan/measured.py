"""Shows the memory of a running fleet: the bytes that NVML reports beside the planned bytes."""

from __future__ import annotations

from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text
from meltcore.common.tasks import tasks
from meltcore.fleet.plan.context_memory import find_contexts
from meltcore.fleet.plan.machine import process_bytes, read_gpus


def add_measured(rows: list[dict[str, Any]]) -> str:
    """Add two numbers to each engine of `meltcore ps`: the planned bytes with the CUDA context, and the bytes by NVML.

    `rows` are the answer of /ps and are changed in place. They get the keys "with context" and "NVML" in bytes, or None
    if the number is unknown. Returns a line with both totals. Raises ConfigError if NVML does not answer or there is no
    GPU.
    """
    gpus, driver = read_gpus()
    if not gpus:
        raise ConfigError("--nvml: no NVIDIA GPU is visible here")
    contexts, by_process = find_contexts(gpus[0].name, driver), process_bytes()
    planned = contexts.driver_bytes * len(gpus)
    for row in rows:
        task = row["task"]
        row["with context"] = row["NVML"] = None
        if row["gpus"] and row["memory_bytes"] and task in tasks():
            each_bytes = row["memory_bytes"] + contexts.process_bytes(task, row["gpus"])
            row["with context"] = row["gpus"] * each_bytes
            planned += row["with context"]
            row["NVML"] = by_process.get(row["pid"])
    used = sum(gpu.used_bytes for gpu in gpus)
    where = "GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    return (
        f"{where}: {size_text(planned)} planned with driver and contexts, {size_text(used)} in use by NVML "
        f"({(used - planned) / planned:+.1%}). {contexts.note}"
    )
