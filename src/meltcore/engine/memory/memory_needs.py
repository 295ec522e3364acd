"""Says how much memory an engine needs for a context and a concurrency. No torch, no GPU and no weights.

It calls the functions that divide memory in the engines, and searches for the smallest budget that is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.tasks import DEFAULT
from meltcore.engine.core.kv_cache import PageLayout
from meltcore.engine.memory.memory_plan import (
    PENALTY_FRACTION,
    RESERVE_FRACTION,
    ModelShape,
    plan_memory,
    smallest_budget,
)
from meltcore.engine.memory.memory_plans import (
    BUDGET_TRANSCRIPTION_GRAPHS,
    MAX_BATCH_FRAMES,
    MAX_SLOTS,
    MAX_SYNTHESIS_COST,
    MAX_TRANSCRIPTION_COST,
    plan_slots,
    plan_synthesis,
    plan_transcription,
    synthesis_shape,
    transcription_shape,
    translation_workspace,
)
from meltcore.engine.memory.workspace import PENALTY_BYTES, sleep_rounding_bytes
from meltcore.kernels.comm.buffer_sizes import buffer_bytes
from meltcore.kernels.gemm.half_sizes import processor_packs_half, stores_half
from meltcore.models.checkpoints.checkpoint import (
    SYNTHESIS_ARCHITECTURE,
    TRANSLATION_ARCHITECTURE,
    Checkpoint,
    find_transcriber,
    open_checkpoint,
)
from meltcore.models.configs.nemo_config import CONFIG_FILE, read_config
from meltcore.models.configs.quantization_config import AwqConfig, GptqConfig, read_quantization_config
from meltcore.models.configs.task_configs import NUM_BEAMS, IndicF5Config, IndicTrans2Config
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.decoder_families import DECODER_CONFIGS
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.quantized.quantized_sizes import int4_host_bytes, quantized_weight_bytes
from meltcore.models.quantized.step_sizes import decoder_step
from meltcore.models.quantized.weight_sizes import (
    WeightFormat,
    decoder_cache_specs,
    decoder_host_bytes,
    decoder_weight_bytes,
    largest_slice,
    synthesis_weight_bytes,
    transcription_weight_bytes,
    translation_weight_bytes,
)
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

if TYPE_CHECKING:
    from meltcore.models.checkpoints.gguf.gguf_file import (
        GGUFModel,  # imports gguf and numpy, which the supervisor does not need
    )

_LARGEST_BYTES = 2**44
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Tokens per step where the file names no number. Steps of models that share a GPU are short, so that others get their
# turn; a sliding window keeps as many tokens more of each step.
_BATCHED_TOKENS, _SLIDING_BATCHED_TOKENS = 2048, 1024
# Concurrency to plan for where the file names none: sequences, sentences and clips or texts.
_DEFAULT_CONCURRENCY: dict[str, int] = {"generation": 16, "translation": 64, "transcription": 16, "synthesis": 4}
_CLIP_S = 30  # of a clip to plan for
# What an engine holds of a GPU while it sleeps, beside its context: workspaces of libraries, tables, inputs of graphs.
# Measured on an H100: 40 to 118 MiB, of generation about 55 MiB and the token counts of penalties.
_ASLEEP_BYTES, _GENERATION_ASLEEP_BYTES = 128 * 2**20, 64 * 2**20


class EngineNeeds(NamedTuple):
    """The memory of one engine on each of its GPUs, or of the host.

    budget_bytes: what `--memory` must be; rows: how the engine divides it; source: where the sizes come from;
    concurrency: at most what fills a step; asleep_bytes: what it keeps of a GPU while it sleeps, beside its context.
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
    """Reports a model whose `task` is not that of its checkpoint."""


