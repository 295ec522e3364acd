"""AWQ and GPTQ tensors of a matrix, written number by number from the published layouts, and its exact values."""

from __future__ import annotations

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack neighbors of the last dimension in words of eight, the value at order[i] of eight in bits 4 i to 4 i + 3."""
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), dtype=np.uint32)
    for i, place in enumerate(order):
        words |= values[..., place::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def int4_matrix(
    layout: str,
    outputs: int,
    inputs: int,
    group_size: int,
    *,
    seed: int = 0,
    desc_act: bool = False,
    sym: bool = False,
    dtype: torch.dtype = torch.float16,
    std: float = 0.05,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a random matrix by the last part of their names, and its values [outputs, inputs] float32.

    layout: awq, gptq or gptq_v2.
    """
    draw = np.random.default_rng(seed)
    groups = inputs // group_size
    numbers = draw.integers(0, 16, (outputs, inputs))
    lowest = 1 if layout == "gptq" else 0
    zeros = np.full((outputs, groups), 8) if sym else draw.integers(lowest, lowest + 16, (outputs, groups))
    scales = torch.from_numpy(draw.uniform(0.5, 1.5, (outputs, groups)) * std / 6.5).to(dtype)
    group_of = np.repeat(np.arange(groups), group_size)
    if desc_act:
        draw.shuffle(group_of)
    dense = (numbers - zeros[:, group_of]) * scales.double().numpy()[:, group_of]
    tensors = {"scales": scales.T.contiguous()}
    if layout == "awq":
        tensors["qweight"] = torch.from_numpy(words_of(numbers.T, AWQ_ORDER))
        tensors["qzeros"] = torch.from_numpy(words_of(zeros.T, AWQ_ORDER))
    else:
        tensors["qweight"] = torch.from_numpy(words_of(numbers).T.copy())
        tensors["qzeros"] = torch.from_numpy(words_of(zeros.T - lowest))
        tensors["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return tensors, torch.from_numpy(dense).float()
