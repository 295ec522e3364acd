"""The ranks that hold one model together (tensor parallelism; Shoeybi et al. 2019, arXiv:1909.08053).

Each rank is a process with a device of its own. It holds a share of every layer's heads or width, and of the
vocabulary; what a layer adds to the residual stream is the sum of what all ranks computed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meltcore.errors import ConfigError
from meltcore.kernels.all_reduce import MOST_NUMBERS, Peers, one_shot_largest, one_shot_sum, suits_one_shot
from meltcore.layers.peer_memory import can_reach_all, open_inboxes, prove_inboxes


class Group:
    """A rank's view of all of them. What it says to the others is said by all, in the same order and shapes alike."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on_gpus = False
        self.peers: Peers | None = None  # what small sums go through; collectives do all of them where there is none

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

    def join(self, meeting_point: Path, device: torch.device, limit_s: float, *, peer_memory: bool = True) -> None:
        """Find the others: all are given the same file, which nobody has used before.

        peer_memory: small sums go through memory of all GPUs, where these can reach each other. Raises RuntimeError
        where the others do not come within `limit_s`, and ConfigError where this process is in a group already:
        torch.distributed keeps one for the whole process.
        """
        if dist.is_initialized():
            raise ConfigError("--tp: this process is in a group of torch.distributed already, and can be in only one")
        self.on_gpus = on_gpus = device.type == "cuda"
        if on_gpus:
            torch.cuda.set_device(device)
            # Multicast over NVLink is a resource of the whole machine that a failed program can leave blocked.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it looks for a name of this host to resolve
        store = dist.FileStore(str(meeting_point), self.size)
        limit = timedelta(seconds=limit_s)
        store.set_timeout(limit)
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            store=dist.PrefixStore("collectives", store),
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
            device_id=device if on_gpus else None,
        )
        first = (device.index or 0) - self.rank
        if on_gpus and peer_memory and can_reach_all(range(first, first + self.size)):
            self.peers = open_inboxes(self.rank, self.size, device, lambda own: self._exchange(store, own))
            prove_inboxes(self.peers, device)

    def limit_waits(self, limit_s: float) -> None:
        """From now on a collective ends with a RuntimeError where another rank keeps it waiting for so long."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s))

    def leave(self) -> None:
        self.peers = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of everybody's values, in place."""
        if self.peers is not None and suits_one_shot(values):
            return one_shot_sum(values, self.peers)
        dist.all_reduce(values)
        return values

    def add_sum(self, residual: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """residual + the sum of everybody's shares, in the memory of `residual`; `share` is overwritten."""
        if self.peers is not None and suits_one_shot(share):
            return one_shot_sum(share, self.peers, residual)
        return residual.add_(self.sum(share))

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of everybody's values, one by one, in place. [...] int64."""
        if self.peers is not None and values.numel() <= MOST_NUMBERS:
            return one_shot_largest(values, self.peers)
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

    def _exchange(self, store: dist.Store, own: bytes) -> list[bytes]:
        """Everybody's bytes, in order of ranks."""
        store.set(f"inbox of {self.rank}", own.hex())
        return [bytes.fromhex(store.get(f"inbox of {rank}").decode()) for rank in range(self.size)]