def engine_needs(model: ModelSection, *, on_cpu: bool = False) -> EngineNeeds:
    """Return the memory of an engine of `model` for its context and concurrency, or for its `memory` if it has one.

    Raises UnknownSizesError for a checkpoint that is not on this machine and names no `shapes`, TaskMismatchError for a
    checkpoint of another task, and ConfigError for `memory` that is too small for one request.
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


def _awake_needs(model: ModelSection, on_cpu: bool) -> EngineNeeds:
    assert model.checkpoint is not None, "the caller plans engines only"
    name, source = model.checkpoint, "its configuration"
    if model.shapes is not None and not Path(name).expanduser().exists():
        name, source = model.shapes, f"published shapes of {model.shapes}"
    is_dummy = model.load_format == "dummy" or model.shapes is not None
    try:
        transcriber = find_transcriber(name, dummy=is_dummy)
        checkpoint = open_checkpoint(name, files="config") if transcriber is None else None
    except ConfigError as error:
        raise UnknownSizesError(str(error)) from error
    if transcriber is not None:
        _check_task(model, name, "transcription")
        return _transcription(model, transcriber, on_cpu, source)
    assert checkpoint is not None
    architectures = checkpoint.config.get("architectures") or []
    if TRANSLATION_ARCHITECTURE in architectures:
        _check_task(model, name, "translation")
        return _translation(model, checkpoint, on_cpu, source)
    if SYNTHESIS_ARCHITECTURE in architectures:
        _check_task(model, name, "synthesis")
        return _synthesis(model, checkpoint, on_cpu, source)
    _check_task(model, name, "generation")
    return _generation(model, checkpoint, architectures, on_cpu, source)


def _check_task(model: ModelSection, name: str, task: str) -> None:
    """Raise TaskMismatchError where the file names another task than that of the checkpoint or its shapes, `name`.

    A server follows the checkpoint, so it would serve another task than the file says.
    """
    if model.task != task:
        default = " (the default)" if model.task == DEFAULT.name else ""
        raise TaskMismatchError(f"got {model.task}{default}; {name} is a model of task {task}: write `task: {task}`")


def _generation(
    model: ModelSection, checkpoint: Checkpoint, architectures: list[str], on_cpu: bool, source: str
) -> EngineNeeds:
    known = [each for each in architectures if each in DECODER_CONFIGS]
    if not known:
        raise UnknownSizesError(
            f"{checkpoint.name}: config.json names {', '.join(architectures) or 'nothing'}; not a model here"
        )
    config, ranks = DECODER_CONFIGS[known[0]](checkpoint.config), model.tensor_parallel_size
    stored = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype") or "bfloat16"
    element_size, weight_note = _element_size(model, on_cpu, str(stored)), ""
    is_packed = checkpoint.gguf is not None or model.format in ("q4_0", "q8_0")
    # A CPU converts what it loads, unless the engine must be able to load it again when it wakes.
    on_host = on_cpu and element_size == _DTYPE_BYTES["float32"] and model.residency != "sleepable"
    if checkpoint.gguf is not None and model.quantization == "none":
        weight_bytes, weight_note = _gguf_weights(checkpoint.gguf, config, element_size, ranks, on_host=on_host)
        source = "header of the GGUF file"
    else:
        published = read_quantization_config(checkpoint.config) if model.format == "auto" else None
        if published is None and on_host and model.quantization == "none" and stores_half([str(stored)]):
            weight_bytes = decoder_host_bytes(
                config, weight_format=_weight_format(model), packs_half=processor_packs_half(), ranks=ranks
            )
        elif published is None:
            weight_bytes = decoder_weight_bytes(
                config, element_size=element_size, weight_format=_weight_format(model), ranks=ranks
            )
        elif on_host and isinstance(published, AwqConfig | GptqConfig):
            packs_half = processor_packs_half()
            form = {"packs_half": packs_half, "dense_in_half": packs_half and stores_half([str(stored)])}
            weight_bytes = int4_host_bytes(config, checkpoint.config, published, **form, ranks=ranks)
        else:
            weight_bytes = quantized_weight_bytes(
                config, checkpoint.config, published, element_size=element_size, ranks=ranks
            )
            is_packed = isinstance(published, AwqConfig | GptqConfig)
    caches = group_layers(decoder_cache_specs(config, ranks))
    cache_size = 1 if model.kv_cache_dtype == "fp8" else element_size
    scratch = largest_slice(config, ranks) * element_size if is_packed and not on_host else 0
    step = decoder_step(config, element_size, is_packed=is_packed, ranks=ranks)
    shape = ModelShape(weight_bytes, config.vocab_size, caches, element_size, cache_size, scratch, step)
    length = min(model.max_model_len or config.max_context, config.max_context)
    seqs = model.max_num_seqs or _DEFAULT_CONCURRENCY["generation"]
    layout = PageLayout.of(caches)
    batched = model.max_num_batched_tokens or _batched_tokens(layout, on_cpu)
    pages = layout.pages_together(seqs, length, batched)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        plan = plan_memory(
            shape,
            memory_bytes=memory_bytes,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            may_run_fewer=False,
            snapshots=model.enable_prefix_caching,
            has_graphs=None if on_cpu else not model.enforce_eager,
        )
        rows = [MemoryRow(row.name, row.size_bytes, weight_note) if row.name == "weights" else row for row in plan.rows]
        return plan.pages >= pages, rows

    budget, rows = _budget(model, divide)
    penalty_bytes = min(seqs * PENALTY_BYTES * config.vocab_size, int(budget * RESERVE_FRACTION * PENALTY_FRACTION))
    asleep_bytes = _GENERATION_ASLEEP_BYTES + penalty_bytes
    return EngineNeeds("generation", budget, rows, length, seqs, source, batched, asleep_bytes)


def _batched_tokens(layout: PageLayout, on_cpu: bool) -> int:
    return _SLIDING_BATCHED_TOKENS if layout.sliding and not on_cpu else _BATCHED_TOKENS


def _translation(model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str) -> EngineNeeds:
    config, element_size = IndicTrans2Config.read(checkpoint.config), _element_size(model, on_cpu, "float16")
    weight_bytes = translation_weight_bytes(config, element_size)
    source_tokens, tokens = config.sentence_limits(model.max_model_len)
    slot = config.slot_bytes(element_size, num_beams=NUM_BEAMS, max_new_tokens=tokens, max_source=source_tokens)
    limit = MAX_SLOTS["cpu" if on_cpu else "cuda"]
    workspace = partial(translation_workspace, config, element_size, num_beams=NUM_BEAMS)
    sentences = min(model.max_num_seqs or _DEFAULT_CONCURRENCY["translation"], limit)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        slots = plan_slots(weight_bytes, slot, memory_bytes, limit, None if on_cpu else workspace)
        rows = [MemoryRow("weights", weight_bytes), MemoryRow("slots", (slots + 1) * slot, f"of {slots} sentences")]
        if not on_cpu:
            rows.append(MemoryRow("workspace", workspace(slots), "of the encoder, graphs and libraries"))
        return slots >= sentences, [*rows, _rest(memory_bytes, rows)]

    budget, rows = _budget(model, divide)
    return EngineNeeds("translation", budget, rows, model.max_model_len, sentences, source)


def _transcription(model: ModelSection, path: Path, on_cpu: bool, source: str) -> EngineNeeds:
    import yaml

    if not (path / CONFIG_FILE).is_file():
        raise UnknownSizesError(
            f"{model.checkpoint}: its sizes are inside {path.name}; name `shapes` to plan without it"
        )
    config = read_config(yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8")))
    element_size = _element_size(model, on_cpu, "float16")
    weight_bytes, max_shape = transcription_weight_bytes(config, element_size), transcription_shape(config)
    limit, clip_frames = MAX_TRANSCRIPTION_COST["cpu" if on_cpu else "cuda"], round(_CLIP_S / config.frame_s)
    clips = min(model.max_num_seqs or _DEFAULT_CONCURRENCY["transcription"], math.ceil(limit / clip_frames))
    frames = min(limit, clips * clip_frames)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        sizes: dict[str, Any] = {"weight_bytes": weight_bytes, "element_size": element_size, "max_shape": max_shape}
        graphs = None if on_cpu else BUDGET_TRANSCRIPTION_GRAPHS
        cost, rows = plan_transcription(config, memory_bytes=memory_bytes, limit=limit, graphs=graphs, **sizes)
        return cost >= frames, [*rows, _rest(memory_bytes, rows)]

    budget, rows = _budget(model, divide)
    return EngineNeeds("transcription", budget, rows, None, clips, source)


def _synthesis(model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str) -> EngineNeeds:
    from meltcore.text.synthesis.vocabulary import load_vocabulary

    vocabulary = load_vocabulary(checkpoint, is_dummy=True)
    config = IndicF5Config.read(checkpoint.config, vocabulary.size)
    element_size, device = _element_size(model, on_cpu, "bfloat16"), "cpu" if on_cpu else "cuda"
    weight_bytes, max_shape = synthesis_weight_bytes(config, element_size), synthesis_shape(config)
    limits = MAX_BATCH_FRAMES[device], MAX_SYNTHESIS_COST[device]
    texts = min(model.max_num_seqs or _DEFAULT_CONCURRENCY["synthesis"], math.ceil(limits[0] / max_shape))
    frames = min(limits[0], texts * max_shape)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        sizes: dict[str, Any] = {"weight_bytes": weight_bytes, "element_size": element_size, "max_shape": max_shape}
        batch, cost, rows = plan_synthesis(
            config, memory_bytes=memory_bytes, limits=limits, has_graphs=not on_cpu, is_exact=not on_cpu, **sizes
        )
        return batch >= frames and cost >= frames, [*rows, _rest(memory_bytes, rows)]

    budget, rows = _budget(model, divide)
    return EngineNeeds("synthesis", budget, rows, None, texts, source)


def _rest(memory_bytes: int, rows: list[MemoryRow]) -> MemoryRow:
    return MemoryRow("unused", memory_bytes - sum(row.size_bytes for row in rows), "held, for steps that need more")


def _budget(model: ModelSection, divide: Callable[[int], tuple[bool, list[MemoryRow]]]) -> tuple[int, list[MemoryRow]]:
    """Return the model's own `memory`, else the smallest number of MiB that is enough, and how it is divided."""
    if model.memory is not None:
        return int(model.memory), divide(int(model.memory))[1]

    smallest = smallest_budget(lambda memory_bytes: divide(memory_bytes)[0], _LARGEST_BYTES)
    if smallest is None:
        raise ConfigError(f"{model.checkpoint}: no memory is enough for {model.max_num_seqs} at a time; ask for fewer")
    return smallest, divide(smallest)[1]


