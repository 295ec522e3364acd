"""Says how much memory an engine needs for a context and a concurrency. No torch, no GPU and no weights.

The part of each task calls the functions that divide memory in its engine, and the smallest budget that is enough is
searched here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.tasks import DEFAULT, Task, load, recognized_task, task_of_architectures, tasks
from meltcore.engine.memory.memory_plan import smallest_budget
from meltcore.engine.memory.model_sizes import SizeRequest, read_sizes
from meltcore.engine.memory.workspace import sleep_rounding_bytes
from meltcore.kernels.comm.buffer_sizes import buffer_bytes
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST_BYTES = 2**44
# What an engine holds of a GPU while it sleeps, beside its context: workspaces of libraries, tables, inputs of graphs.
# Measured on an H100: 40 to 118 MiB, of generation about 55 MiB and the token counts of penalties.
_ASLEEP_BYTES = 128 * 2**20


class EngineNeeds(NamedTuple):
    """The memory of one engine on each of its GPUs, or of the host.

    Args:
        budget_bytes: what `--memory` must be.
        rows: how the engine divides it.
        source: where the sizes come from.
        concurrency: the most requests that fill a step.
        asleep_bytes: what it keeps of a GPU while it sleeps, beside its context.
    """

    task: str
    budget_bytes: int
    rows: list[MemoryRow]
    max_model_len: int | None
    concurrency: int
    source: str
    max_num_batched_tokens: int | None = None
    asleep_bytes: int = _ASLEEP_BYTES


class UnknownSizesError(ConfigError):
    """Reports a model whose sizes cannot be read here: its checkpoint is missing, unknown or not readable alone."""


class TaskMismatchError(ConfigError):
    """Reports a model whose `task` is not its checkpoint's."""


def engine_needs(model: ModelSection, *, on_cpu: bool = False) -> EngineNeeds:
    """Return the memory of an engine of `model` for its context and concurrency, or for its `memory` if it has one.

    Raises UnknownSizesError for a checkpoint that is not on this machine and names no `shapes`. Raises
    TaskMismatchError for a checkpoint of another task, and ConfigError for `memory` that is too small for one request.
    """
    needs = _awake_needs(model, on_cpu)
    if model.residency != "sleepable" or model.tensor_parallel_size > 1 or on_cpu:
        return needs
    lost_bytes = sleep_rounding_bytes(next(row.size_bytes for row in needs.rows if row.name == "weights"))
    if model.memory is not None:
        needs = _awake_needs(msgspec.structs.replace(model, memory=int(model.memory) - lost_bytes), on_cpu)
    rows = [*needs.rows, MemoryRow("rounding", lost_bytes, "of weights that can sleep, to 2 MiB")]
    return needs._replace(budget_bytes=needs.budget_bytes + lost_bytes, rows=rows)


def peer_bytes(ranks: int) -> int:
    """Return the bytes of the buffer that each of several ranks has beside its budget, which the others write to."""
    return buffer_bytes(ranks) if ranks > 1 else 0


def read_model_sizes(models: Iterable[tuple[ModelSection, bool]]) -> None:
    """Read the sizes of several models together, which `engine_needs` then knows.

    models: each with whether its engine runs on a CPU. `engine_needs` raises the errors of a model.
    """
    requests = []
    for model, on_cpu in models:
        with suppress(ConfigError):
            requests.append(_opened(model, on_cpu).request)
    read_sizes(request for request in requests if request.function)


class _Opened(NamedTuple):
    """A model whose checkpoint, or name of a checkpoint without config.json, is known.

    `source` says where sizes come from.
    """

    task: Task
    checkpoint: Checkpoint | str
    source: str
    request: SizeRequest


def _awake_needs(model: ModelSection, on_cpu: bool) -> EngineNeeds:
    task, checkpoint, source, request = _opened(model, on_cpu)
    sizes = read_sizes([request])[0] if request.function else None
    if isinstance(sizes, ConfigError):
        raise sizes
    needs: EngineNeeds = load(task.needs)(model, checkpoint, on_cpu, source, sizes)
    return needs


def _opened(model: ModelSection, on_cpu: bool) -> _Opened:
    """Open a model's checkpoint. Raises ConfigError where it cannot be read, or is of another task."""
    assert model.checkpoint is not None, "the caller plans engines only"
    name, source = model.checkpoint, "its configuration"
    if model.shapes is not None and not Path(name).expanduser().exists():
        name, source = model.shapes, f"published shapes of {model.shapes}"
    is_dummy = model.load_format == "dummy" or model.shapes is not None
    try:
        task = recognized_task(name, dummy=is_dummy)
        checkpoint = open_checkpoint(name, files="config") if task is None else None
    except ConfigError as error:
        raise UnknownSizesError(str(error)) from error
    if checkpoint is not None:
        task = task_of_architectures(checkpoint.config.get("architectures") or [])
    assert task is not None
    if model.task != task.name:
        # A server follows the checkpoint, so it would serve another task than the file says.
        default = " (the default)" if model.task == DEFAULT.name else ""
        raise TaskMismatchError(
            f"got {model.task}{default}; {name} is a model of task {task.name}: write `task: {task.name}`"
        )
    contents, path = "" if checkpoint is None else repr(checkpoint.config), Path(name).expanduser()
    if path.exists():
        contents += str(path.stat().st_mtime_ns)
    section = ModelSection(
        checkpoint=name,
        task=task.name,
        load_format="dummy" if is_dummy else "auto",
        dtype=model.dtype,
        quantization=model.quantization,
        format=model.format,
        tensor_parallel_size=model.tensor_parallel_size,
        residency=model.residency if on_cpu else "always_on",
    )
    return _Opened(task, checkpoint or name, source, SizeRequest(task.sizes, section, on_cpu, contents))


def concurrency(model: ModelSection) -> int:
    """Return the sequences, sentences, clips or texts to plan for."""
    return model.max_num_seqs or tasks()[model.task].concurrency


def unused(memory_bytes: int, rows: list[MemoryRow]) -> MemoryRow:
    """Return the row of what a budget has beside `rows`."""
    return MemoryRow("unused", memory_bytes - sum(row.size_bytes for row in rows), "held, for steps that need more")


def budget_rows(
    model: ModelSection, divide: Callable[[int], tuple[bool, list[MemoryRow]]]
) -> tuple[int, list[MemoryRow]]:
    """Return the model's own `memory`, else the smallest number of MiB that is enough, and how it is divided."""
    if model.memory is not None:
        return int(model.memory), divide(int(model.memory))[1]

    smallest = smallest_budget(lambda memory_bytes: divide(memory_bytes)[0], _LARGEST_BYTES)
    if smallest is None:
        raise ConfigError(f"{model.checkpoint}: no memory is enough for {model.max_num_seqs} at a time; ask for fewer")
    return smallest, divide(smallest)[1]


def weight_element_size(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes of a weight. A file that names no type has 16 bits on a GPU, and float32 on a CPU."""
    return (4 if on_cpu else 2) if model.dtype == "auto" else DTYPE_BYTES[model.dtype]
