"""Refuses weights that contain infinity or NaN, while they are loaded.

One such value makes every answer meaningless, and no error says why. Damaged files have such values, and so have files
that were saved after a training run diverged. The sum of a tensor is finite only if all values are finite. It takes one
pass over memory that was just written: 19 GB per second of one core in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import torch

from meltcore.common.errors import ConfigError

FP8 = torch.float8_e4m3fn  # it has no infinity, and two bytes that are no number
_NAN_INT8, _NEGATIVE_NAN_UINT8 = 0x7F, 0xFF  # each the largest of all bytes in its type
_MAX_PENDING = 256  # results on a GPU that are waited for together


class FiniteCheck:
    """Checks the loaded tensors of one file.

    Tensors on a GPU are checked there, and `finish` waits for these checks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def add(self, name: str, values: torch.Tensor) -> None:
        """Check a part of the tensor `name`. Raises ConfigError if a value is not finite.

        On a GPU the error may be about a part that was added earlier.
        """
        if not values.is_floating_point() or values.numel() == 0:
            return
        finite = seems_finite(values)
        if not finite.is_cuda:
            self._refuse(name, values, finite)
            return
        self._pending.append((name, values, finite))
        if len(self._pending) >= _MAX_PENDING:
            self.finish()

    def finish(self) -> None:
        """Raise ConfigError if a part that was added is not finite."""
        pending, self._pending = self._pending, []
        if pending and not torch.stack([finite for *_, finite in pending]).all():
            for name, values, finite in pending:
                self._refuse(name, values, finite)

    def _refuse(self, name: str, values: torch.Tensor, finite: torch.Tensor) -> None:
        # The sum of float16 may be infinite where no value is.
        if not finite and (values.dtype == FP8 or not values.isfinite().all()):
            dtype = str(values.dtype).removeprefix("torch.")
            raise ConfigError(f"{self._path.name}: {name} has values that are not finite numbers in {dtype}")


def seems_finite(values: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor without dimensions that is True if all values are finite.

    False may also mean that only the sum of the values is not finite.
    """
    if values.dtype != FP8:
        return values.sum().isfinite()
    largest, largest_unsigned = values.view(torch.int8).amax(), values.view(torch.uint8).amax()
    return (largest < _NAN_INT8) & (largest_unsigned < _NEGATIVE_NAN_UINT8)