def _element_size(model: ModelSection, on_cpu: bool, default: str) -> int:
    return (
        _DTYPE_BYTES.get("float32" if on_cpu and model.dtype == "auto" else default, 2)
        if model.dtype == "auto"
        else (_DTYPE_BYTES[model.dtype])
    )


def _weight_format(model: ModelSection) -> WeightFormat:
    if model.quantization == "fp8":
        return "fp8"
    return "dense" if model.format == "auto" else model.format


def _gguf_weights(
    gguf: GGUFModel, config: DecoderConfig, element_size: int, ranks: int, *, on_host: bool
) -> tuple[int, str]:
    """Return the bytes of a GGUF file's weights on one rank, and a note on formats held as others.

    on_host: whether a CPU converts them when they are loaded.
    """
    from meltcore.models.checkpoints.gguf.gguf_formats import describe_on_host, restored_formats
    from meltcore.models.quantized.gguf_sizes import device_weight_bytes, host_weight_bytes

    tensors = gguf.tensors
    if on_host:
        host_bytes, form = host_weight_bytes(tensors, config, packs_half=processor_packs_half(), ranks=ranks)
        return host_bytes, describe_on_host(tensors, form) if form else ""
    uses = restored_formats(tensors, element_size)
    return device_weight_bytes(tensors, config, element_size, ranks), "; ".join(use.describe() for use in uses)
