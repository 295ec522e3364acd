"""Writes a checkpoint as a quantized GGUF file, in the layout of llama.cpp's converter.

gguf_config.py and gguf_weights.py read such files. This module uses their tables in the other direction. Tensors are
read, quantized by the gguf package and written one after the other, so host memory holds one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from meltcore.common.errors import ConfigError
from meltcore.common.files import atomic_output, check_disk_space
from meltcore.kernels.rope_scaling import Llama3Scaling, LongRopeScaling, YarnScaling
from meltcore.kernels.rotary import inverse_frequencies
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress
from meltcore.models.checkpoints.gguf.gguf_config import (
    EXPERT_KEYS,
    FAMILIES,
    GEMMA_PATTERN,
    GRANITE_KEYS,
    LONG_FACTORS,
    REQUIRED_KEYS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    read_config,
)
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.models.checkpoints.gguf.gguf_formats import EMBEDDING, HEAD, ROUTER
from meltcore.models.checkpoints.gguf_weights import gguf_name, has_permuted_rows, includes_one, stored_rows
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.registry import ARCHITECTURES
from meltcore.models.writers.gguf_requantize import FILE_TYPES, LARGEST_VALUES, QUANTIZATION_VERSION
from meltcore.models.writers.rounding_loss import RoundingLoss
from meltcore.models.writers.source_tensors import SourceTensor, SourceTensors, open_tensors

GGUF_FORMATS = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
_ARCHITECTURE_NAMES = {family.architecture: name for name, family in FAMILIES.items()} | {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Mistral3ForConditionalGeneration": "llama",
    "MistralForCausalLM": "llama",
}
_TYPES = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float16: GGMLQuantizationType.F16}
_LARGEST_FLOAT = torch.finfo(torch.float32).max

# Called with the header of the new file before its tensors are quantized, which may take minutes.
HeaderCheck = Callable[[GGUFModel], None]


class _StoredTensor(NamedTuple):
    """A tensor of the new file.

    Args:
        sources: the published tensor, or the tensors of all experts of a layer.
        added: the number that is added to the values.
        row_order: the published row of each row of the file. None keeps the order.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    sources: tuple[SourceTensor, ...]
    added: float
    row_order: torch.Tensor | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of `blocks`."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return int((self.shape[-1] if len(self.shape) > 1 else 1) // block_size * block_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape[:-1] if len(self.shape) > 1 else self.shape) * self.row_bytes

    def blocks(self, rounding_loss: RoundingLoss) -> np.ndarray[Any, Any]:
        """Read and convert the tensor. Returns [rows, row_bytes] uint8.

        Each value of a one-dimensional tensor is a row.
        """
        blocks = np.empty((self.num_bytes // self.row_bytes, self.row_bytes), dtype=np.uint8)
        row = 0
        for source in self.sources:
            for part in source.parts():
                values = part.float()
                if self.added:
                    values = values + self.added
                source.check_largest(
                    float(values.abs().max()), LARGEST_VALUES.get(self.type, _LARGEST_FLOAT), self.type.name
                )
                quantized = gguf.quants.quantize(values.numpy(), self.type)
                if self.type in FILE_TYPES:
                    rounding_loss.add(values.numpy(), gguf.quants.dequantize(quantized, self.type))
                quantized = quantized.view(np.uint8)
                blocks[row : row + len(values)] = quantized.reshape(len(values), -1)
                row += len(values)
        return blocks if self.row_order is None else blocks[self.row_order.numpy()]


def write_gguf(
    checkpoint: Checkpoint,
    path: Path,
    target_type: GGMLQuantizationType,
    make_tokenizer_metadata: Callable[[int], Mapping[str, Any]],
    check_header: HeaderCheck,
    progress: Progress,
    *,
    overwrite: bool = False,
    allow_requantize: bool = False,
) -> RoundingLoss:
    """Write the checkpoint as the GGUF file `path` with matrices of type `target_type`. Return the rounding error.

    `make_tokenizer_metadata` receives the number of rows of the embedding. It returns the metadata of tokenizer and
    chat template.

    Raises ConfigError for an architecture or a configuration that GGUF cannot express, and for a quantized checkpoint
    unless `allow_requantize`. Raises it also for an existing file unless `overwrite`, and if the disk is full.
    """
    name = _architecture_name(checkpoint)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; a GGUF file is written")
    rounding_loss = RoundingLoss()
    with (
        atomic_output(path, overwrite=overwrite) as temporary_path,
        open_tensors(checkpoint, allow_requantize=allow_requantize) as source,
    ):
        tensors = _plan(source, name, target_type)
        check_disk_space(path, sum(tensor.num_bytes for tensor in tensors))
        writer = gguf.GGUFWriter(temporary_path, name)
        try:
            metadata = {
                "general.name": Path(checkpoint.name).name,
                "general.file_type": int(FILE_TYPES[target_type]),
                "general.quantization_version": QUANTIZATION_VERSION,
            }
            config = source.model.config
            metadata |= config_metadata(checkpoint.name, config, name)
            add_metadata(writer, metadata | dict(make_tokenizer_metadata(config.vocab_size)))
            factors = rope_factors(config)
            for tensor_name, values in factors.items():
                writer.add_tensor_info(tensor_name, values.shape, values.dtype, values.nbytes)
            for tensor in tensors:
                writer.add_tensor_info(
                    tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=tensor.type
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            _extend_to_full_size(temporary_path, writer)
            for values in factors.values():  # parts of the configuration
                writer.write_tensor_data(values)
                writer.flush()
            _check_header(checkpoint.name, temporary_path, path, config, check_header)
            for index, tensor in enumerate(tensors):
                writer.write_tensor_data(tensor.blocks(rounding_loss))
                progress("quantizing", (index + 1) / len(tensors))
        finally:
            writer.close()
    return rounding_loss


def _architecture_name(checkpoint: Checkpoint) -> str:
    """Return GGUF's name of the architecture. Raises ConfigError if Meltcore does not know one."""
    architectures = checkpoint.config.get("architectures") or ["nothing"]
    name = next((_ARCHITECTURE_NAMES[each] for each in architectures if each in _ARCHITECTURE_NAMES), None)
    if name is None:
        raise ConfigError(
            f"{checkpoint.name}: config.json names {', '.join(architectures)}, which is not written as GGUF; "
            f"these are: {', '.join(_ARCHITECTURE_NAMES)} (--to fp8 takes every architecture)"
        )
    return name


def _plan(source: SourceTensors, name: str, target_type: GGMLQuantizationType) -> list[_StoredTensor]:
    """Return the tensors of the file in their order. `name` is the architecture, `target_type` the type of matrices."""
    config, model_type = source.model.config, FAMILIES[name].model_type
    assert isinstance(source.model, Decoder)
    prefix = source.model.prefix
    sources: dict[str, list[tuple[str, SourceTensor]]] = {}
    for published_name, tensor in source.tensors.items():
        general_name = published_name.replace(prefix, "model.", 1)
        sources.setdefault(gguf_name(general_name, model_type), []).append((general_name, tensor))
    tensors = []
    for tensor_name, parts in sources.items():
        published_name, first = parts[0]
        is_stacked = ".experts." in published_name
        order = None
        if has_permuted_rows(published_name, model_type):
            order = torch.argsort(stored_rows(first.shape[0], config.head_dim))
        tensors.append(
            _StoredTensor(
                tensor_name,
                _stored_type(tensor_name, first, config, target_type),
                _stored_shape([tensor.shape for _, tensor in parts], is_stacked=is_stacked),
                tuple(tensor for _, tensor in parts),
                1.0 if includes_one(published_name, model_type) else 0.0,
                order,
            )
        )
    return tensors


def _stored_shape(shapes: Sequence[tuple[int, ...]], *, is_stacked: bool) -> tuple[int, ...]:
    """Return the shape of a tensor. The tensor may stack experts, or hold the rows of several matrices."""
    if is_stacked:
        return (len(shapes), *shapes[0])
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]


def _stored_type(
    name: str, tensor: SourceTensor, config: DecoderConfig, target_type: GGMLQuantizationType
) -> GGMLQuantizationType:
    """Return the type of a tensor in the file.

    Vectors and routers are float32, as llama.cpp expects. A matrix whose rows are not whole blocks keeps its type. One
    kernel computes all experts of a layer, so if one expert keeps its type, all of them do. The output head is at least
    Q8_0.
    """
    if len(tensor.shape) < 2 or ROUTER in name:
        return GGMLQuantizationType.F32
    columns = [tensor.shape[-1]]
    if "_exps." in name:
        assert config.experts is not None
        columns = [config.hidden_size, config.experts.moe_intermediate_size]
    if any(size % GGML_QUANT_SIZES[target_type][0] for size in columns):
        return _TYPES.get(tensor.dtype, GGMLQuantizationType.F32)
    is_head = name == HEAD or (name == EMBEDDING and config.tie_word_embeddings)
    return GGMLQuantizationType.Q8_0 if is_head else target_type


def config_metadata(model: str, config: DecoderConfig, name: str) -> dict[str, Any]:
    """Return the metadata of a network's configuration.

    `name` is the name of the architecture. Errors name `model`. Raises ConfigError if only some layers of the network
    have experts.
    """
    values: dict[str, Any] = {key: getattr(config, field) for field, key in REQUIRED_KEYS.items()}
    values |= {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    if config.experts is None:
        values["feed_forward_length"] = config.intermediate_size
    elif config.experts.dense_layers:
        raise ConfigError(
            f"{model}: layers {sorted(config.experts.dense_layers)[:5]} have no experts; "
            f"in a GGUF file of {name} all layers have"
        )
    else:
        values |= {key: getattr(config.experts, field) for field, key in EXPERT_KEYS.items()}
        values["expert_weights_norm"] = config.experts.norm_topk_prob
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    elif name == "phi3":
        values["attention.sliding_window"] = 0  # as llama.cpp's converter writes it for Phi-4
    if name == "gemma3":
        values |= _gemma_metadata(config)
    if name == "granite":
        values |= {GRANITE_KEYS["embedding_multiplier"]: config.embedding_scale or 1.0}
        values |= {GRANITE_KEYS["attention_multiplier"]: config.attention_scale}
        values |= {GRANITE_KEYS[field]: getattr(config, field) for field in ("residual_multiplier", "logits_scaling")}
    values |= _rope_metadata(config)
    return {f"{name}.{key}": value for key, value in values.items()}


def _gemma_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of Gemma 3 that other families lack. No published file of Gemma 3 needs these keys."""
    assert config.attention_scale is not None
    assert config.rope_local_theta is not None
    # Without a type, files of 4B and larger models stand for the published factor.
    values = {
        "attention.scale": float(config.attention_scale),
        "rope.freq_base_swa": float(config.rope_local_theta),
        "rope.scaling.type": "none",
    }
    layers = range(config.num_hidden_layers)
    if config.sliding_layers != {layer for layer in layers if (layer + 1) % GEMMA_PATTERN}:
        values["attention.sliding_window_pattern"] = [layer in config.sliding_layers for layer in layers]
    return values


def _rope_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of the scaling of rotary frequencies.

    The factors of llama3 and LongRoPE are tensors instead (`rope_factors`). Files of llama.cpp's converter have no key
    for the type of LongRoPE.
    """
    scaling = config.rope_scaling
    if scaling is None or isinstance(scaling, Llama3Scaling):
        return {}
    if isinstance(scaling, LongRopeScaling):
        return {
            "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
            "rope.scaling.attn_factor": scaling.attention_factor,
        }
    values: dict[str, Any] = {
        "rope.scaling.type": scaling.rope_type,
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
    }
    if isinstance(scaling, YarnScaling):
        values |= {
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
    return values


def rope_factors(config: DecoderConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Return the divisors of llama3's or longrope's rotary frequencies by tensor name, [rotary_dim / 2] float32."""
    scaling = config.rope_scaling
    if isinstance(scaling, LongRopeScaling):
        factors = {LONG_FACTORS: scaling.long_factor, SHORT_FACTORS: scaling.short_factor}
        return {name: np.array(values, dtype=np.float32) for name, values in factors.items()}
    if not isinstance(scaling, Llama3Scaling):
        return {}
    unscaled, scaled = (inverse_frequencies(config.rotary_dim, config.rope_theta, each) for each in (None, scaling))
    return {ROPE_FACTORS: (unscaled / scaled).float().numpy()}


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add values by their types: integers as uint32, floats as float32, lists as arrays."""
    for key, value in metadata.items():
        if value == []:  # the package writes none
            continue
        is_number = type(value) is int
        writer.add_key_value(key, value, GGUFValueType.UINT32 if is_number else GGUFValueType.get_type(value))


def _extend_to_full_size(path: Path, writer: gguf.GGUFWriter) -> None:
    """Extend the file, whose header is written, to its full size. The reader rejects a header without its tensors."""
    sizes = (path.stat().st_size, *(tensor.nbytes for tensor in writer.tensors[0].values()))
    os.truncate(path, sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes))


def _check_header(
    model: str, temporary_path: Path, path: Path, config: DecoderConfig, check_header: HeaderCheck
) -> None:
    """Raise ConfigError if the file, whose header is written, would be read as another network or tokenizer.

    This check finds any part of a configuration for which GGUF has no keys. Errors name the file `path`.
    """
    written = GGUFModel(temporary_path)
    written.path = path
    try:
        read = read_config(written)
        with torch.device("meta"):
            read_fields = ARCHITECTURES[read["architectures"][0]](read).config
    except ConfigError as error:
        raise ConfigError(f"{model} cannot be written as GGUF: {error}") from error
    for field in fields(DecoderConfig):
        expected, read_value = getattr(config, field.name), getattr(read_fields, field.name)
        if expected != read_value:
            raise ConfigError(
                f"{model}: {field.name} is {expected}; a GGUF file cannot state it and is read as {read_value}"
            )
    check_header(written)
