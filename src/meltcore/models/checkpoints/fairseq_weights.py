"""Gives the tensors of a fairseq checkpoint file the names that they have in published safetensors files.

This module needs torch. It is separate from fairseq_config.py, which API servers import without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from meltcore.models.checkpoints.fairseq_config import model_tensors
from meltcore.models.checkpoints.tensor_file import TensorEntry, TensorFile
from meltcore.models.checkpoints.torch_archive import TorchArchive

_HEAD = "decoder.output_projection.weight"
# Computed tables, and versions of formats.
_UNUSED_TENSORS = ("version", "embed_positions._float_tensor")


class FairseqWeights(TensorFile):
    """The tensors of an open checkpoint_best.pt by their published names. They are read in place."""

    DTYPES: ClassVar = {"FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16}

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ConfigError if the file has another structure."""
        tensors = model_tensors(TorchArchive(path))
        super().__init__(path)
        self._stored_names = {_published_name(name): name for name in tensors if not name.endswith(_UNUSED_TENSORS)}
        self.entries = {name: TensorEntry(*tensors[stored]) for name, stored in self._stored_names.items()}

    def stored_name(self, name: str) -> str:
        """Return fairseq's name of a tensor."""
        return self._stored_names.get(name, name)


def _published_name(name: str) -> str:
    return "lm_head.weight" if name == _HEAD else f"model.{name}"
