"""Reads the tensors of a pytorch_model.bin, which torch.save has written. Nothing of the file is ever run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.tensor_file import TensorEntry, TensorFile
from meltcore.models.checkpoints.torch_archive import StoredTensor, TorchArchive


class TorchFile(TensorFile):
    """An open pytorch_model.bin. `entries` has its tensors by name, which are read in place."""

    DTYPES: ClassVar = {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
    }

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ConfigError if it is unreadable, or if a tensor is not contiguous."""
        root = TorchArchive(path).root
        if not isinstance(root, Mapping) or not all(isinstance(name, str) for name in root):
            raise ConfigError(f"{path} must hold tensors by name; convert it to model.safetensors")
        for name, tensor in root.items():
            if not isinstance(tensor, StoredTensor):
                raise ConfigError(f"{path}: {name} must be a contiguous tensor; convert the file to model.safetensors")
        super().__init__(path)
        self.entries = {name: TensorEntry(*tensor) for name, tensor in root.items()}
