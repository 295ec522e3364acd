"""The sum over a token's experts, added to the residual stream, and the norm that reads the stream next.

In one launch: for few tokens a norm of its own takes the time of a launch more, for many it reads again what has just
been written.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm, normalise, rms_norm
from meltcore.kernels.overlap import overlaps

# Columns of a program: 8 elements a thread, 16 bytes in 16-bit types. All of them where it normalises.
_BLOCK = 1024
_THREAD = 8


def add_choices_normalised(
    residual: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor, norm: Norm
) -> torch.Tensor:
    """Add the weighted sum of each token's outputs to `residual` in place; returns what it then is, normalised.

    Sums are float32. residual: [tokens, hidden_size], contiguous, as what is returned; outputs: [tokens * choices,
    hidden_size]; weights: [tokens, choices] float32.
    """
    if use_triton(outputs):
        return _add_choices_triton(residual, outputs, weights, norm)[1]
    return rms_norm(add_choices_torch(residual, outputs, weights), *norm)


def sum_of_choices(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's outputs, [tokens, hidden_size]; see `add_choices_normalised`."""
    return (add_choices_triton if use_triton(outputs) else add_choices_torch)(None, outputs, weights)


def add_choices_torch(residual: torch.Tensor | None, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`residual`, added to in place; without one the sum alone."""
    weighted = (outputs.view(*weights.shape, outputs.shape[1]).float() * weights[:, :, None]).sum(1)
    return weighted.to(outputs.dtype) if residual is None else residual.add_(weighted)


def add_choices_triton(residual: torch.Tensor | None, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _add_choices_triton(residual, outputs, weights)[0]


@triton.jit
def _add_choices_kernel(
    total_ptr,
    outputs_ptr,
    weights_ptr,
    norm_ptr,
    normalised_ptr,
    eps,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of one token, one choice after the other. ADDED: to what stands there."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < SIZE
    total = tl.zeros((1, BLOCK), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        output = tl.load(outputs_ptr + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * output
    place = token * SIZE + columns
    if ADDED:
        total += tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + place, stored, mask=inside)
    if NORMED:
        wide = stored.to(tl.float32)
        tl.store(normalised_ptr + place, normalise(wide, norm_ptr, columns, eps, stored.dtype, SIZE), mask=inside)


def _add_choices_triton(
    residual: torch.Tensor | None, outputs: torch.Tensor, weights: torch.Tensor, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, in the memory of `residual` where there is one, and that normalised, where there is a norm."""
    tokens, size = len(weights), outputs.shape[1]
    total = outputs.new_empty(tokens, size) if residual is None else residual
    normalised = torch.empty_like(total) if norm else total
    if tokens == 0:
        return total, normalised
    block = triton.next_power_of_2(size) if norm else _BLOCK
    norm_weight, eps = norm or (weights, 0.0)
    overlap = overlaps(total.device)
    _add_choices_kernel[(tokens, triton.cdiv(size, block))](
        total,
        outputs,
        weights,
        norm_weight,
        normalised,
        eps,
        SIZE=size,
        CHOICES=weights.shape[1],
        BLOCK=block,
        ADDED=residual is not None,
        NORMED=norm is not None,
        OVERLAP=overlap,
        num_warps=min(16, max(1, block // (32 * _THREAD))),
        **({"launch_pdl": True} if overlap else {}),
    )
    return total, normalised


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    choices, size = model.choices + model.shared_expert, model.hidden_size
    residual = torch.empty(64, size, dtype=dtype, device="meta")
    outputs = torch.empty(64 * choices, size, dtype=dtype, device="meta")
    weights = torch.empty(64, choices, device="meta")
    norms = [Norm(residual[0], 1e-6), Norm(weights.new_empty(size), 1e-6)]
    return [
        lambda: _add_choices_triton(None, outputs, weights),
        lambda: _add_choices_triton(residual, outputs, weights),
        *(partial(_add_choices_triton, residual, outputs, weights, norm) for norm in norms),
    ]
