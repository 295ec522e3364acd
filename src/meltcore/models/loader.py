"""Loads a checkpoint: builds its model and copies the weights to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from meltcore.common.errors import ConfigError, ShardError
from meltcore.common.host_memory import host_available_bytes
from meltcore.common.sizes import size_text
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.memory_pools import free_cached_memory, memory_pool
from meltcore.kernels.quant.ggml import random_blocks
from meltcore.kernels.quant.ggml_types import GgmlType
from meltcore.layers.int4_weights import DUMMY_DEVIATION, DUMMY_ZEROS
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.weight_loader import WeightLoader, split_rows, stored_dtypes
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress
from meltcore.models.checkpoints.fairseq_weights import FairseqWeights
from meltcore.models.checkpoints.finite_check import FiniteCheck
from meltcore.models.checkpoints.safetensors_file import SafetensorsFile, open_decoder_files
from meltcore.models.checkpoints.tensor_file import TensorEntry, TensorFile, is_derived
from meltcore.models.checkpoints.tensor_parts import PART_BYTES, TensorPart, read_ahead, rows_per_part, split_into_parts
from meltcore.models.checkpoints.torch_file import TorchFile
from meltcore.models.checkpoints.weight_files import TORCH_FILE
from meltcore.models.configs.config_fields import Fields
from meltcore.models.configs.quantization_config import AwqConfig, GptqConfig, read_quantization_config
from meltcore.models.decoders.model import LoadableModel, Model, MtpModel
from meltcore.models.quantized.published_fp8 import keep_published_fp8
from meltcore.models.quantized.published_int4 import quantize_to_int4
from meltcore.models.quantized.quantization import quantize_as_stored, quantize_to_fp8
from meltcore.models.registry import ARCHITECTURES
from meltcore.settings.config import DType, Quantization

if TYPE_CHECKING:
    from meltcore.models.tasks.indicf5 import IndicF5
    from meltcore.models.tasks.indictrans2 import IndicTrans2
    from meltcore.models.tasks.pooling_model import PoolingModel

AnyModel = TypeVar("AnyModel", bound=nn.Module)
TaskModel = TypeVar("TaskModel", "IndicF5", "IndicTrans2", "PoolingModel")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The standard deviation that published models are initialized with (initializer_range in config.json).
DUMMY_WEIGHT_STD = 0.02
_TIED_ROWS = 64  # of a tied head that are compared with the embedding, at each end
_MAX_NAMES_SHOWN = 5
# Threads that read some tens of megabytes each: one thread copies from the page cache at 4 GB/s, and a disk is faster
# with several requests in its queue.
_NUM_READERS = 4
_FLOATING = {"F64", "F32", "F16", "BF16"}  # of safetensors and GGUF


def build_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    group: TensorParallelGroup | None = None,
    *,
    has_mtp: bool = False,
) -> Model:
    """Build the model that config.json names, with uninitialized weights on `device`.

    With `group`, only this rank's shard is built. With `has_mtp`, the model is an `MtpModel` with its MTP layer. Raises
    ConfigError if the model, the quantization, the group size or the MTP layer is not supported, or if `device` has too
    little memory.
    """
    model = build_meta_model(checkpoint, dtype, device, quantization, group, has_mtp=has_mtp)
    with memory_pool("weights"):
        return allocate(model, device)


def allocate(model: AnyModel, device: torch.device) -> AnyModel:
    """Give the tensors of a model on the meta device uninitialized memory on `device`. Returns the model.

    `to_empty` would call `empty_like`, which imports SymPy for the meta device and takes 1.8 s (H200, 2026-11-27).
    """

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    apply: Callable[[Callable[[torch.Tensor], torch.Tensor]], AnyModel] = model._apply
    return apply(empty)


def build_meta_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    group: TensorParallelGroup | None = None,
    *,
    reads_files: bool = True,
    has_mtp: bool = False,
) -> Model:
    """Build the model for `device` on the meta device: every tensor has its shape but takes no memory.

    Args:
        checkpoint: the configuration, and the headers of weights that are stored quantized.
        dtype: the type of weights that are not quantized.
        device: the device on which the model will be allocated.
        quantization: how weights are quantized while they are loaded.
        group: if given, only this rank's shard is built.
        reads_files: check that files of a quantized checkpoint hold each tensor once. False opens no folder's weights.
        has_mtp: build the layer for multi-token prediction too, which makes the result an `MtpModel`.

    Raises ConfigError for an unknown architecture, an unsupported quantization, group size or MTP layer, or a second
    quantization. Raises it also if `device` has too little memory.
    """
    ranks = group.size if group else 1
    try:
        model = _shard_on_meta(checkpoint, dtype, device, quantization, group, reads_files=reads_files, has_mtp=has_mtp)
    except ShardError as error:
        largest = ranks - 1
        while largest > 1 and not _can_shard(checkpoint, dtype, device, quantization, largest):
            largest -= 1
        raise ConfigError(f"{error}; the largest size that {checkpoint.name} can have is {largest}") from error
    check_memory(checkpoint.name, parameter_bytes(model), device, ranks)
    if not reads_files:
        return model
    is_published = read_quantization_config(checkpoint.config) is not None
    if checkpoint.gguf is not None or (is_published and _has_weight_files(checkpoint)):
        check_tensors(model, checkpoint)  # headers have all shapes: none that contradicts them is allocated
    return model


def _can_shard(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: Quantization, ranks: int
) -> bool:
    try:
        _shard_on_meta(checkpoint, dtype, device, quantization, TensorParallelGroup(0, ranks))
    except ConfigError:
        return False
    return True


def _shard_on_meta(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization,
    group: TensorParallelGroup | None,
    *,
    reads_files: bool = False,
    has_mtp: bool = False,
) -> Model:
    """Build a rank's shard on the meta device. Raises ShardError if the model cannot be divided by the group size."""
    config = Fields(checkpoint.config)
    names = config.optional("architectures", [])
    supported_names = [name for name in names if name in ARCHITECTURES]
    if not supported_names:
        names_text = ", ".join(names) or "nothing"
        raise ConfigError(f"{checkpoint.name}: config.json names {names_text}; we have {', '.join(ARCHITECTURES)}")
    with _named_source(checkpoint):
        published = read_quantization_config(checkpoint.config)
    if published is not None and quantization != "none":
        raise ConfigError(
            f"{checkpoint.name} is quantized already (quant_method {published.quant_method}); "
            f"it cannot be served with --quantization {quantization}"
        )
    with torch.device("meta"), default_dtype(dtype):
        with _named_source(checkpoint):
            model = ARCHITECTURES[supported_names[0]](checkpoint.config)
            if has_mtp:
                if not isinstance(model, MtpModel):
                    raise ConfigError(
                        f"{checkpoint.name}: {supported_names[0]} has no layer for multi-token prediction (MTP) here; "
                        "draft with another method, such as ngram"
                    )
                model.add_mtp()
        if group is not None:
            model.shard(group)
        if checkpoint.gguf is not None:
            formats = {name: entry.dtype_name for name, entry in _stored_entries(checkpoint).items()}
            quantize_as_stored(model, formats, linear_layers=quantization == "none")
        if published is not None:
            if isinstance(published, AwqConfig | GptqConfig):
                with ExitStack() as stack:
                    files = open_files(checkpoint) if reads_files and _has_weight_files(checkpoint) else ()
                    opened = [stack.enter_context(file) for file in files]
                    quantize_to_int4(model, published, opened, is_size_only=not reads_files)
            else:
                keep_published_fp8(model, published, device)
        if quantization == "fp8":
            quantize_to_fp8(model, device)
    if group is not None and isinstance(published, AwqConfig | GptqConfig):
        model.checkpoint_tensors()  # refuses a shard that a checkpoint's words of several values do not end at
    return model


