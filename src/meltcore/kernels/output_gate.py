"""What comes out of attention times the sigmoid of a gate, for each element (Qiu et al. 2025, arXiv:2505.06708)."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

# Elements of one program: with 4 warps a thread holds 8, 16-byte accesses in 16-bit types.
_BLOCK, _WARPS = 1024, 4


def gate_output(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """mixed *= sigmoid(gates), in place, in float32 until it is rounded.

    mixed: [tokens, size], contiguous; gates: [tokens, size], of the same type, rows may be strided. Returns `mixed`.
    """
    return _gate_triton(mixed, gates) if use_triton(mixed) else _gate_torch(mixed, gates)


def _gate_torch(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return mixed.copy_(mixed.float() * gates.float().sigmoid())


@triton.jit
def _gate_kernel(mixed_ptr, gates_ptr, gate_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One program: one token, BLOCK columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gates_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(mixed_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(mixed_ptr + token * SIZE + column, mixed / (1.0 + tl.exp(-gate)), mask=inside)


def _gate_triton(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    tokens, size = mixed.shape
    if not mixed.is_contiguous() or gates.stride(1) != 1:
        raise ValueError("what is gated must be contiguous, and so must be the gates of a token")
    if tokens:
        overlap = overlaps(mixed.device)
        _gate_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            mixed,
            gates,
            gates.stride(0),
            SIZE=size,
            BLOCK=_BLOCK,
            OVERLAP=overlap,
            num_warps=_WARPS,
            **({"launch_pdl": True} if overlap else {}),
        )
    return mixed


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    size = model.heads * model.head_dim
    projected = torch.empty(64, 2 * size + 2 * model.kv_heads * model.head_dim, dtype=dtype, device="meta")
    mixed = torch.empty(64, size, dtype=dtype, device="meta")
    return [lambda: _gate_triton(mixed, projected[:, :size])]
