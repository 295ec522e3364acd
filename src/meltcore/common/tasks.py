"""Defines the tasks of models: one record for each task, from which the rest of the package derives its behavior.

Import paths name the parts of a task. So serving and measuring code do not import each other, and torch is not imported
early. Another package adds a task through an entry point of the group `meltcore.tasks`, which every process reads.
docs/adding-a-task.md explains the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meltcore.common.errors import ConfigError

ENTRY_POINTS = "meltcore.tasks"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Describes one task by its names, its API and its implementation.

    Args:
        name: The task's name in fleet.yaml, in GET /v1/models and in metrics.
        paths: The API paths that the task answers, each with the name of the operation in traces.
        settings: The settings of a model that only this task, or few tasks, have.
        title: What the task's engines do, for error messages. An empty title uses the name.
        backend: Import path of the `EngineBackend` that serves the task's models in an API server process.
        routes: Import paths of the endpoints, which are subclasses of `meltcore.serve.tasks.endpoint.Endpoint`.
        engine: Import path of the function that creates an engine: `engine(config, progress=...)`.
        messages: Import path of the module that defines the messages ToEngine and FromEngine of the task.
        needs: Import path of the function that computes the memory an engine needs (`engine/memory/memory_needs.py`).
        sizes: Import path of the function that builds a model on torch's meta device and returns the sizes that `needs`
            takes. It is empty if `needs` takes none.
        concurrency: The number of requests that run together if fleet.yaml gives no number.
        architectures: The architectures in config.json by which checkpoints of the task are recognized.
        marked_architectures: Architectures of another task. Checkpoints with a file `marker` belong to this task.
        marker: The name of that file.
        recognizes: Import path of the function that recognizes a checkpoint without a config.json: `recognizes(model,
            dummy=...)`. It is empty if architectures suffice.
        has_context: True if engines take a context length and a concurrency, which a plan may lower. The engines of
            other tasks compute from their memory how many requests run together.
        is_upload: True if requests upload files. Such requests have no tokens that a queue could count.
        example: Arguments of curl for a small request to the first path, which a server prints when it is ready. MODEL
            stands for the model's name. If it is empty, nothing is printed.
        workload: Import path of the task's MeasuredTask, which `meltcore load` and reports use. It is empty if they do
            not support the task.
    """

    name: str
    paths: Mapping[str, str]
    backend: str
    engine: str
    messages: str
    needs: str
    title: str = ""
    concurrency: int = 16
    routes: tuple[str, ...] = ()
    architectures: frozenset[str] = frozenset()
    marked_architectures: frozenset[str] = frozenset()
    marker: str = ""
    recognizes: str = ""
    settings: tuple[str, ...] = ()
    has_context: bool = False
    is_upload: bool = False
    sizes: str = ""
    example: tuple[str, ...] = ()
    workload: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)