def check_tensors(model: Model, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a tensor of the model is missing in the checkpoint's files, stored twice or misshapen."""
    with ExitStack() as stack:
        _plan_reads(model, checkpoint, [stack.enter_context(file) for file in open_files(checkpoint)])


def _stored_entries(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the entries of a checkpoint's files by the published names of the tensors."""
    with ExitStack() as stack:
        files = [stack.enter_context(file) for file in open_files(checkpoint)]
        return {name: entry for file in files for name, entry in file.entries.items()}


def matrix_dtypes(checkpoint: Checkpoint, *, reads_files: bool = True) -> set[str]:
    """Return the floating types of the checkpoint's unquantized matrices, by the names that files use.

    Without files the result is the type that config.json names. With `reads_files` False no file of a folder is opened.
    """
    has_files = reads_files and _has_weight_files(checkpoint)
    if checkpoint.gguf is None and checkpoint.fairseq is None and not has_files:
        return {str(checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype"))}
    entries = _stored_entries(checkpoint).values()
    return {entry.dtype_name for entry in entries if len(entry.shape) > 1 and entry.dtype_name in _FLOATING}


@contextmanager
def _named_source(checkpoint: Checkpoint) -> Iterator[None]:
    """Return a context that adds the file of the configuration to errors about a field of config.json."""
    try:
        yield
    except ConfigError as error:
        if checkpoint.gguf is not None:
            raise ConfigError(f"{checkpoint.gguf.path}, as {error}") from error
        if not str(error).startswith("config.json"):
            raise
        raise ConfigError(f"{checkpoint.folder}: {error}") from error


def planned_device(on_cpu: bool) -> torch.device:
    """Return the type of device for which an engine is planned. This machine need not have such a device."""
    return torch.device("cpu" if on_cpu else "cuda")


def task_dtype(name: DType, device: torch.device, *, on_gpu: torch.dtype) -> torch.dtype:
    """Return the type of weights and activations. "auto" stands for `on_gpu` on a GPU and float32 on a CPU."""
    if name != "auto":
        return TORCH_DTYPES[name]
    return on_gpu if device.type == "cuda" else torch.float32


def check_memory(name: str, weight_bytes: int, device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError if the weights do not fit into the free memory of `device`.

    Call this before weights are allocated, since a host overcommits memory and kills a process later. Each rank has
    `weight_bytes`. On a CPU all ranks share the memory.
    """
    if device.type == "cpu":
        needed_bytes, free_bytes = weight_bytes * num_ranks, host_available_bytes()
        location, advice = "of host memory are available", "a smaller --dtype or model takes less"
    elif device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, reusable
        needed_bytes, free_bytes = weight_bytes, torch.cuda.mem_get_info(device)[0] + cached
        location, advice = f"are free on {device}", "--tensor-parallel-size shards them over several GPUs"
    else:  # the meta device
        return
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{name}: the weights take {size_text(needed_bytes)}, and {size_text(free_bytes)} {location}; {advice}"
        )


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, which may be on the meta device."""
    return sum(values.nbytes for values in model.parameters())


def _has_weight_files(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.weight_files)


def load_task_model(
    model: TaskModel, checkpoint: Checkpoint, device: torch.device, dummy_seed: int | None, progress: Progress
) -> TaskModel:
    """Allocate a model of another task than generation, which is on the meta device, and load its weights.

    With `dummy_seed` it gets random weights instead. Raises ConfigError if a file cannot be used, or if memory is not
    enough.
    """
    check_memory(checkpoint.name, parameter_bytes(model), device, 1)
    model = allocate(model, device)
    if dummy_seed is None:
        load_weights(model, checkpoint, progress)
    else:
        fill_dummy_weights(model, checkpoint, dummy_seed)
    free_cached_memory(device)
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which new tensors have type `dtype` unless their constructor names another type."""
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)


def load_weights(model: LoadableModel, checkpoint: Checkpoint, progress: Progress) -> None:
    """Copy every tensor of the checkpoint's files into the model, converting types.

    Only this rank's part of a sharded tensor is read. The headers of all files are checked before any tensor is read,
    since reading may take minutes.

    Raises ConfigError naming the tensors that are missing, unexpected, given twice, or of a wrong shape or type. Raises
    it also for a stored head that differs from its tied embedding, for values that are not finite in the model's type,
    and for an unreadable file.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(file) for file in open_files(checkpoint)]
        parts = _plan_reads(model, checkpoint, files)
        _check_tied_head(model, files)
        pin_memory = model.device.type == "cuda"  # a GPU copies from it directly, without the driver's staging buffer
        buffers = [torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=pin_memory) for _ in range(_NUM_READERS + 1)]
        pool = stack.enter_context(ThreadPoolExecutor(_NUM_READERS))
        for file_index, (file, file_parts) in enumerate(zip(files, parts, strict=True)):
            check = FiniteCheck(file.path)
            for part, values in read_ahead(file, file_parts, pool, buffers):
                if not part.is_read_in_place(values):
                    part.store(values, file)
                check.add(file.stored_name(part.name), part.target if isinstance(part.target, torch.Tensor) else values)
            check.finish()
            progress("loading weights", (file_index + 1) / len(files))


def open_files(checkpoint: Checkpoint) -> Iterator[TensorFile]:
    """Open the checkpoint's files of weights one by one."""
    if checkpoint.gguf is not None:
        from meltcore.models.checkpoints.gguf_weights import GGUFWeights  # 0.2 s, which other checkpoints do not need

        yield from (GGUFWeights(file, checkpoint.config) for file in checkpoint.gguf.files)
        return
    if checkpoint.fairseq is not None:
        yield FairseqWeights(checkpoint.fairseq)
        return
    paths = checkpoint.weight_files
    if not paths:
        raise ConfigError(f"{checkpoint.folder} {checkpoint.no_weights_reason}")
    is_decoder = any(name in ARCHITECTURES for name in Fields(checkpoint.config).optional("architectures", []))
    if paths[0].name == TORCH_FILE:
        yield TorchFile(paths[0])
    else:
        yield from open_decoder_files(paths) if is_decoder else map(SafetensorsFile, paths)


def _plan_reads(model: LoadableModel, checkpoint: Checkpoint, files: Sequence[TensorFile]) -> list[list[TensorPart]]:
    """Plan the reads of each file. Raises ConfigError unless the files hold each tensor of the model exactly once."""
    location = checkpoint.fairseq or (checkpoint.folder if checkpoint.gguf is None else checkpoint.gguf.path)
    loaders, fused_tensors = model.checkpoint_tensors(), model.fused_tensors()
    sources: dict[str, tuple[str, Path]] = {}  # from the model's tensor to the tensor and file that it is read from
    unexpected: list[str] = []
    parts: list[list[TensorPart]] = [[] for _ in files]
    checkpoint_names: tuple[str, ...]
    for file, file_parts in zip(files, parts, strict=True):
        for name, entry in file.entries.items():
            canonical_name = model.canonical_name(name)
            if canonical_name in loaders:
                target, checkpoint_names = loaders[canonical_name], (canonical_name,)
            elif canonical_name in fused_tensors:
                target, checkpoint_names = fused_tensors[canonical_name]
            else:
                if not is_derived(canonical_name, entry) and not model.ignored_tensor(canonical_name):
                    unexpected.append(file.stored_name(name))
                continue
            for checkpoint_name in checkpoint_names:
                if checkpoint_name in sources:
                    other_name, path = sources[checkpoint_name]
                    raise ConfigError(
                        f"{location}: {name} of {file.path.name} is in {path.name} too"
                        + (f", as {other_name}" if other_name != name else "")
                    )
                sources[checkpoint_name] = name, file.path
            file_parts += split_into_parts(name, entry, file.adapt(canonical_name, target, model.device), file)
    missing = sorted({files[0].stored_name(name) for name in loaders.keys() - sources.keys()})
    problems = [_describe_names("missing", missing), _describe_names("unexpected", sorted(unexpected))]
    if any(problems):
        published = read_quantization_config(checkpoint.config)
        format_note = f" (quantization_config: quant_method {published.quant_method})" if published else ""
        raise ConfigError(f"{location}: {'; '.join(filter(None, problems))}{format_note}")
    return parts


def _check_tied_head(model: LoadableModel, files: Sequence[TensorFile]) -> None:
    """Raise ConfigError if config.json ties the output head to the embedding, but the checkpoint stores another head.

    The stored head is not loaded, so outputs would differ from the trained model. Only _TIED_ROWS rows at each end are
    compared: a separate head differs in all rows, or in the rows of added tokens.
    """
    file_tensors = {model.canonical_name(name): (file, name) for file in files for name in file.entries}
    head = file_tensors.get("lm_head.weight")
    embeddings = [each for name, each in file_tensors.items() if name.endswith("embed_tokens.weight")]
    if head is None or len(embeddings) != 1 or "lm_head.weight" in model.checkpoint_tensors():
        return
    [embedding] = embeddings
    entries = [file.entries[name] for file, name in (head, embedding)]
    if entries[0].shape != entries[1].shape or not all(
        entry.dtype_name in file.DTYPES for entry, (file, _) in zip(entries, (head, embedding), strict=True)
    ):
        return
    rows = entries[0].shape[0]
    for part in (slice(0, _TIED_ROWS), slice(max(0, rows - _TIED_ROWS), rows)):
        ours, theirs = (file.read(name, (part,)).float() for file, name in (head, embedding))
        if not torch.equal(ours, theirs):
            raise ConfigError(
                f"{head[0].path.name}: {head[1]} differs from {embedding[1]}, but config.json sets tie_word_embeddings "
                "to true; set it to false for a head of its own"
            )


def fill_dummy_weights(model: LoadableModel, checkpoint: Checkpoint, seed: int) -> None:
    """Fill the model with random weights. It is as fast as with real weights, but its answers are meaningless.

    Each rank draws whole tensors and keeps its part, so that a group holds the same weights as one device. For
    quantized tensors of a GGUF checkpoint, blocks are drawn. Large tensors are drawn in ranges of rows.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)
    entries = _stored_entries(checkpoint) if checkpoint.gguf is not None else {}
    for name, target in model.checkpoint_tensors().items():
        entry, dtypes = entries.get(name), stored_dtypes(target)
        ggml_type = None if entry is None else _held_format(entry, target)
        dtype = torch.uint8 if ggml_type else torch.int32 if dtypes == (torch.int32,) else model.dtype
        for _, part in split_rows(target, rows_per_part(target.shape, dtype.itemsize)):
            if ggml_type is not None:
                *rows, row_bytes = part.shape
                shape = (*rows, ggml_type.columns(row_bytes))
                part.copy_(random_blocks(ggml_type, shape, DUMMY_WEIGHT_STD, generator))
                continue
            values = torch.empty(part.shape, dtype=dtype, device=model.device)
            part.copy_(_draw(values, name, generator, is_fp8=dtypes == (FP8,)))


def _held_format(entry: TensorEntry, target: WeightLoader) -> GgmlType | None:
    """Return the format of the blocks that `target` reads from a GGUF tensor. None means that `target` reads values."""
    stored_type = GgmlType.__members__.get(entry.dtype_name)
    if stored_type is None or stored_type.columns(entry.shape[-1]) == target.shape[-1]:
        return None
    return stored_type.held.type


def _draw(values: torch.Tensor, name: str, generator: torch.Generator, *, is_fp8: bool) -> torch.Tensor:
    """Return random values for the tensor `name`.

    They are drawn in `values`, or in the type in which they are stored.
    """
    if values.dtype == torch.int32:
        is_zeros = name.endswith(".qzeros")
        return values.fill_(DUMMY_ZEROS) if is_zeros else values.random_(-(2**31), 2**31, generator=generator)
    if is_fp8:
        return values.normal_(0.0, 1.0, generator=generator).to(FP8)
    if name.endswith(".scales"):
        return values.normal_(generator=generator).sign_() * (DUMMY_WEIGHT_STD / DUMMY_DEVIATION)
    if name.endswith(("_scale", "_scale_inv")):
        return values.fill_(DUMMY_WEIGHT_STD)
    if values.dim() == 1:
        return values.fill_(0.0 if name.endswith(".bias") else 1.0)
    return values.normal_(0.0, DUMMY_WEIGHT_STD, generator=generator)


def _describe_names(problem: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return f"{len(names)} {problem} tensors: {', '.join(names[:_MAX_NAMES_SHOWN])}{more}"
