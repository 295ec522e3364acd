"""Distinguishes GGUF files of models from other GGUF files in their folder, such as importance matrices.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel

_KINDS = {
    "adapter": "an adapter",
    "clip": "a multimodal projector",
    "controlvector": "a control vector",
    "imatrix": "an importance matrix",
    "mmproj": "a multimodal projector",
}
_KIND_KEYS = ("general.type", "general.architecture")
# A model that was quantized with an importance matrix: its name comes before the word, and its format behind.
_QUANTIZED_WITH_MATRIX = re.compile(r".+imatrix.*[-._](i?q\d|tq\d|b?f16|f32|mxfp4)")


def other_kind(model: GGUFModel) -> str | None:
    """Return the kind of file that the header of a GGUF file describes, with the reason, or None for a model."""
    for key in _KIND_KEYS:
        value = model.metadata.get(key)
        if isinstance(value, str) and value in _KINDS:
            return f"{_KINDS[value]} ({key} is {value!r})"
    has_tensors = bool(model.file_by_tensor or model.unknown_types)
    is_vocabulary = not has_tensors and "tokenizer.ggml.tokens" in model.metadata
    return "a vocabulary (it has no tensors)" if is_vocabulary else None


def kind_by_name(name: str) -> str | None:
    """Return the kind of file that the name of a GGUF file stands for, or None if it may be a model's name."""
    file_name = name.rpartition("/")[2].lower()
    if "mmproj" in file_name:
        return f"{_KINDS['mmproj']} by its name"
    is_matrix = "imatrix" in file_name and _QUANTIZED_WITH_MATRIX.match(file_name) is None
    return f"{_KINDS['imatrix']} by its name" if is_matrix else None


def other_kinds(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the kind of each GGUF file of a folder that is not a model, by name.

    The name decides the kind of a file that cannot be read.
    """
    kinds = {}
    for name in names:
        try:
            kind = other_kind(GGUFModel(folder / name))
        except ConfigError:
            kind = kind_by_name(name)
        if kind is not None:
            kinds[name] = kind
    return kinds
