"""Serves GET /v1/status: the state of a running server for people, in JSON. GET /metrics serves machines."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pynvml import NVMLError

from meltcore.common.gpus.driver import DriverStartError, Nvml
from meltcore.common.gpus.reader import memory_or_host_bytes
from meltcore.serve.requests.backend import Backend, ModelTable
from meltcore.serve.tasks.model_choice import ModelChoice
from meltcore.serve.tasks.translation.choice import can_translate
from meltcore.text.languages import CODES

# Of a query to NVML. A driver that hangs costs one thread, and its GPUs are left out.
_QUERY_LIMIT_S = 1.0
_CACHE_S = 0.9


class Status:
    """Reads the counts of all models, and the load of the GPUs of this machine."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._choice = ModelChoice(models)
        self._gpus = GpuLoadReader()

    async def read(self) -> dict[str, Any]:
        """Return the state of all models and GPUs, as /v1/status sends it.

        `languages` has the language codes that a translation request may name. `substitutes` has the languages that a
        model may not know, each with the languages that the model gets instead.
        """
        return {
            "models": [_model(backend) for backend in self._models.backends],
            "gpus": await self._gpus.read(),
            "translates": can_translate(self._choice),
            "languages": CODES,
            "substitutes": self._models.languages.substitute_lists,
        }


def _model(backend: Backend) -> dict[str, Any]:
    # Counts of engines are as late as their newest step. A request that no queue is known to hold is at work.
    stats = backend.stats
    in_flight = stats.total("in_flight")
    waiting = min(in_flight, stats.total("queue_requests") + stats.engines().waiting)
    return {
        "name": backend.names[0],
        "task": stats.task,
        "status": backend.health.status,
        "running": in_flight - waiting,
        "waiting": waiting,
        "in_flight": in_flight,
        "finished": stats.total("finished"),
        "failed": stats.total("failed"),
        "output_tokens": stats.total("generation_tokens"),
    }


class GpuLoadReader:
    """Reads memory in use and utilization of all GPUs through NVML, at most about once per second."""

    def __init__(self) -> None:
        self._query: asyncio.Task[list[dict[str, Any]]] | None = None
        self._read_s = 0.0

    async def read(self) -> list[dict[str, Any]]:
        """Return the load of each GPU. Returns no GPUs without a driver, or while the driver does not answer."""
        if self._query is None or (self._query.done() and time.monotonic() - self._read_s > _CACHE_S):
            self._query = asyncio.create_task(asyncio.to_thread(query_gpus))
            self._read_s = time.monotonic()
        is_done, _ = await asyncio.wait({self._query}, timeout=_QUERY_LIMIT_S)
        return self._query.result() if is_done else []


def query_gpus() -> list[dict[str, Any]]:
    """Return the name, the bytes of memory and the utilization (0 to 1) of each GPU.

    The utilization is None if a GPU does not report it.
    """
    try:
        nvml = Nvml()  # stays open: only the first one loads the driver's library
        count = nvml.count()
    except (DriverStartError, NVMLError):
        return []
    gpus = []
    for index in range(count):
        try:
            handle = nvml.device(index)
            name = nvml.name(handle)
            used_bytes, total_bytes = memory_or_host_bytes(nvml, handle, name)
        except NVMLError:  # lost, or denied to this process
            continue
        try:
            utilization = nvml.utilization_percent(handle) / 100
        except NVMLError:  # with MIG
            utilization = None
        gpus.append(
            {
                "name": name,
                "memory_bytes": total_bytes,
                "memory_used_bytes": used_bytes,
                "utilization": utilization,
            }
        )
    return gpus
