"""Shared tools of the kernel tests: finding kernels, and choosing their implementation."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Literal, NamedTuple, ParamSpec, TypeVar

from triton.runtime.jit import JITFunction

import meltcore.kernels
from meltcore.kernels.launch import force_implementation

CompileCase = Callable[[], object]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class ModelShape(NamedTuple):
    """The sizes of a model that kernels are compiled for. choices: routed experts per token; no experts in a dense
    model. delta: of Gated DeltaNet, in the order of `GatedDeltaShape`; empty in a model without it. sliding_window: of
    the layers that have one.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    experts: int = 0
    choices: int = 0
    expert_width: int = 0
    delta: tuple[int, ...] = ()
    shared_expert: bool = False
    sliding_window: int | None = None


def in_triton(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same function with its Triton implementation, on any device."""
    return _forced("triton", function)


def in_reference(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The same function with its reference implementation, on any device."""
    return _forced("reference", function)


def _forced(
    name: Literal["triton", "reference"], function: Callable[_Parameters, _Result]
) -> Callable[_Parameters, _Result]:
    @wraps(function)
    def forced(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        force_implementation(name)
        try:
            return function(*args, **kwargs)
        finally:
            force_implementation(None)

    return forced


def kernel_modules() -> list[ModuleType]:
    modules = pkgutil.walk_packages(meltcore.kernels.__path__, "meltcore.kernels.")
    return [importlib.import_module(module.name) for module in modules if not module.ispkg]


def jit_functions(module: ModuleType) -> dict[str, JITFunction]:
    """The module's own Triton functions, by name; not those it imports."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name: value for name, value in found.items() if value.module == module.__name__}
