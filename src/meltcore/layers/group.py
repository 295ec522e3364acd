"""The ranks that hold one model together (tensor parallelism; Shoeybi et al. 2019, arXiv:1909.08053).

Each rank is a process with a device of its own. It holds a share of every layer's heads or width, and of the
vocabulary; what a layer adds to the residual stream is the sum of what all ranks computed.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meltcore.errors import ConfigError


class Group:
    """A rank's view of all of them. What it says to the others is said by all, in the same order and shapes alike."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    # --- what a rank holds ---

    def share(self, total: int, name: str) -> range:
        """This rank's part of `total` things. Raises ConfigError where they cannot be shared out evenly."""
        if total % self.size:
            raise ConfigError(f"--tp {self.size} does not divide this model's {total} {name}")
        each = total // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def share_or_copy(self, total: int, name: str) -> range:
        """`share`, or one of fewer things than there are ranks: neighbouring ranks then hold the same one."""
        if total >= self.size or self.size % total:
            return self.share(total, name)
        own = self.rank * total // self.size
        return range(own, own + 1)

    # --- what ranks tell each other ---

    def join(self, meeting_point: Path, device: torch.device, limit_s: float) -> None:
        """Find the others: all are given the same file, which nobody has used before. A wait for them ends after
        `limit_s` with a RuntimeError.

        A process can be in one group at a time, since torch.distributed keeps it for the whole process.
        """
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(meeting_point), self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=limit_s),
            device_id=device if device.type == "cuda" else None,
        )

    def leave(self) -> None:
        dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of everybody's values, in place."""
        dist.all_reduce(values)
        return values

    def add_sum(self, residual: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """residual + the sum of everybody's shares, in the memory of `residual`; `share` is overwritten."""
        return residual.add_(self.sum(share))

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of everybody's values, one by one, in place. [...] int64."""
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def side_by_side(self, columns: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] of every rank in their order, [rows, size * columns]; on rank 0 alone, None elsewhere."""
        columns = columns.contiguous()
        if self.rank > 0:
            dist.gather(columns)
            return None
        parts = [torch.empty_like(columns) for _ in range(self.size)]
        dist.gather(columns, parts)
        return torch.cat(parts, dim=1)

    def as_first(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place."""
        dist.broadcast(values, src=0)
        return values
