"""Makes the layers of a model keep the 4-bit weights of a published AWQ or GPTQ checkpoint.

The headers of the files determine what a layer keeps: which matrices are quantized, the type of their scales, and
whether their inputs are in activation order. Only the small tensors g_idx are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from meltcore.common.errors import ConfigError
from meltcore.kernels.quant.int4 import GROUP_SIZES, Int4Type
from meltcore.layers.embedding import ParallelLMHead
from meltcore.layers.feed_forward import SparseMoeBlock
from meltcore.layers.int4_weights import WORD_VALUES, Int4Format, Layout, int4_method
from meltcore.layers.merged_weight import merged_method
from meltcore.layers.quantization import UNQUANTIZED
from meltcore.models.checkpoints.tensor_file import TensorFile
from meltcore.models.configs.quantization_config import AwqConfig, GptqConfig
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.model import Model
from meltcore.models.quantized.quantization import modules_of_experts, tensors_of_layers

Int4Config = AwqConfig | GptqConfig
_SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def quantize_to_int4(
    model: Model, config: Int4Config, files: Sequence[TensorFile], *, is_size_only: bool = False
) -> None:
    """Make every layer of a model on the meta device keep the 4-bit weights of `files`.

    Without `files`, for dummy weights or a plan, layers get the formats that `config` states. Raises ConfigError for
    unsupported settings, for tensors that contradict the settings, and for a shard that cuts a group.
    """
    assert isinstance(model, Decoder)
    _check_settings(config)
    layers = [(layer, [name.removesuffix(".weight") for name in names]) for layer, names in tensors_of_layers(model)]
    if files:
        with torch.device("cpu"):
            formats = stored_formats(config, files, model.canonical_name)
    else:
        if not is_size_only and isinstance(config, GptqConfig) and config.desc_act:
            setting = "config.json: quantization_config.desc_act is true"
            raise ConfigError(f"{setting}; dummy weights have no activation order")
        formats = _stated_formats(config, layers)
    for layer, modules in layers:
        if isinstance(layer, SparseMoeBlock):
            modules = modules_of_experts(layer, modules)
        stored = [formats.get(module) for module in modules]
        if isinstance(layer, SparseMoeBlock) and len(set(stored)) > 1:
            other = next(module for module, each in zip(modules, stored, strict=True) if each != stored[0])
            raise ConfigError(f"experts must have one format; {other} is stored otherwise than {modules[0]}")
        for module, each in zip(modules, stored, strict=True):
            if each is None and not isinstance(layer, ParallelLMHead) and config.quantizes(module):
                raise ConfigError(
                    f"{module} is not quantized, but config.json: quantization_config does not exclude it "
                    f"(quant_method {config.quant_method})"
                )
        if isinstance(layer, SparseMoeBlock):
            stored = stored[:1]
        if any(stored):
            try:
                layer.quantize(merged_method([UNQUANTIZED if each is None else int4_method(each) for each in stored]))
            except ValueError as error:
                raise ConfigError(f"{modules[0]}: {error}") from error


def _check_settings(config: Int4Config) -> None:
    """Raise ConfigError for a setting that no kernel supports."""
    if config.group_size not in GROUP_SIZES:
        supported = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(
            f"config.json: quantization_config.group_size is {config.group_size}; supported are {supported}"
        )
    if isinstance(config, AwqConfig) and not config.zero_point:
        raise ConfigError("config.json: quantization_config.zero_point is false; AWQ is supported with zero points")


def _stated_formats(config: Int4Config, layers: Iterable[tuple[object, list[str]]]) -> dict[str, Int4Format]:
    """Return the formats of all modules that `config` quantizes."""
    stated_format = Int4Format(_layout(config), Int4Type(config.group_size))
    modules: list[str] = []
    for layer, names in layers:
        if isinstance(layer, ParallelLMHead):
            modules += [
                name for name in names if name == "lm_head" and isinstance(config, GptqConfig) and config.lm_head
            ]
        else:
            names = modules_of_experts(layer, names) if isinstance(layer, SparseMoeBlock) else names
            modules += [name for name in names if config.quantizes(name)]
    return dict.fromkeys(modules, stated_format)


def _layout(config: Int4Config) -> Layout:
    if isinstance(config, AwqConfig):
        return "awq"
    return "gptq_v2" if config.checkpoint_format == "gptq_v2" else "gptq"


def stored_formats(
    config: Int4Config, files: Sequence[TensorFile], canonical_name: Callable[[str], str]
) -> dict[str, Int4Format]:
    """Return the format of each module whose matrix is stored as `qweight`."""
    locations = {canonical_name(name): (file, name) for file in files for name in file.entries}
    modules = [name.removesuffix(".qweight") for name in locations if name.endswith(".qweight")]
    if not modules:
        raise ConfigError(
            f"{files[0].path.parent} has no tensor *.qweight, but config.json: quantization_config.quant_method is "
            f"{config.quant_method}"
        )
    return {module: _stored_format(config, module, locations) for module in modules}


def _stored_format(config: Int4Config, module: str, locations: Mapping[str, tuple[TensorFile, str]]) -> Int4Format:
    file, name = locations[f"{module}.qweight"]
    if not config.quantizes(module):
        raise ConfigError(f"{file.path.name}: {name} is quantized; config.json: quantization_config excludes it")
    if f"{module}.scales" not in locations:
        raise ConfigError(f"{file.path.name}: {name} has no tensor {module}.scales")
    scales_file, scales_name = locations[f"{module}.scales"]
    scale_type = scales_file.entries[scales_name].dtype_name
    if scale_type not in _SCALE_DTYPES:
        raise ConfigError(f"{scales_file.path.name}: {scales_name} is stored as {scale_type}; scales are F16 or BF16")
    shape = file.entries[name].shape
    inputs = shape[0] * (1 if config.quant_method == "awq" else WORD_VALUES) if shape else 0
    has_g_idx = f"{module}.g_idx" in locations
    return Int4Format(
        _layout(config),
        Int4Type(config.group_size, _SCALE_DTYPES[scale_type]),
        has_g_idx,
        f"{module}.bias" in locations,
        _group_index(config, inputs, *locations[f"{module}.g_idx"]) if has_g_idx else b"",
    )


def _group_index(config: Int4Config, inputs: int, file: TensorFile, name: str) -> bytes:
    """Return the group of each input if the inputs are in activation order, otherwise an empty value.

    Raises ConfigError if the group sizes or the order contradict the configuration.
    """
    location = f"{file.path.name}: {name}"
    entry, group_size = file.entries[name], config.group_size
    if entry.dtype_name != "I32" or entry.shape != (inputs,):
        raise ConfigError(f"{location} is {entry.dtype_name} {list(entry.shape)}; {inputs} inputs need I32 [{inputs}]")
    groups = file.read(name)
    num_groups = math.ceil(inputs / group_size)
    outside = (groups < 0) | (groups >= num_groups)
    if outside.any():
        raise ConfigError(f"{location} names group {int(groups[outside][0])}; {inputs} inputs have {num_groups} groups")
    if torch.equal(groups, torch.arange(inputs, dtype=torch.int32) // group_size):
        return b""
    sizes = torch.bincount(groups, minlength=num_groups)
    if inputs % group_size or (sizes != group_size).any():
        raise ConfigError(
            f"{location} has groups of {int(sizes.min())} to {int(sizes.max())} inputs, not of {group_size}"
        )
    if not (isinstance(config, GptqConfig) and config.desc_act):
        raise ConfigError(f"{location} is in activation order; config.json: quantization_config.desc_act is false")
    return groups.numpy().tobytes()
