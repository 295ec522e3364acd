"""The ranks that hold one model together (tensor parallelism; Shoeybi et al. 2019, arXiv:1909.08053).

Each rank is a process with a device of its own. It holds a share of every layer's heads or width, and of the
vocabulary; what a layer adds to the residual stream is the sum of what all ranks computed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meltcore.errors import ConfigError
from meltcore.kernels.all_reduce import (
    MOST_NUMBERS,
    peer_largest,
    peer_sum,
    peer_sum_normalised,
    peer_sum_of_choices,
    suits_peers,
    suits_rows,
)
from meltcore.kernels.expert_sum import sum_of_choices
from meltcore.kernels.inbox import Peers, nobody
from meltcore.kernels.norm import Norm, add_rms_norm, rms_norm
from meltcore.layers.peer_memory import can_reach_all, open_inboxes, prove_inboxes

_LEAVE_LIMIT_S = 5.0


class Group:
    """A rank's view of all of them. What it says to the others is said by all, in the same order and shapes alike."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on_gpus = self.gave_up = self._alone = False
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
            os.environ["NCCL_NVLS_ENABLE"] = "0"
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

    def give_up(self) -> None:
        """Let the device get past what waits for ranks that are gone; what it computes from now on means nothing."""
        if self.gave_up:
            return
        self.gave_up = True
        if self.peers is not None:
            self.peers.give_up()
        if self.on_gpus and dist.is_initialized():
            # NCCL's way out may wait for the ranks that are gone (NVIDIA/nccl issue 1777): nobody waits for it.
            threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True).start()

    def leave(self) -> None:
        """Together with the others, when nothing is under way. Who does not come is not waited for long."""
        self.peers = None
        if dist.is_initialized():
            leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
            leaving.start()
            leaving.join(_LEAVE_LIMIT_S)

    def add_sum_normalised(
        self, residual: torch.Tensor | None, share: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + the sum of everybody's shares, and that normalised.

        All are [tokens, hidden_size]. The sum is in the memory of `residual`, where there is one; `share` is
        overwritten.
        """
        if self.peers is not None and suits_rows(share, self.size):
            return peer_sum_normalised(share, self.peers, norm, residual)
        if self.peers is not None and suits_peers(share):
            total = peer_sum(share, self.peers, residual)
            return total, rms_norm(total, *norm)
        if not self._alone:
            dist.all_reduce(share)
        if residual is None:
            return share, rms_norm(share, *norm)
        return residual, add_rms_norm(residual, share, *norm)

    def add_choices_normalised(
        self, residual: torch.Tensor, outputs: torch.Tensor, weights: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_sum_normalised` where everybody's share is the weighted sum of each token's outputs.

        outputs: [tokens * choices, hidden_size]; weights: [tokens, choices] float32.
        """
        if self.peers is not None and suits_rows(residual, self.size):
            return peer_sum_of_choices(outputs, self.peers, weights, norm, residual)
        return self.add_sum_normalised(residual, sum_of_choices(outputs, weights), norm)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of everybody's values, one by one, in place. [...] int64."""
        if self.peers is not None and values.numel() <= MOST_NUMBERS:
            return peer_largest(values, self.peers)
        if not self._alone:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def side_by_side(self, columns: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] of every rank in their order, [rows, size * columns]; on rank 0 alone, None elsewhere."""
        columns = columns.contiguous()
        parts = [torch.empty_like(columns) for _ in range(self.size)] if self.rank == 0 else None
        if not self._alone:
            dist.gather(columns, parts)
        return None if parts is None else torch.cat(parts, dim=1)

    def as_first(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place."""
        if not self._alone:
            dist.broadcast(values, src=0)
        return values

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, nothing is said to others, and what they would have said is anything: to go through what is launched.

        Sums are launched as ever, but among peers who are all gone.
        """
        peers, self._alone = self.peers, True
        if peers is not None:
            self.peers = nobody(peers)
        try:
            yield
        finally:
            self.peers, self._alone = peers, False

    def _exchange(self, store: dist.Store, own: bytes) -> list[bytes]:
        """Everybody's bytes, in order of ranks."""
        store.set(f"inbox of {self.rank}", own.hex())
        return [bytes.fromhex(store.get(f"inbox of {rank}").decode()) for rank in range(self.size)]
