"""The quantization_config of a published checkpoint's config.json: its format, and the modules that have it.

A module is named by its tensors without their last part: `model.layers.0.mlp.down_proj`. This module does not import
torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meltcore.models.configs.config_fields import Fields, short_json

FP8_BLOCK = (128, 128)  # rows and columns that share a scale
Strategy = Literal["channel", "tensor", "block"]
_NAME_CHARS = 64  # a long module name
_MAX_PATHS = 1_000_000  # about 10 ms of one name
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escape or a class
_UNBOUNDED = re.compile(r"\)[*+{]|\(\?(?![:=!]|<[=!]|i\))")  # a repeated group, or a construct that may hide one


@dataclass(frozen=True)
class BlockFp8Config:
    """FP8 weights with a scale per block of 128 x 128. Activations are quantized per token and block of 128 columns.

    The modules in `not_converted`, and all modules within them, keep their type.
    """

    quant_method: ClassVar[str] = "fp8"
    scale_suffix: ClassVar[str] = "weight_scale_inv"  # a factor of the values all the same
    not_converted: tuple[str, ...] = ()

    def strategy(self, module: str) -> Strategy | None:
        """Return how the weight of a linear layer shares scales, or None if the layer is not quantized."""
        return "block" if self.quantizes(module) else None

    def quantizes(self, module: str) -> bool:
        """Return whether a linear layer or an expert's matrix is quantized."""
        return not _is_within(module, self.not_converted)


@dataclass(frozen=True)
class Fp8Group:
    """A group of compressed-tensors: its modules, and how their FP8 weights share scales.

    `targets` are "Linear" for every linear layer, names of modules, or "re:" and a regular expression. Activations are
    quantized per token. Activations of block-scaled weights are quantized per token and block of 128 columns.
    """

    targets: tuple[str, ...]
    strategy: Strategy


@dataclass(frozen=True)
class CompressedFp8Config:
    """FP8 weights as compressed-tensors stores them.

    The modules in `ignore` keep their type. They are written in the same way as targets.
    """

    quant_method: ClassVar[str] = "compressed-tensors"
    scale_suffix: ClassVar[str] = "weight_scale"
    groups: tuple[Fp8Group, ...]
    ignore: tuple[str, ...] = ()

    def strategy(self, module: str) -> Strategy | None:
        """Return how the weight of a linear layer shares scales, or None if the layer is not quantized."""
        if _is_target(module, self.ignore):
            return None
        return next((group.strategy for group in self.groups if _is_target(module, group.targets)), None)

    def quantizes(self, module: str) -> bool:
        """Return whether a linear layer or an expert's matrix is quantized."""
        return self.strategy(module) is not None


@dataclass(frozen=True)
class AwqConfig:
    """4-bit weights of AWQ. Each output has a scale and a zero point per `group_size` input columns.

    A `group_size` of -1 means one group of all columns.
    """

    quant_method: ClassVar[str] = "awq"
    bits: int
    group_size: int
    zero_point: bool
    version: str
    not_converted: tuple[str, ...] = ()

    def quantizes(self, module: str) -> bool:
        """Return whether a linear layer or an expert's matrix is quantized."""
        return not _is_within(module, self.not_converted)


@dataclass(frozen=True)
class GptqConfig:
    """Integer weights of GPTQ. Each output has a scale and a zero point per `group_size` input columns.

    Args:
        group_size: -1 means one group of all columns.
        desc_act: whether the columns are in activation order. The checkpoint then names the group of each column.
        sym: whether every zero point is the middle of the range.
        checkpoint_format: "gptq" stores zero points minus one. "gptq_v2" stores the zero points themselves.
        lm_head: whether the output head is quantized too.
    """

    quant_method: ClassVar[str] = "gptq"
    bits: int
    group_size: int
    desc_act: bool
    sym: bool
    checkpoint_format: str
    lm_head: bool
    not_converted: tuple[str, ...] = ()
    not_converted_patterns: tuple[str, ...] = ()

    def quantizes(self, module: str) -> bool:
        """Return whether a linear layer or an expert's matrix is quantized."""
        return not _is_within(module, self.not_converted) and not any(
            re.match(pattern, module) for pattern in self.not_converted_patterns
        )


QuantizationConfig = BlockFp8Config | CompressedFp8Config | AwqConfig | GptqConfig


