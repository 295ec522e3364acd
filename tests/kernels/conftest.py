"""Running Triton bodies: natively on a GPU, and else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_tools import kernel_modules
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_convert_float = interpreter._convert_float


def _convert_with_rounding(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: Any) -> np.ndarray:
    """A GPU rounds float32 to the nearest bfloat16; the interpreter cuts, which adds up over a few casts."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_float(values, source, target, mode)
    rounded = torch.from_numpy(values.astype(np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the test's Triton bodies run.

    Without a GPU every compiled function, Triton's own library included, is replaced by its interpreted form for this
    test alone. TRITON_INTERPRET would do the same to the whole process, and only if set before the first import.
    """
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(interpreter, "_convert_float", _convert_with_rounding)
    forms: dict[int, InterpretedFunction] = {}  # by identity: hashing a JITFunction parses what it calls
    for module in (tl, tl.standard, *kernel_modules()):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                form = forms.setdefault(id(value), InterpretedFunction(value.fn))
                monkeypatch.setattr(module, name, form)
    yield torch.device("cpu")
