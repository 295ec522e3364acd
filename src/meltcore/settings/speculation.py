"""Defines the settings of speculative decoding, with the names that vLLM has for them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
from msgspec import Meta

from meltcore.common.errors import ConfigError
from meltcore.common.options import json_object

MAX_DRAFTS = 7  # of a sequence in a step
_MAX_NGRAM = 8
_NgramTokens = Annotated[int, Meta(ge=1, le=_MAX_NGRAM)]
Method = Literal["ngram", "mtp", "qwen3_5_mtp", "qwen3_next_mtp"]  # the last two are vLLM's older names of mtp


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are proposed and accepted.

    The method "ngram" looks up an n-gram of `prompt_lookup_max` to `prompt_lookup_min` tokens. "mtp" runs the model's
    layer for multi-token prediction, `num_speculative_tokens` times per step. With the `rejection_sample_method`
    "synthetic" drafts are accepted at random, so that a step with all drafts yields `synthetic_acceptance_length`
    tokens on average: only for measurements with dummy weights.
    """

    method: Method
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)]
    prompt_lookup_max: _NgramTokens = 4
    prompt_lookup_min: _NgramTokens = 2
    rejection_sample_method: Literal["strict", "synthetic"] = "strict"
    synthetic_acceptance_length: float | None = None

    @property
    def has_mtp(self) -> bool:
        """Whether the model's layer for multi-token prediction drafts tokens."""
        return self.method != "ngram"

    @property
    def description(self) -> str:
        """The method, and the length of synthetic acceptance, whose texts and speeds do not come from the model."""
        method, length = "mtp" if self.has_mtp else self.method, self.synthetic_acceptance_length
        return method if length is None else f"{method}, synthetic acceptance length {length:g}"

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """Return the settings of `--speculative-config`, or None if there are none. Raises ConfigError."""
        if settings is None:
            return None
        try:
            config = msgspec.convert(dict(settings), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"speculative_config: got {json.dumps(settings)}: {error}. It takes "
                f"method ({', '.join(get_args(Method))}), num_speculative_tokens (1 to {MAX_DRAFTS}), "
                f"prompt_lookup_max and prompt_lookup_min (1 to {_MAX_NGRAM}) of ngram, rejection_sample_method "
                "(strict, synthetic), and synthetic_acceptance_length"
            ) from None
        if config.has_mtp and (given := [name for name in settings if name.startswith("prompt_lookup")]):
            raise ConfigError(f"speculative_config: {given[0]} is for method ngram; got {config.method}")
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min {config.prompt_lookup_min} is more than prompt_lookup_max "
                f"{config.prompt_lookup_max}"
            )
        length, most = config.synthetic_acceptance_length, 1 + config.num_speculative_tokens
        if (length is not None) != (config.rejection_sample_method == "synthetic"):
            raise ConfigError(
                "speculative_config: synthetic_acceptance_length belongs to rejection_sample_method synthetic; "
                f"got {length} with {config.rejection_sample_method}"
            )
        if length is not None and not 1 <= length <= most:
            raise ConfigError(
                f"speculative_config: synthetic_acceptance_length must be from 1 to {most}, the tokens of a step; "
                f"got {length:g}"
            )
        return config


def speculative_settings(text: str) -> dict[str, Any]:
    """Return the settings in a text of JSON. Raises ArgumentTypeError if they are wrong."""
    settings = json_object(text)
    try:
        SpeculativeConfig.of(settings)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return settings