_JSON = ("-H", "content-type: application/json", "-d")
# The first is the task of a model that names none.
_BUILT_IN = (
    Task(
        name="generation",
        title="text generation",
        backend="meltcore.serve.tasks.generation.local_engine:LocalEngine",
        routes=(
            "meltcore.serve.tasks.generation.completions:ChatEndpoint",
            "meltcore.serve.tasks.generation.completions:CompletionsEndpoint",
        ),
        engine="meltcore.engine.generation.engine:GenerationEngine",
        messages="meltcore.protocol.generation",
        needs="meltcore.engine.generation.memory:generation_needs",
        sizes="meltcore.engine.worker.loading:decoder_sizes",
        paths={"/v1/chat/completions": "chat", "/v1/completions": "text_completion"},
        settings=(
            *("tokenizer", "chat_template", "special_tokens_in_messages"),
            *("quantization", "kv_cache_dtype", "tensor_parallel_size"),
            *("max_num_batched_tokens", "enforce_eager", "enable_prefix_caching"),
            *("hf_overrides", "speculative_config", "async_scheduling", "debug"),
            *("generation_config", "tool_call_parser", "reasoning_parser", "max_queue_tokens", "max_model_len"),
        ),
        has_context=True,
        example=(*_JSON, '{"model": "MODEL", "messages": [{"role": "user", "content": "What is 37 + 45?"}]}'),
        workload="meltcore.measure.load.tasks.generation:TASK",
    ),
    Task(
        name="translation",
        backend="meltcore.serve.tasks.translation.translation_engine:TranslationEngine",
        routes=("meltcore.serve.tasks.translation.translate:TranslateEndpoint",),
        engine="meltcore.engine.translation.engine:translation_engine",
        messages="meltcore.protocol.translation",
        needs="meltcore.engine.translation.memory:translation_needs",
        sizes="meltcore.engine.translation.translation:weight_bytes",
        concurrency=64,
        architectures=frozenset(("IndicTransForConditionalGeneration",)),
        paths={"/v1/translate": "translation"},
        settings=("max_model_len", "max_queue_chars", "normalizer"),
        example=(
            *_JSON,
            '{"model": "MODEL", "sentences": ["Good morning."], "src_lang": "English", "tgt_lang": "Gujarati"}',
        ),
        workload="meltcore.measure.load.tasks.translation:TASK",
    ),
    Task(
        name="transcription",
        backend="meltcore.serve.tasks.transcription.transcription_engine:TranscriptionEngine",
        routes=(
            "meltcore.serve.tasks.transcription.transcriptions:TranscriptionsEndpoint",
            "meltcore.serve.tasks.transcription.transcriptions:TranscribeBatchEndpoint",
        ),
        engine="meltcore.engine.transcription.engine:transcription_engine",
        messages="meltcore.protocol.transcription",
        needs="meltcore.engine.transcription.memory:transcription_needs",
        sizes="meltcore.engine.transcription.engine:weight_bytes",
        recognizes="meltcore.models.checkpoints.checkpoint:is_transcription_model",
        paths={"/v1/audio/transcriptions": "transcription"},
        settings=("max_queue_audio_s",),
        is_upload=True,
        example=("-F", "model=MODEL", "-F", "file=@speech.wav"),
        workload="meltcore.measure.load.tasks.transcription:TASK",
    ),
    Task(
        name="synthesis",
        title="speech synthesis",
        backend="meltcore.serve.tasks.synthesis.synthesis_engine:SynthesisEngine",
        routes=(
            "meltcore.serve.tasks.synthesis.speech:SpeechEndpoint",
            "meltcore.serve.tasks.synthesis.speech:SpeechBatchEndpoint",
            "meltcore.serve.tasks.synthesis.speech_to_speech:SpeechToSpeechEndpoint",
        ),
        engine="meltcore.engine.synthesis.engine:synthesis_engine",
        messages="meltcore.protocol.synthesis",
        needs="meltcore.engine.synthesis.memory:synthesis_needs",
        sizes="meltcore.engine.synthesis.synthesis:weight_bytes",
        concurrency=4,
        architectures=frozenset(("INF5Model",)),
        paths={"/v1/audio/speech": "speech"},
        settings=("max_queue_chars",),
        example=(*_JSON, '{"model": "MODEL", "input": "ನಮಸ್ಕಾರ.", "response_format": "wav"}', "-o", "speech.wav"),
        workload="meltcore.measure.load.tasks.synthesis:TASK",
    ),
    Task(
        name="embedding",
        backend="meltcore.serve.tasks.embedding.backend:EmbeddingBackend",
        routes=(
            "meltcore.serve.tasks.embedding.endpoints:EmbeddingsEndpoint",
            "meltcore.serve.tasks.embedding.endpoints:RerankEndpoint",
            "meltcore.serve.tasks.embedding.endpoints:ScoreEndpoint",
        ),
        engine="meltcore.engine.embedding.engine:embedding_engine",
        messages="meltcore.protocol.embedding",
        needs="meltcore.engine.embedding.memory:embedding_needs",
        sizes="meltcore.engine.embedding.engine:weight_bytes",
        concurrency=32,
        architectures=frozenset(
            (
                *("BertModel", "XLMRobertaModel", "Qwen3Model"),
                *("BertForSequenceClassification", "XLMRobertaForSequenceClassification"),
                "Qwen3ForSequenceClassification",
            )
        ),
        marked_architectures=frozenset(("Qwen3ForCausalLM",)),
        marker="modules.json",
        paths={
            "/v1/embeddings": "embeddings",
            **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
            **dict.fromkeys(("/v1/score", "/score"), "score"),
        },
        settings=("tokenizer", "max_model_len", "max_queue_tokens"),
        example=(*_JSON, '{"model": "MODEL", "input": "The capital of France is Paris."}'),
        workload="meltcore.measure.load.tasks.embedding:TASK",
    ),
)
DEFAULT = _BUILT_IN[0]


