"""The start, the sleep and the ready message of a task whose model is on one device."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from meltcore.common.tasks import task_of_part
from meltcore.engine.host.device import choose_device, describe_device
from meltcore.engine.host.sleep import SleepResult
from meltcore.engine.host.sleep_memory import Keep, held_tensors, make_sleep_memory, require_memory
from meltcore.engine.tasks.batch_engine import check_options
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress, open_task_checkpoint
from meltcore.models.loader import task_dtype
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.config import EngineConfig

_Module = TypeVar("_Module", bound=nn.Module)
_LoadedModule = TypeVar("_LoadedModule", bound=nn.Module, covariant=True)


class LoadModel(Protocol[_LoadedModule]):
    """Loads a model and its weights. Receives a function to which it reports its progress (stage, fraction)."""

    def __call__(self, *, progress: Progress) -> _LoadedModule: ...  # noqa: D102


class DeviceTask:
    """The base class of tasks of a `BatchEngine` whose model is on one device, and can sleep.

    A subclass loads its model with `_keep_model`, sets `_caches` if it has caches, and sets `_load_s` at the end of its
    constructor.
    """

    memory: list[MemoryRow]
    max_cost: int
    gpu_dtype = torch.float16  # the type of weights and activations on a GPU, unless --dtype names another

    def __init__(self, config: EngineConfig) -> None:
        """Choose the device and the type. Raises ConfigError for a setting that the task does not have."""
        self._start_s, self._load_s = time.monotonic(), 0.0
        self._task = task_of_part(type(self).__module__)
        check_options(config, self._task)
        self._is_dummy = config.load_format == "dummy"
        self._device = choose_device(config.device)
        self._dtype = task_dtype(config.dtype, self._device, on_gpu=self.gpu_dtype)
        self._sleep_memory = make_sleep_memory(config, self._device, lambda: (self._model_tensors, self._caches))
        self._caches: list[torch.Tensor] = []
        self._model_tensors: list[torch.Tensor] = []
        self._load: LoadModel[nn.Module] | None = None

    def _open_checkpoint(self, config: EngineConfig) -> Checkpoint:
        """Return the checkpoint. Raises ConfigError if it is missing, or of another task."""
        return open_task_checkpoint(config.model, self._task, is_dummy=self._is_dummy)

    def _ready_fields(self) -> dict[str, Any]:
        """Return the fields that the ready messages of all tasks have."""
        return {
            "device": describe_device(self._device, 1),
            "dtype": str(self._dtype).removeprefix("torch."),
            "weights": "dummy" if self._is_dummy else "real",
            "memory": self.memory,
            "load_s": self._load_s,
            "max_cost": self.max_cost,
        }

    def sleep(self, keep: Keep) -> SleepResult:
        """Release memory while no request is known. Raises SleepError."""
        return require_memory(self._sleep_memory).sleep(keep)

    def wake(self) -> int:
        """Allocate memory again. Return the bytes of weights that were copied. Raises SleepError."""
        return require_memory(self._sleep_memory).wake(self._reload)

    def _building(self) -> AbstractContextManager[None]:
        """Return the context in which the task allocates its model, its caches and its graphs."""
        return nullcontext() if self._sleep_memory is None else self._sleep_memory.building()

    def _keep_model(self, load: LoadModel[_Module], progress: Progress) -> _Module:
        """Load the task's model, which can sleep from now on. `load` must load the same weights every time."""
        model = load(progress=progress)
        if self._sleep_memory is not None:
            self._sleep_memory.adopt(model)
            self._model_tensors, self._load = held_tensors(model), load
        return model

    def _sleep_rows(self) -> list[MemoryRow]:
        """Return rows of the memory table for the memory that the first sleep needs."""
        return [] if self._sleep_memory is None else self._sleep_memory.memory_rows()

    @torch.inference_mode()
    def _reload(self) -> None:
        """Load the model again and copy its weights, since prepared weights are not the tensors of the checkpoint."""
        assert self._load is not None
        loaded_model = self._load(progress=lambda _stage, _part: None)
        for current, loaded in zip(self._model_tensors, held_tensors(loaded_model), strict=True):
            current.copy_(loaded)
