"""Imports Triton where it is installed, for all kernel files.

Kernel files import `triton` and `tl` from here and defer annotations (`from __future__ import annotations`). Only the
functions that Triton compiles are untyped, which a test checks. Kernels that are launched have names ending in
`_kernel`. Every kernel file has launches on meta tensors in tests/kernels/compile_cases_*.py, from which a test
compiles it for every supported architecture on a machine without a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["TensorDescriptor", "tl", "triton"]

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch built for the CPU comes without Triton; kernel files must import there too
    triton, tl = SimpleNamespace(jit=lambda function=None, **_: function or (lambda function: function)), None
    triton.constexpr_function = triton.jit
    TensorDescriptor = None
