"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864) in half-split form: i rotates with i + size / 2.

Some models rotate only the first `rotary_dim` dimensions of a head. An attention score is a sum over dimensions, so
queries and keys may share any order of them. In `half_split_order` both halves begin with the rotated dimensions. The
remaining dimensions rotate by an angle of zero, so no kernel needs to know `rotary_dim`.

Other models rotate neighboring pairs instead: `rotate_pairs`.

A model reads texts longer than its training texts with scaled frequencies: `RopeScaling`.
"""

from __future__ import annotations

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.rope_scaling import RopeScaling

# Positions whose angles are computed in one step: 64 MiB of float64 for 128 frequencies.
_BLOCK_POSITIONS = 2**16
_PAIRS_PER_PROGRAM = 512


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None, context: int = 0
) -> torch.Tensor:
    """Return the radians per position of each pair of rotated dimensions: [rotary_dim / 2] float64.

    A sequence may have `context` tokens, which some scalings depend on.
    """
    frequencies = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return frequencies if scaling is None else scaling.scale_frequencies(frequencies, theta, context)


def rotary_table(
    head_dim: int,
    max_positions: int,
    theta: float,
    device: torch.device,
    rotary_dim: int | None = None,
    scaling: RopeScaling | None = None,
) -> torch.Tensor:
    """Return cosines and sines of every position: [max_positions, head_dim] float32, cosines in the first half.

    `rotary_dim` dimensions of a checkpoint's head rotate, by default all. Heads are in `half_split_order`. Angles are
    computed in float64: at position 1,000,000 float32 is wrong by up to 0.03 radians.
    """
    frequencies = inverse_frequencies(rotary_dim or head_dim, theta, scaling, max_positions).to(device)
    attention_factor = 1.0 if scaling is None else scaling.attention_factor
    table = torch.zeros(max_positions, 2, head_dim // 2, dtype=torch.float32, device=device)
    table[:, 0, len(frequencies) :] = 1.0  # no rotation, and no attention factor
    for start in range(0, max_positions, _BLOCK_POSITIONS):
        block = table[start : start + _BLOCK_POSITIONS, :, : len(frequencies)]
        positions = torch.arange(start, start + len(block), dtype=torch.float64, device=device)
        angles = positions[:, None] * frequencies
        block[:, 0] = angles.cos() * attention_factor
        block[:, 1] = angles.sin() * attention_factor
    return table.view(max_positions, head_dim)


def unrotated_table(head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """Return the table of a layer without rotary embeddings, which leaves heads as they are at every position.

    It has the form of `rotary_table`, so that no kernel needs to know such layers.
    """
    table = torch.zeros(max_positions, head_dim, dtype=torch.float32, device=device)
    table[:, : head_dim // 2] = 1.0
    return table


def half_split_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Return, for each dimension of a head here, its index in a checkpoint's head: [head_dim] int64.

    The first `rotary_dim` dimensions of a checkpoint's head rotate.
    """
    rotated, unrotated = torch.arange(head_dim).split([rotary_dim, head_dim - rotary_dim])
    halves = zip(rotated.tensor_split(2), unrotated.tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])


def apply_rope(heads: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate each head by the position of its token. Return the heads in their type; computation is in float32.

    heads: [tokens, heads, head_dim]; positions: [tokens] int64. `rotary_table` makes the table.
    """
    cos, sin = table[positions][:, None, :].chunk(2, dim=-1)
    first_half, second_half = heads.float().chunk(2, dim=-1)
    return torch.cat((first_half * cos - second_half * sin, second_half * cos + first_half * sin), dim=-1).to(
        heads.dtype
    )


def rotate_pairs(heads: torch.Tensor, rotary: torch.Tensor) -> None:
    """Rotate neighboring pairs of dimensions by their frame's angles, in place and in float32.

    heads: [rows, frames, n, head_dim], whose last dimension is contiguous; rotary: [2, frames, head_dim / 2] float32,
    cosines and sines; a frame's are contiguous.
    """
    if not use_triton(heads):
        cos, sin = rotary[:, :, None]
        even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
        heads.copy_(torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2))
        return
    rows, frames, count, head_dim = heads.shape
    if heads.stride(3) != 1 or rotary.stride()[1:] != (head_dim // 2, 1):
        raise ValueError("a head's dimensions must be contiguous, and so must be the table's frames")
    if heads.numel():
        block = triton.next_power_of_2(head_dim // 2)
        block_frames = max(1, _PAIRS_PER_PROGRAM // block)
        _rotate_pairs_kernel[(triton.cdiv(frames, block_frames), count, rows)](
            *(heads, rotary, frames, *heads.stride()[:3], rotary.stride(0)),
            PAIRS=head_dim // 2,
            BLOCK=block,
            FRAMES=block_frames,
            num_warps=4,
            **pdl_options(heads.device),
        )


# The number of frames is any, and a row's stride a multiple of it.
@triton.jit(do_not_specialize=["frames", "row_stride", "table_stride"])
def _rotate_pairs_kernel(
    heads_ptr,
    rotary_ptr,
    frames,
    row_stride,
    frame_stride,
    head_stride,
    table_stride,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    FRAMES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program rotates one head of FRAMES frames of a row. A thread has both dimensions of its pairs."""
    pdl_sync(PDL)
    frame = (tl.program_id(0) * FRAMES + tl.arange(0, FRAMES))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (frame < frames) & (pair < PAIRS)
    angle = rotary_ptr + frame * PAIRS + pair
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + table_stride, mask=mask, other=0.0)
    head = tl.program_id(2).to(tl.int64) * row_stride + tl.program_id(1) * head_stride
    even_ptr = heads_ptr + head + frame * frame_stride + 2 * pair
    even = tl.load(even_ptr, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(even_ptr + 1, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    tl.store(even_ptr, (even * cos - odd * sin).to(dtype), mask=mask)
    tl.store(even_ptr + 1, (odd * cos + even * sin).to(dtype), mask=mask)
