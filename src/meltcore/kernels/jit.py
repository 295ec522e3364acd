"""What every Triton body shares: Triton itself where there is one, and how a kernel file says what to compile.

A kernel file defines `compile_cases(model, dtype) -> list[CompileCase]`: calls of its Triton bodies on tensors of the
meta device, as the engine would launch them for that model. A test compiles each for every architecture we serve, on a
machine without a GPU. Since it goes through the launching code, it sees the launch parameters that really run, and a
body that reads a value from the device fails there. Kernels that are launched have names ending in `_kernel`.
Kernel files take `triton` and `tl` from here, put types off (`from __future__ import annotations`) and let mypy pass
the untyped functions that Triton compiles (`# mypy: allow-untyped-defs`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch built for the CPU comes without it; kernel files must import there all the same
    triton, tl = SimpleNamespace(jit=lambda body=None, **_: body or (lambda given: given)), None
    TensorDescriptor = None

CompileCase = Callable[[], object]


class ModelShape(NamedTuple):
    """The sizes of a model that kernels are compiled for. choices: experts of a token, of those to choose from, beside
    which there may be a shared one; no experts in a dense model.

    delta: of Gated DeltaNet, in the order of kernels/delta.py's `DeltaShape`; none in a model without it.
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
