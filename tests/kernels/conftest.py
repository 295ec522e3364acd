"""Running Triton kernels: natively on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compile_tools import CompilePool, Task
from interpreter_tools import fix_interpreter
from kernel_tools import kernel_modules
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from meltcore.kernels.launch import force_implementation

_convert_float = interpreter._convert_float


def _convert_with_rounding(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: Any) -> np.ndarray:
    """A GPU rounds float32 to the nearest bfloat16; the interpreter truncates, which adds up over a few casts."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_float(values, source, target, mode)
    rounded = torch.from_numpy(values.astype(np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


@functools.cache
def _interpreted_forms() -> list[tuple[ModuleType, str, InterpretedFunction]]:
    """All compiled functions, as (module, name, interpreted form). All tests share the forms, which keep no state."""
    forms: dict[int, InterpretedFunction] = {}  # by identity: hashing a JITFunction parses what it calls
    return [
        (module, name, forms.setdefault(id(value), InterpretedFunction(value.fn)))
        for module in (tl, tl.standard, *kernel_modules())
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of the test's Triton kernels.

    Without a GPU every compiled function, Triton's own library included, is replaced by its interpreted form for this
    test alone. TRITON_INTERPRET would do that to the whole process, and only if set before the first import.
    """
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(interpreter, "_convert_float", _convert_with_rounding)
    for module, name, form in _interpreted_forms():
        monkeypatch.setattr(module, name, form)
    yield torch.device("cpu")


@pytest.fixture(params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """Runs the test once with each implementation of the kernels."""
    force_implementation(request.param)
    yield request.param
    force_implementation(None)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[CompilePool]:
    """Compiles for all the tests that were selected while they wait for one after the other.

    With parallel test processes, only the requested ones: every core is busy then.
    """
    alone = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
    with closing(CompilePool()) as pool:
        for item in request.session.items if alone else []:
            given = getattr(getattr(item, "callspec", None), "params", {})
            if isinstance(task := given.get("task"), Task):
                pool.give(task)
        yield pool


@pytest.fixture(autouse=True)
def interpreter_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_interpreter(monkeypatch)