def read_quantization_config(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Read quantization_config from a parsed config.json, at its top level or in text_config.

    Returns None if config.json has no quantization_config. Raises ConfigError if the quantization method is not
    supported, or if a setting is missing or wrong.
    """
    top_fields = Fields(config)
    for fields in (top_fields, top_fields.nested_fields("text_config")):
        if fields.has("quantization_config"):
            settings = fields.nested_fields("quantization_config")
            method = settings.required("quant_method")["quant_method"]
            if method not in _READERS:
                raise settings.rule_error("quant_method", f"one of {', '.join(_READERS)}")
            return _READERS[method](settings)
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json without its quantization_config, at its top level and in text_config."""
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    if isinstance(text := fields.get("text_config"), dict):
        fields["text_config"] = {name: value for name, value in text.items() if name != "quantization_config"}
    return fields


def _read_block_fp8(fields: Fields) -> BlockFp8Config:
    _require(fields, "weight_block_size", list(FP8_BLOCK))
    _require(fields, "activation_scheme", "dynamic")
    if fields.has("fmt"):
        _require(fields, "fmt", "e4m3")
    return BlockFp8Config(_read_modules(fields, "modules_to_not_convert") + _read_modules(fields, "ignored_layers"))


def _read_compressed(fields: Fields) -> CompressedFp8Config:
    _require(fields, "format", "float-quantized", "naive-quantized")
    if fields.has("kv_cache_scheme"):
        raise fields.unsupported_field("kv_cache_scheme")
    groups = fields.required("config_groups")["config_groups"]
    if not groups:
        raise fields.rule_error("config_groups", "an object with one group at least")
    group_fields = fields.nested_fields("config_groups")
    return CompressedFp8Config(
        tuple(_read_group(group_fields.entry(name)) for name in groups), _read_modules(fields, "ignore")
    )


def _read_group(fields: Fields) -> Fp8Group:
    targets = _read_modules(fields, "targets")
    if not targets:
        raise fields.rule_error("targets", "a list of module names with one at least")
    weights, inputs = fields.nested_fields("weights"), fields.nested_fields("input_activations")
    for settings in (weights, inputs):
        _require(settings, "type", "float")
        _require(settings, "num_bits", 8)
        _require_true(settings, "symmetric", default=True)
    _require(weights, "strategy", "channel", "tensor", "block")
    strategy: Strategy = weights.optional("strategy")
    if not inputs.optional("dynamic", False):
        raise inputs.rule_error("dynamic", "true: scales of activations that a checkpoint stores are not read")
    _require(inputs, "strategy", "group" if strategy == "block" else "token")
    if strategy == "block":
        _require(weights, "block_structure", list(FP8_BLOCK))
        _require(inputs, "group_size", FP8_BLOCK[1])
    return Fp8Group(targets, strategy)


def _read_awq(fields: Fields) -> AwqConfig:
    values = fields.required("bits", "group_size")
    _require(fields, "bits", 4)
    version = fields.optional("version", "gemm").lower()
    if version != "gemm":
        raise fields.rule_error("version", "gemm")
    return AwqConfig(
        **values,
        zero_point=fields.optional("zero_point", True),
        version=version,
        not_converted=_read_modules(fields, "modules_to_not_convert"),
    )


def _read_gptq(fields: Fields) -> GptqConfig:
    values = fields.required("bits", "group_size")
    _require(fields, "bits", 4)
    if fields.has("checkpoint_format"):
        _require(fields, "checkpoint_format", "gptq", "gptq_v2")
    overrides = fields.optional("dynamic") or {}
    if not isinstance(overrides, dict) or not all(key.startswith("-:") for key in overrides):
        raise fields.rule_error("dynamic", 'an object of "-:" and regular expressions: all other modules are alike')
    patterns = tuple(key.removeprefix("-:") for key in overrides)
    _check_patterns(fields, "dynamic", patterns)
    return GptqConfig(
        **values,
        desc_act=fields.optional("desc_act", False),
        sym=fields.optional("sym", True),
        checkpoint_format=fields.optional("checkpoint_format", "gptq"),
        lm_head=fields.optional("lm_head", False),
        not_converted=_read_modules(fields, "modules_to_not_convert"),
        not_converted_patterns=patterns,
    )


_READERS: dict[str, Callable[[Fields], QuantizationConfig]] = {
    BlockFp8Config.quant_method: _read_block_fp8,
    CompressedFp8Config.quant_method: _read_compressed,
    AwqConfig.quant_method: _read_awq,
    GptqConfig.quant_method: _read_gptq,
}
METHODS = tuple(_READERS)  # values of quant_method that are read


def _require(fields: Fields, name: str, *supported: object) -> None:
    """Raise ConfigError unless the field has one of the supported values."""
    if fields.optional(name) not in supported:
        raise fields.rule_error(name, " or ".join(str(value) for value in supported))


def _require_true(fields: Fields, name: str, *, default: bool) -> None:
    if not fields.optional(name, default):
        raise fields.rule_error(name, "true")


def _read_modules(fields: Fields, name: str) -> tuple[str, ...]:
    """Return a list of modules. Raises ConfigError for a regular expression that is invalid or too slow."""
    names = tuple(fields.optional(name, ()))
    _check_patterns(fields, name, [entry.removeprefix("re:") for entry in names if entry.startswith("re:")])
    return names


def _check_patterns(fields: Fields, name: str, patterns: Iterable[str]) -> None:
    """Raise ConfigError if a regular expression is invalid, or could take too long on a module's name."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            reason = f"which is invalid: {error}"
        else:
            if _max_paths(pattern) <= _MAX_PATHS:
                continue
            reason = "which could take too long: repeat single characters only, and at most three times"
        raise fields.field_error(name, f"has the regular expression {short_json(pattern)}, {reason}")


def _max_paths(pattern: str) -> float:
    """Return an upper bound of the number of ways in which a valid pattern can match the start of a name.

    Python tries all of these ways before it rejects a name. Positions do not matter for the bound: every repeat of a
    character is counted as `*`, and every alternative as possible everywhere.
    """
    plain = _ONE_CHARACTER.sub("x", pattern)
    if _UNBOUNDED.search(plain):
        return math.inf
    repeats = len(re.findall(r"[*+{]", plain))
    optionals = plain.count("?") - plain.count("(?")
    branches = [part.count("|") + 1 for part in re.split(r"[()]", plain) if "|" in part]
    if repeats + optionals + len(branches) > _NAME_CHARS:  # no need to compute a huge number
        return math.inf
    return math.comb(_NAME_CHARS + repeats, repeats) * math.prod(branches + [2] * optionals)


def _is_within(module: str, names: tuple[str, ...]) -> bool:
    """Return whether the path of a module contains one of the names, as whole parts of the path."""
    # The first test is for speed: checkpoints list some 500 names, and each linear layer is compared with all.
    return any(name in module and f".{name}." in f".{module}." for name in names)


def _is_target(module: str, targets: tuple[str, ...]) -> bool:
    """Return whether a linear layer is one of the targets of compressed-tensors."""
    return any(
        re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target in ("Linear", module)
        for target in targets
    )
