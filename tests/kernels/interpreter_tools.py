"""What makes Triton's interpreter several times as fast: its language is replaced once a launch, shapes are kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_make_tensor = tl.core.tensor.__init__
_make_block_type = tl.core.block_type.__init__
_get_np_dtype = interpreter._get_np_dtype
_numpy_types: dict[str, np.dtype] = {}  # by the name of the Triton type


class LanguagePatches:
    """Replaces triton.language by its interpreted form once per launch.

    Triton 3.6 replaces it anew for every call of a device function, `tl.sum` included, and restores only what the
    launch itself replaced. That takes most of a launch's time. And it looks for its functions among all members, again
    in every launch.
    """

    def __init__(self) -> None:
        self._patch_language = interpreter._patch_lang
        self._scopes: dict[frozenset[str], Any] = {}  # of this launch, by the modules that are replaced
        self._modules: dict[str, frozenset[str]] = {}
        self._semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def patch(self, function: Callable[..., object]) -> LanguagePatches:
        """For the language modules that the function's file imports. The launch calls `restore` of the first one."""
        file = function.__module__
        if file not in self._modules:
            found = [value for value in function.__globals__.values() if value is tl or value is tl.core]
            self._modules[file] = frozenset(module.__name__ for module in found)
        modules = self._modules[file]
        if modules not in self._scopes:
            self._scopes[modules] = self._patch_language(function)
        return self

    def restore(self) -> None:
        for scope in reversed(self._scopes.values()):
            scope.restore()
        self._scopes.clear()

    def patch_builtins(self, package: Any, _: object, scope: Any) -> None:
        """Replace each builtin of a module or class by one that computes."""
        semantic = self._semantic
        for name in _builtins_of(package):
            member = getattr(package, name)

            def computed(*args: Any, member: Callable[..., object] = member, **kwargs: Any) -> object:
                kwargs["_semantic"] = semantic
                return member(*args, **kwargs)

            scope.set_attr(package, name, computed)


_builtin_names: dict[object, list[str]] = {}  # by module or class; found before any was replaced


def _builtins_of(package: Any) -> list[str]:
    if package not in _builtin_names:
        _builtin_names[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    return _builtin_names[package]


class _Shape:
    """What all types and tensors of one shape share: nothing changes it once it is made."""

    def __init__(self, of_type: tl.core.block_type) -> None:
        self.of_type, self.numel = of_type.shape, of_type.numel
        self.name = str(of_type.shape)
        self.of_tensor = tl.core.tuple([tl.core.constexpr(size) for size in of_type.shape])
        self.numel_of_tensor = tl.core.constexpr(of_type.numel)


_shapes: dict[tuple[int, ...], _Shape] = {}
_NO_SHAPE, _ONE = tl.core.tuple([]), tl.core.constexpr(1)


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """`block_type.__init__`, which checks a shape once and not for every value of a kernel."""
    sizes = tuple(size.value if isinstance(size, tl.core.constexpr) else size for size in shape)
    known = _shapes.get(sizes)
    if known is None:
        _make_block_type(self, element_ty, shape)
        known = _shapes[sizes] = _Shape(self)
    self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
    self.name = f"<{known.name}, {element_ty}>"
    self.kept_shape = known


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__` with the shape that all tensors of the type share."""
    kept = getattr(type, "kept_shape", None)
    if kept is None and type.is_block():  # made before this test began
        _make_tensor(self, handle, type)
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (kept.of_tensor, kept.numel_of_tensor) if kept else (_NO_SHAPE, _ONE)


def fix_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix faults in the interpreter of Triton 3.6.

    It takes a loop's bounds by int() of a [1] array, which NumPy 2.4 no longer allows, and multiplies the bit patterns
    of bfloat16 matrices. And it is slow: it replaces its language for every call, computes for every integer sum
    whether it overflows, which nothing reads, makes its table of types for every tensor, and types of types.
    """
    patch_tensor, patches = interpreter._patch_lang_tensor, LanguagePatches()
    create_dot = InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return create_dot(self, _widened(left), _widened(right), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter, "_patch_lang", patches.patch)
    monkeypatch.setattr(interpreter, "_patch_builtin", patches.patch_builtins)
    if not torch.cuda.is_available():  # the compiler has these types too
        monkeypatch.setattr(tl.core.block_type, "__init__", make_block_type)
        monkeypatch.setattr(tl.core.tensor, "__init__", make_tensor)
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _numpy_type)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def _numpy_type(dtype: tl.dtype) -> np.dtype:
    name = dtype.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _get_np_dtype(dtype)
    return _numpy_types[name]


def _widened(matrix: TensorHandle) -> TensorHandle:
    if matrix.dtype.scalar != tl.bfloat16:
        return matrix
    wide = torch.from_numpy(matrix.data.view(np.int16)).view(torch.bfloat16).float()
    return TensorHandle(wide.numpy(), tl.float32)
