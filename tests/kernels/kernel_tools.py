"""What the kernel tests share: finding the kernels."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from triton.runtime.jit import JITFunction

import meltcore.kernels


def kernel_modules() -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(meltcore.kernels.__path__)]
    return [importlib.import_module(f"meltcore.kernels.{name}") for name in names]


def jit_functions(module: ModuleType) -> dict[str, JITFunction]:
    """The module's own Triton functions, by name; not those it imports."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name: value for name, value in found.items() if value.module == module.__name__}
