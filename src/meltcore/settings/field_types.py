"""Defines the types of fields of fleet.yaml, with their limits, and with the expected values that errors show."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from meltcore.common.options import (
    ADDRESS_FORM,
    ADDRESS_PATTERN,
    ORIGIN_FORM,
    ORIGIN_PATTERN,
    Size,
    address,
    is_number,
    not_empty,
    origin,
)
from meltcore.common.tasks import tasks

ANY_LANGUAGE = "*"
KEY_NAME_PATTERN = r"^[^\s\x00-\x1f\x7f-\xa0]{1,64}$"
KEY_NAME_FORM = "a name of 1 to 64 printable characters without spaces"
_CODE = r"[a-z]{3}_[A-Z][a-z]{3}"
_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$"
# For the file alone: `serve ./model` serves a model of the name "./model".
Name: TypeAlias = Annotated[
    str,
    Meta(
        extra={
            "expected": "a name of letters, digits and . _ / : -, at most 128 of them",
            "file_pattern": _NAME_PATTERN,
        },
        extra_json_schema={"pattern": _NAME_PATTERN},
    ),
]
LanguageCode: TypeAlias = Annotated[
    str, Meta(pattern=rf"^{_CODE}$", extra={"expected": "a FLORES code such as kan_Knda"})
]
Language: TypeAlias = Annotated[
    str, Meta(pattern=rf"^({_CODE}|\*)$", extra={"expected": 'a FLORES code such as kan_Knda, or "*"'})
]
# Its value is not repeated in errors: a key itself may stand there by mistake.
VariableName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=128,
        extra={"expected": "the name of an environment variable", "is_secret": True},
    ),
]
# A space would end the name in a file of keys.
KeyName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=KEY_NAME_PATTERN,
        extra={"expected": KEY_NAME_FORM},
    ),
]
Sha256: TypeAlias = Annotated[
    str, Meta(pattern="^[0-9a-fA-F]{64}$", extra={"expected": "64 hexadecimal digits", "is_secret": True})
]
Text: TypeAlias = Annotated[str, Meta(min_length=1, extra={"reader": not_empty})]
TaskName: TypeAlias = Annotated[str, Meta(extra={"choices": tasks})]  # of the built-in tasks, or of another package's
# A password in it is not repeated in errors.
Url: TypeAlias = Annotated[
    str,
    Meta(pattern=ADDRESS_PATTERN, extra={"expected": ADDRESS_FORM, "is_address": True, "reader": address}),
]
Path: TypeAlias = Annotated[str, Meta(pattern=r"^/[!-~]*$", extra={"expected": "a path such as /v1/chat/completions"})]
Bytes: TypeAlias = Annotated[Size, Meta(extra_json_schema={"format": "size"})]
Origin: TypeAlias = Annotated[
    str, Meta(pattern=rf"^({ORIGIN_PATTERN})$", extra={"expected": ORIGIN_FORM, "reader": origin})
]
# Upper limits are far above what any machine serves: they refuse typing errors before a plan computes with them.
Processes: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
Replicas: TypeAlias = Annotated[int, Meta(ge=1, le=64)]
Sequences: TypeAlias = Annotated[int, Meta(ge=1, le=65_536)]
ContextTokens: TypeAlias = Annotated[int, Meta(ge=2, le=16_777_216)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=16_777_216)]
QueueUnits: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
QueueRequests: TypeAlias = Annotated[int, Meta(ge=0, le=100_000_000)]
Share: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
PerMinute: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
PositiveSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=31_536_000)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=31_536_000)]
AudioSeconds: TypeAlias = Annotated[float, Meta(ge=1, le=1_000_000_000)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65_535)]
GpuId: TypeAlias = Annotated[int, Meta(ge=0, le=1023)]
CallParser: TypeAlias = Literal[
    "auto", "none", "hermes", "qwen3_coder", "mistral", "functiongemma", "llama3_json", "pythonic"
]
Device: TypeAlias = (
    Annotated[Literal["auto", "cuda", "cpu"], Meta(extra={"other_form": "a list of GPU numbers such as [0]"})]
    | Annotated[tuple[GpuId, ...], Meta(min_length=1)]
)


def device_value(text: str) -> str | tuple[int, ...]:
    """Convert the text after --device to a value of `device`. Raises ArgumentTypeError for an invalid text."""
    if text in ("auto", "cpu", "cuda"):
        return text
    name, _, gpu = text.partition(":")
    if name != "cuda" or not is_number(gpu):
        raise ArgumentTypeError(f"{text}: must be auto, cpu, cuda or cuda:N")
    return (int(gpu),)


class FleetSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all sections of fleet.yaml. Fields are set by name, and unknown fields are errors."""
