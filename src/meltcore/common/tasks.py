"""What models do: one record for each task, which the rest of the package derives from.

The parts of a task are named by import path, so that neither half of the package imports the other and nothing heavy is
imported early. Another package adds a task by an entry point of the group `meltcore.tasks`; every process finds it
there. docs/adding-a-task.md tells how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from meltcore.common.errors import ConfigError

ENTRY_POINTS = "meltcore.tasks"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task.

    Args:
        name: in fleet.yaml, in GET /v1/models and in metrics.
        paths: the paths of OpenAI's API that it answers, each with the name of the operation in traces.
        settings: those of a model that its engines and its queue have beyond the settings of all tasks.
        has_context: its engines are told a context length and a concurrency, which a plan may lower. The memory of
            other engines decides how many requests run together.
        is_upload: requests are files, which have no tokens that a queue could count.
    """

    name: str
    paths: Mapping[str, str]
    settings: tuple[str, ...] = ()
    has_context: bool = False
    is_upload: bool = False


# The first is the task of a model that names none.
_BUILT_IN = (
    Task(
        name="generation",
        paths={"/v1/chat/completions": "chat", "/v1/completions": "text_completion"},
        settings=(
            *("tokenizer", "chat_template", "special_tokens_in_messages"),
            *("quantization", "kv_cache_dtype", "tensor_parallel_size"),
            *("max_num_batched_tokens", "enforce_eager", "enable_prefix_caching"),
            *("generation_config", "max_queue_tokens", "max_model_len"),
        ),
        has_context=True,
    ),
    Task(
        name="translation",
        paths={"/v1/translate": "translation"},
        settings=("max_model_len", "max_queue_chars"),
    ),
    Task(
        name="transcription",
        paths={"/v1/audio/transcriptions": "transcription"},
        settings=("max_queue_audio_s",),
        is_upload=True,
    ),
    Task(
        name="synthesis",
        paths={"/v1/audio/speech": "speech"},
        settings=("max_queue_chars",),
    ),
)
DEFAULT = _BUILT_IN[0]


@cache
def tasks() -> Mapping[str, Task]:
    """Return all tasks by name: the built-in ones, then those of other packages.

    Raises ConfigError for an entry point that is no task, or one whose name or path another task has.
    """
    from importlib.metadata import entry_points  # takes 20 ms, which `import meltcore` should not

    found = {task.name: task for task in _BUILT_IN}
    for entry in sorted(entry_points(group=ENTRY_POINTS)):
        where = f"the entry point {entry.name} of {ENTRY_POINTS} ({entry.value})"
        try:
            task = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{where} cannot be imported: {error}") from error
        if not isinstance(task, Task):
            raise ConfigError(f"{where} is {type(task).__name__}; it must be a meltcore.common.tasks.Task")
        for other in found.values():
            if shared := {other.name, *other.paths} & {task.name, *task.paths}:
                raise ConfigError(f"{where} has {', '.join(sorted(shared))}, which the task {other.name} has already")
        found[task.name] = task
    return MappingProxyType(found)


def task_of(path: str) -> Task:
    """Return the task that answers a path. Raises LookupError where none does."""
    for task in tasks().values():
        if path in task.paths:
            return task
    raise LookupError(f"no task answers {path}")


def setting_tasks() -> dict[str, tuple[str, ...]]:
    """Return the settings of a model that some tasks alone have, each with the names of these tasks."""
    names = dict.fromkeys(name for task in tasks().values() for name in task.settings)
    return {name: tuple(task.name for task in tasks().values() if name in task.settings) for name in names}