@cache
def tasks() -> Mapping[str, Task]:
    """Return all tasks by name: the built-in tasks, then the tasks of other packages.

    Raises ConfigError for an entry point that is no task, or one whose name or path another task has.
    """
    from importlib.metadata import entry_points  # takes 20 ms, which `import meltcore` should not

    task_by_name = {task.name: task for task in _BUILT_IN}
    for entry in sorted(entry_points(group=ENTRY_POINTS)):
        source = f"the entry point {entry.name} of {ENTRY_POINTS} ({entry.value})"
        try:
            task = entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{source} cannot be imported: {error}") from error
        if not isinstance(task, Task):
            raise ConfigError(f"{source} is {type(task).__name__}; it must be a meltcore.common.tasks.Task")
        for other in task_by_name.values():
            if shared := {other.name, *other.paths} & {task.name, *task.paths}:
                raise ConfigError(f"{source} has {', '.join(sorted(shared))}, which the task {other.name} has already")
        task_by_name[task.name] = task
    return MappingProxyType(task_by_name)


def task_of(path: str) -> Task:
    """Return the task that answers a path. Raises LookupError if no task does."""
    for task in tasks().values():
        if path in task.paths:
            return task
    raise LookupError(f"no task answers {path}")


def task_of_part(module: str) -> Task:
    """Return the task that has the module `module` as one of its parts, so that a part can find its own task.

    Raises LookupError if no task has the module.
    """
    for task in tasks().values():
        if module in (task.engine.partition(":")[0], task.messages):
            return task
    raise LookupError(f"{module} is not a part of a task")


def recognized_task(model: str, *, dummy: bool) -> Task | None:
    """Return the task of a checkpoint that has no config.json. Returns None if no task recognizes the checkpoint.

    `dummy` says whether weights are random. Raises ConfigError if the checkpoint's files cannot be used.
    """
    for task in tasks().values():
        if task.recognizes and load(task.recognizes)(model, dummy=dummy):
            return task
    return None


def task_of_architectures(names: Collection[str], folder: Path) -> Task:
    """Return the task of a checkpoint by the architectures in its config.json and the files of its folder.

    Unknown names give the default task.
    """
    for task in tasks().values():
        is_marked = not task.marked_architectures.isdisjoint(names) and (folder / task.marker).exists()
        if is_marked or not task.architectures.isdisjoint(names):
            return task
    return DEFAULT


def load(path: str) -> Any:
    """Return the object that an import path names: "package.module:name", or "package.module" for a module."""
    module, _, name = path.partition(":")
    imported_module = import_module(module)
    return getattr(imported_module, name) if name else imported_module


def setting_tasks() -> dict[str, tuple[str, ...]]:
    """Return the names of the tasks that have a setting, by the setting's name.

    Settings that all tasks have are left out.
    """
    names = dict.fromkeys(name for task in tasks().values() for name in task.settings)
    return {name: tuple(task.name for task in tasks().values() if name in task.settings) for name in names}
