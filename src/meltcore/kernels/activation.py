"""Computes activations: GELU, SwiGLU and GeGLU of the feed-forward block, the sigmoid gate on attention outputs."""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

# Columns of a program: with 4 warps a thread has 8, 16-byte accesses in 16-bit types.
_BLOCK, _WARPS = 1024, 4


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up (Shazeer 2020, arXiv:2002.05202).

    gate_up: [tokens, 2 * size], gate columns before up columns; rows may be strided. Returns [tokens, size].
    """
    if not use_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return _launch_gated(gate_up, is_gelu=False)


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up with the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    gate_up: [tokens, 2 * size], gate columns before up columns; rows may be strided. Returns [tokens, size].
    """
    if not use_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return _launch_gated(gate_up, is_gelu=True)


def gelu(hidden: torch.Tensor) -> torch.Tensor:
    """Compute GELU by the error function, not by tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    hidden: contiguous; the result may be written over it.
    """
    if not use_triton(hidden):
        return torch.nn.functional.gelu(hidden)
    if not hidden.is_contiguous():
        raise ValueError("the input of GELU must be contiguous")
    if hidden.numel():
        _gelu_kernel[(triton.cdiv(hidden.numel(), _BLOCK),)](
            hidden, hidden.numel(), BLOCK=_BLOCK, num_warps=_WARPS, **pdl_options(hidden.device)
        )
    return hidden


def linear_gelu(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer and GELU with the tanh approximation. On CUDA, GELU is the epilogue of cuBLASLt's GEMM.

    Args:
        hidden: [..., in], contiguous.
        weight: [out, in].
        bias: [out].

    Returns [..., out].
    """
    # On a CPU the fused operation is GELU without the approximation.
    if not (hidden.is_cuda and use_triton(hidden)):
        return torch.nn.functional.gelu(torch.nn.functional.linear(hidden, weight, bias), approximate="tanh")
    rows = hidden.flatten(0, -2)
    output: torch.Tensor = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return output.view(*hidden.shape[:-1], -1)


def _launch_gated(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _swiglu_or_geglu_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            *(gate_up, output, gate_up.stride(0)),
            IS_GELU=is_gelu,
            SIZE=size,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **pdl_options(gate_up.device),
        )
    return output


def apply_sigmoid_gate(hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Multiply `hidden` by sigmoid(gates) in place, in float32 before rounding (Qiu et al. 2025, arXiv:2505.06708).

    Args:
        hidden: [tokens, size], contiguous.
        gates: [tokens, size] of the same dtype. Rows may be strided.

    Returns `hidden`.
    """
    if not use_triton(hidden):
        return hidden.copy_(hidden.float() * gates.float().sigmoid())
    tokens, size = hidden.shape
    if not hidden.is_contiguous() or gates.stride(1) != 1:
        raise ValueError("the gated tensor must be contiguous, and so must be a token's gates")
    if tokens:
        _gate_kernel[(tokens, triton.cdiv(size, _BLOCK))](
            *(hidden, gates, gates.stride(0)),
            SIZE=size,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **pdl_options(hidden.device),
        )
    return hidden


@triton.jit
def _gelu_kernel(hidden_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each program computes BLOCK values in place.

    In 16 bits the normal distribution is 1 / (1 + 2^-(x q(x^2))), where q is a polynomial: GELU is wrong by at most
    1.1e-6, and the kernel is bound by memory instead of by instructions (25 us instead of 34 us for 16,384 x 1,536
    values on an H200).
    """
    pdl_sync(PDL)
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    hidden = tl.load(hidden_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if hidden_ptr.dtype.element_ty == tl.float32:
        result = 0.5 * hidden * (1.0 + tl.erf(0.7071067811865476 * hidden))
    else:
        square = tl.minimum(hidden * hidden, 25.0)
        q = 8.115122953663634e-06 - 1.6478286605181008e-07 * square
        q = q * square - 0.00013676221638934556
        q = q * square - 0.0001654926140856463
        q = q * square + 0.10492697032464061
        q = q * square + 2.3021746423783704
        result = hidden / (1.0 + tl.exp2(-hidden * q))
    tl.store(hidden_ptr + offset, result.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_or_geglu_kernel(
    gate_up_ptr,
    output_ptr,
    row_stride,
    IS_GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK columns of one token."""
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    row = gate_up_ptr + token * row_stride
    gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    # SiLU is gate * sigmoid(gate). (1 + tanh(x)) / 2 of GELU is sigmoid(2 x); 1.5957691... is 2 sqrt(2 / pi).
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    # Rounded in between, as the reference does.
    activated = (gate / (1.0 + tl.exp(-inner))).to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + token * SIZE + column, activated * up, mask=mask)


@triton.jit
def _gate_kernel(hidden_ptr, gates_ptr, gate_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each program computes BLOCK columns of one token."""
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.load(gates_ptr + token * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + token * SIZE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + token * SIZE + column, hidden / (1.0 + tl.exp(-gate)), mask=mask)
