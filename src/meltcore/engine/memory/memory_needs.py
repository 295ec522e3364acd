"""Computes how much memory an engine needs for a context and a concurrency, without torch, a GPU or weights.

For each task, this calls the functions that divide the memory in the task's engine. It then searches for the smallest
budget that is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.process import start_call
from meltcore.common.tasks import DEFAULT, Task, load, recognized_task, tasks
from meltcore.engine.memory.memory_plan import smallest_budget
from meltcore.engine.memory.model_sizes import SizeRequest, read_sizes
from meltcore.engine.memory.workspace import sleep_rounding_bytes
from meltcore.kernels.comm.buffer_sizes import buffer_bytes
from meltcore.models.checkpoints.checkpoint import Checkpoint, is_on_hub, open_checkpoint
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LARGEST_BYTES = 2**44
# What an engine holds of a GPU while it sleeps, beside its context: workspaces of libraries, tables, inputs of graphs.
# Measured on an H100: 40 to 118 MiB, of generation about 55 MiB and the token counts of penalties.
_ASLEEP_BYTES = 128 * 2**20
_NOTICE_S = 3.0
_failures: dict[tuple[str, ...], ConfigError] = {}  # of checkpoints that were late, or not found on the hub


class PlannedEngine(NamedTuple):
    """The memory that one engine needs on each of its GPUs, or on the host. A plan adds which engine it is, and where.

    Args:
        budget_bytes: the value that `--memory` must have.
        rows: how the engine divides the budget.
        source: where the sizes were read.
        concurrency: the maximum number of requests in a step.
        asleep_bytes: the memory that the engine keeps while it sleeps: on a GPU without its CUDA context, on a CPU with
            the weights that stay.
        model: the name of the model, added by a plan like all that follows.
        replica: the number of the engine among the engines of the model.
        gpus: the number of its GPUs, or 0 on a CPU.
        only: the GPU numbers that the file allows. An empty tuple allows any.
        sleeps: whether the model takes turns.
        resident_bytes: the bytes of the engine's process beside the budget. For a model that takes turns they include
            what the engine holds while it sleeps.
        excluded_nodes: the nodes that cannot load the model.
    """

    task: str
    budget_bytes: int
    rows: list[MemoryRow]
    max_model_len: int | None
    concurrency: int
    source: str
    max_num_batched_tokens: int | None = None
    asleep_bytes: int = _ASLEEP_BYTES
    model: str = ""
    replica: int = 0
    gpus: int = 0
    only: tuple[int, ...] = ()
    sleeps: bool = False
    resident_bytes: int = 0
    excluded_nodes: frozenset[str] = frozenset()

    @property
    def size_bytes(self) -> int:
        """The bytes that the engine takes on each of its GPUs, or on the host, while it is awake."""
        return self.budget_bytes + self.resident_bytes

    @property
    def awake_bytes(self) -> int:
        """The bytes that the engine frees while it sleeps."""
        return self.budget_bytes if self.sleeps else 0


class UnknownSizesError(ConfigError):
    """Reports that the sizes of a model cannot be read: its checkpoint is missing, unknown or not self-contained."""


class TaskMismatchError(ConfigError):
    """Reports that the `task` of a model is not the task of its checkpoint."""


def engine_needs(model: ModelSection, *, on_cpu: bool = False) -> PlannedEngine:
    """Return the memory that an engine of `model` needs for its context and concurrency.

    A given `memory` is only divided. Raises UnknownSizesError if the checkpoint is not on this machine and the model
    has no `shapes`. Raises TaskMismatchError for a checkpoint of another task, and ConfigError if `memory` is too small
    for one request.
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
    """Return the bytes of a rank's buffer to which other ranks write, outside of its budget. One rank has none."""
    return buffer_bytes(ranks) if ranks > 1 else 0


def read_model_sizes(
    models: Mapping[str, ModelSection], limit_s: float, report: Callable[[str], None] = lambda _line: None
) -> None:
    """Read the sizes of several models together, on their devices and on the CPU, so that `engine_needs` finds them.

    Errors of a model are raised by `engine_needs`. A checkpoint that was late, or was not found on the hub, is not read
    again until `forget_failures` is called.

    Args:
        models: the models by name.
        limit_s: seconds (`timeouts.start_s`) within which each checkpoint must be read. All are read at the same time.
        report: gets lines about checkpoints that are not read within a few seconds.
    """
    names: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, model in models.items():
        names[_checkpoint_key(model)].append(name)
    on_hub: set[tuple[str, ...]] = set()

    def read(key: tuple[str, ...]) -> list[SizeRequest]:
        sections = [models[name] for name in names[key]]
        if sections[0].shapes is None and is_on_hub(sections[0].model):
            on_hub.add(key)
        on_cpu = [msgspec.structs.replace(each, device="cpu", residency="always_on") for each in sections]
        found = [_request(each) for each in (*sections, *on_cpu)]
        unknown = [each for each in found if isinstance(each, UnknownSizesError)]
        if key in on_hub and unknown:
            raise unknown[0]
        return [each for each in found if isinstance(each, SizeRequest) and each.function]

    # On threads: a folder of a server that is gone may hang for ever, also where a file is only looked for.
    calls = {key: start_call(partial(read, key)) for key in names if key not in _failures}
    late = wait(calls.values(), min(_NOTICE_S, limit_s)).not_done
    late_keys = [key for key, call in calls.items() if call in late]
    if asked := [key[0] for key in late_keys if key in on_hub]:
        report(f"asking the hub for {', '.join(asked)}")
    for key in late_keys:
        if key not in on_hub:
            report(f"{', '.join(f'models.{name}' for name in names[key])}: reading {key[0]}")
    wait(late, max(0.0, limit_s - _NOTICE_S))
    requests: list[SizeRequest] = []
    for key, call in calls.items():
        if call.done() and not isinstance(call.exception(), UnknownSizesError):
            requests += call.result()
        elif isinstance(error := call.exception() if call.done() else None, ConfigError):
            _failures[key] = error
        elif key in on_hub:
            _failures[key] = UnknownSizesError(f"{key[0]}: the hub has not sent its configuration within {limit_s:g} s")
        else:
            _failures[key] = ConfigError(f"{key[0]} was not read within {limit_s:g} s (timeouts.start_s)")
    read_sizes(requests)


