"""Convolution over frames in groups of channels, with Mish (Misra 2019, arXiv:1908.08681) as its epilogue.

cuDNN launches one kernel per group. Here one launch computes all groups. A program computes a block of frames of one
group. It adds one matmul per tap, whose input is the block's frames shifted by the tap.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import use_triton

# Frames of a program, whose accumulators fill the registers of 4 warps; half as many in float32.
_BLOCK_FRAMES = 128
_MIN_CHANNELS = 16  # of a tile in a matmul


def taps_first(weight: torch.Tensor) -> torch.Tensor:
    """Return a convolution's weight [channels, group size, taps] with the strides that `grouped_convolution` reads.

    A tap's matrix is contiguous, and so are its output channels.
    """
    return weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def grouped_convolution(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Return mish(convolution + bias), [rows, frames, channels] in the type of `hidden`. Sums are float32.

    Args:
        hidden: [rows, frames, channels], contiguous.
        weight: [channels, group size, taps] with an odd number of taps, from `taps_first`.
        bias: [channels].
        lengths: [rows] int64, the number of frames of each row that are read. Frames beyond them count as zeros, as
            frames before the first do. None reads all frames.
    """
    rows, frames, channels = hidden.shape
    group_size, taps = weight.shape[1:]
    if not use_triton(hidden):
        if lengths is not None:
            is_padding = torch.arange(frames, device=hidden.device) >= lengths[:, None]
            hidden = hidden.masked_fill(is_padding[:, :, None], 0.0)
        columns = hidden.transpose(1, 2)
        convolved = functional.conv1d(columns, weight, bias, padding=taps // 2, groups=channels // group_size)
        return functional.mish(convolved).transpose(1, 2)
    if not hidden.is_contiguous() or weight.stride() != (1, channels, channels * group_size):
        raise ValueError("hidden states must be contiguous, and weights those of `taps_first`")
    output = torch.empty_like(hidden)
    is_wide = hidden.dtype == torch.float32
    block = _BLOCK_FRAMES // 2 if is_wide else _BLOCK_FRAMES
    if output.numel():
        _grouped_convolution_kernel[(triton.cdiv(frames, block), channels // group_size, rows)](
            *(hidden, weight, bias, hidden if lengths is None else lengths, output, frames),
            HAS_LENGTHS=lengths is not None,
            CHANNELS=channels,
            GROUP_SIZE=group_size,
            TAPS=taps,
            BLOCK=block,
            COLUMNS=max(_MIN_CHANNELS, triton.next_power_of_2(group_size)),
            PRECISION="ieee" if is_wide else "tf32",
            num_warps=4,
            num_stages=2 if is_wide else 3,
        )
    return output


@triton.jit(do_not_specialize=["frames"])
def _grouped_convolution_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    lengths_ptr,
    output_ptr,
    frames,
    HAS_LENGTHS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program computes BLOCK frames of one group of one row."""
    row = tl.program_id(2).to(tl.int64)
    first_channel = tl.program_id(1) * GROUP_SIZE
    frame = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    is_column = column < GROUP_SIZE
    length = tl.load(lengths_ptr + row).to(tl.int32) if HAS_LENGTHS else frames
    row_ptr = hidden_ptr + row * frames * CHANNELS + first_channel
    tap_ptrs = weight_ptr + first_channel + column[:, None] * CHANNELS + column[None, :]
    in_group = is_column[:, None] & is_column[None, :]
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for tap in range(TAPS):
        source = frame + (tap - TAPS // 2)
        mask = ((source >= 0) & (source < length))[:, None] & is_column[None, :]
        inputs = tl.load(row_ptr + source[:, None] * CHANNELS + column[None, :], mask=mask, other=0.0)
        matrix = tl.load(tap_ptrs + tap * (GROUP_SIZE * CHANNELS), mask=in_group, other=0.0)
        total = tl.dot(inputs, matrix, total, input_precision=PRECISION)
    bias = tl.load(bias_ptr + first_channel + column, mask=is_column, other=0.0).to(tl.float32)
    # Rounded in between, as a convolution stores it. Beyond 20, mish(x) is x in float32.
    values = (total + bias[None, :]).to(output_ptr.dtype.element_ty).to(tl.float32)
    power = tl.exp(tl.minimum(values, 20.0))
    ratio = power * (power + 2.0)
    result = values * ratio / (ratio + 2.0)
    output = output_ptr + (row * frames + frame[:, None]) * CHANNELS + first_channel + column[None, :]
    tl.store(output, result.to(output_ptr.dtype.element_ty), mask=(frame < frames)[:, None] & is_column[None, :])
