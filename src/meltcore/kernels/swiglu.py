"""The gated activation of the feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

# Elements of one program: with 4 warps a thread holds 8, a 16-byte access to each half in 16-bit types.
_BLOCK, _WARPS = 1024, 4


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension. [tokens, 2 * size] -> [tokens, size]."""
    return _swiglu_triton(gate_up) if use_triton(gate_up) else _swiglu_torch(gate_up)


def _swiglu_torch(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _swiglu_kernel(gate_up_ptr, output_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One program: one token, BLOCK columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row = gate_up_ptr + token * row_stride
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded in between, as the torch body does.
    silu = (gate / (1.0 + tl.exp(-gate))).to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + token * SIZE + column, silu * up, mask=inside)


def _swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, triton.cdiv(size, _BLOCK))
        overlap = overlaps(gate_up.device)
        _swiglu_kernel[grid](
            gate_up,
            output,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=_BLOCK,
            OVERLAP=overlap,
            num_warps=_WARPS,
            **({"launch_pdl": True} if overlap else {}),
        )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    gate_up = torch.empty(64, 2 * model.intermediate_size, dtype=dtype, device="meta")
    return [lambda: _swiglu_triton(gate_up)]