def forget_failures() -> None:
    """Let the next `read_model_sizes` read checkpoints again that were late, or not found on the hub."""
    _failures.clear()


def _checkpoint_key(model: ModelSection) -> tuple[str, ...]:
    return model.model, model.load_format, model.shapes or ""


def _request(model: ModelSection) -> SizeRequest | ConfigError:
    try:
        return _opened(model, model.device == "cpu").request
    except ConfigError as error:
        return error


class _Opened(NamedTuple):
    """A model and its open checkpoint, or the name of its checkpoint if that has no config.json.

    `source` says where the sizes were read.
    """

    task: Task
    checkpoint: Checkpoint | str
    source: str
    request: SizeRequest


def _awake_needs(model: ModelSection, on_cpu: bool) -> PlannedEngine:
    task, checkpoint, source, request = _opened(model, on_cpu)
    sizes = read_sizes([request])[0] if request.function else None
    if isinstance(sizes, ConfigError):
        raise sizes
    needs: PlannedEngine = load(task.needs)(model, checkpoint, on_cpu, source, sizes)
    return needs


def _opened(model: ModelSection, on_cpu: bool) -> _Opened:
    """Open a model's checkpoint. Raises ConfigError if it cannot be read or belongs to another task."""
    if (failure := _failures.get(_checkpoint_key(model))) is not None:
        raise failure
    name, source = model.model, "its configuration"
    if model.shapes is not None and not Path(name).expanduser().exists():
        name, source = model.shapes, f"published shapes of {model.shapes}"
    is_dummy = model.load_format == "dummy" or model.shapes is not None
    try:
        task = recognized_task(name, dummy=is_dummy)
        checkpoint = open_checkpoint(name, files="config") if task is None else None
    except ConfigError as error:
        raise UnknownSizesError(str(error)) from error
    if checkpoint is not None:
        task = checkpoint.task
    assert task is not None
    if model.task != task.name:
        # A server follows the checkpoint, so it would serve another task than the file says.
        default = " (the default)" if model.task == DEFAULT.name else ""
        wanted = tasks()[model.task]
        names = () if checkpoint is None else checkpoint.config.get("architectures") or ()
        is_unmarked = not wanted.marked_architectures.isdisjoint(names)
        remedy = f", or fetch its {wanted.marker}, which shows models of task {wanted.name}" if is_unmarked else ""
        raise TaskMismatchError(
            f"got {model.task}{default}; {name} is a model of task {task.name}: write `task: {task.name}`{remedy}"
        )
    if checkpoint is not None and not checkpoint.config.get("architectures"):  # known without torch
        raise UnknownSizesError(f"{checkpoint.name}: config.json names no architecture; not a model here")
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
        hf_overrides=model.hf_overrides,
        residency=model.residency if on_cpu else "always_on",
    )
    return _Opened(task, checkpoint or name, source, SizeRequest(task.sizes, section, on_cpu, contents))


def concurrency(model: ModelSection) -> int:
    """Return the number of sequences, sentences, clips or texts for which the memory is planned."""
    return model.max_num_seqs or tasks()[model.task].concurrency


def budget_rows(
    model: ModelSection, divide: Callable[[int], tuple[bool, list[MemoryRow]]]
) -> tuple[int, list[MemoryRow]]:
    """Return the budget in bytes and the rows that divide it.

    The budget is the model's own `memory`, or else the smallest number of MiB that is enough.
    """
    if model.memory is not None:
        return int(model.memory), divide(int(model.memory))[1]

    smallest = smallest_budget(lambda memory_bytes: divide(memory_bytes)[0], _LARGEST_BYTES)
    if smallest is None:
        raise ConfigError(f"{model.checkpoint}: no memory is enough for {model.max_num_seqs} at a time; ask for fewer")
    return smallest, divide(smallest)[1]


def weight_element_size(model: ModelSection, on_cpu: bool) -> int:
    """Return the bytes per weight. If the file names no type, this is 2 on a GPU and 4 on a CPU."""
    return (4 if on_cpu else 2) if model.dtype == "auto" else DTYPE_BYTES[model.dtype]
