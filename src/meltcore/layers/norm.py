"""Normalization layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from meltcore.kernels import norm as kernels
from meltcore.layers.weight_loader import ConvertingLoader, WeightLoader, as_slice, permuted_loader, shard_loader

if TYPE_CHECKING:
    from meltcore.layers.tensor_parallel import TensorParallelGroup


class RMSNorm(nn.Module):
    """Applies a root-mean-square norm with a learned scale. weight: [size]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    @property
    def loader(self) -> WeightLoader:
        """The weight loader of the checkpoint's weight."""
        return self.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension of `hidden` [..., size]. Returns the same shape and type."""
        return kernels.rms_norm(hidden, self.weight, self.eps)

    def parameters_for_fusion(self) -> kernels.Norm:
        """Return weight and eps for a kernel that fuses this norm."""
        return kernels.Norm(self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """An RMS norm whose checkpoint stores its scale minus 1.

    `weight` is the scale itself, in float32 whatever the model's type: 16 bits would lose most of the stored digits.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, torch.float32)

    @property
    def loader(self) -> WeightLoader:
        """The weight loader of the checkpoint's weight. It adds one."""
        return ConvertingLoader(self.weight.shape, lambda source: self.weight.copy_(source.float() + 1))


class WideHeadNorms(nn.Module):
    """Normalizes a token's queries and its keys, each over all heads together (OLMo 2).

    Ranks of a group have some heads each, and all-reduce the sums of squares.
    """

    def __init__(self, norm: NormFactory, query_size: int, key_size: int) -> None:
        super().__init__()
        self._norm, self._sizes = norm, (query_size, key_size)
        self._rows = [range(query_size), range(key_size)]
        self._group: TensorParallelGroup | None = None
        self.query, self.key = norm(query_size), norm(key_size)

    def shard(self, query_rows: range, key_rows: range, group: TensorParallelGroup) -> None:
        """Keep the weights of this rank's heads. Neighboring ranks may have the same key head."""
        self._group, self._rows = group, [query_rows, key_rows]
        self.query, self.key = self._norm(len(query_rows)), self._norm(len(key_rows))

    def loaders(self, query_order: torch.Tensor, key_order: torch.Tensor) -> list[WeightLoader]:
        """Return the weight loaders of the norms of queries and keys. The orders list this rank's rows."""
        return [
            shard_loader(permuted_loader(norm.loader, order), (size,), as_slice(rows))
            for norm, order, size, rows in zip(
                (self.query, self.key), (query_order, key_order), self._sizes, self._rows, strict=True
            )
        ]

    def forward(self, qkv: torch.Tensor) -> None:
        """Normalize the queries and keys of `qkv`, [tokens, queries + keys + values], in place."""
        queries, keys = len(self._rows[0]), len(self._rows[1])
        parts = (qkv[:, :queries], self.query), (qkv[:, queries : queries + keys], self.key)
        if self._group is None:
            for part, norm in parts:
                part.copy_(norm(part))
            return
        # Four columns: messages of whole 16 bytes go through peer memory.
        sums = torch.zeros(len(qkv), 4, dtype=torch.float32, device=qkv.device)
        for index, (part, _) in enumerate(parts):
            sums[:, index] = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).square()
        sums = self._group.all_reduce(sums)
        for index, (part, norm) in enumerate(parts):
            counted = self._group.size * part.shape[1]  # of all ranks, a key head as often as ranks have it
            scale = (sums[:, index] / counted + norm.eps).rsqrt()
            part.mul_(scale[:, None] * norm.weight.float())


# Makes a norm of a given size.
NormFactory = Callable[[int], RMSNorm]
