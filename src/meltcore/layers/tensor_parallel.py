"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): a group of ranks that shard one model.

Each rank is a process with a device of its own. It holds a shard of every layer's heads or intermediate size, and of
the vocabulary. The ranks all-reduce what a layer adds to the residual stream.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meltcore.common.errors import ConfigError, ShardError
from meltcore.kernels.comm.all_reduce import (
    MAX_INT64,
    all_reduce,
    all_reduce_max,
    all_reduce_rms_norm,
    all_reduce_rms_norm_reference,
    can_all_reduce,
    can_fuse_norm,
    combine_all_reduce_rms_norm,
)
from meltcore.kernels.comm.buffer_sizes import buffer_bytes
from meltcore.kernels.comm.staged_all_reduce import (
    can_stage,
    staged_all_reduce_rms_norm,
    staged_combine_all_reduce_rms_norm,
)
from meltcore.kernels.comm.symmetric_memory import EMPTY_BYTE, SymmetricMemory, aborted_memory
from meltcore.kernels.moe.combine import combine
from meltcore.kernels.norm import Norm, add_rms_norm, rms_norm

_DESTROY_TIMEOUT_S = 5.0
_VERIFY_TIMEOUT_S = 120.0  # other ranks may still be compiling
_PEER_MEMORY_ADVICE = "--debug no-peer-memory leaves all reductions to NCCL"
_DRIVER = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class TensorParallelGroup:
    """One rank's view of its group. All ranks call each collective, in the same order and with the same shapes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on_gpus = self.aborted = self._without_collectives = False
        # Without it torch.distributed does all reductions.
        self.symmetric_memory: SymmetricMemory | None = None

    # --- shards ---

    def shard(self, total: int, name: str) -> range:
        """Return this rank's part of `total` items.

        Raises ShardError if `total` is not divisible by the group's size.
        """
        if total % self.size:
            raise ShardError(f"--tensor-parallel-size {self.size} does not divide this model's {total} {name}")
        shard_size = total // self.size
        return range(self.rank * shard_size, (self.rank + 1) * shard_size)

    def shard_or_replicate(self, total: int, name: str) -> range:
        """Return this rank's part of `total` items, or one item if there are fewer items than ranks.

        Neighboring ranks then hold the same item. Raises ShardError if items cannot be divided evenly.
        """
        if total >= self.size or self.size % total:
            return self.shard(total, name)
        item = self.rank * total // self.size
        return range(item, item + 1)

    # --- life of the group ---

    def join(self, rendezvous: Path, device: torch.device, timeout_s: float, *, peer_memory: bool = True) -> None:
        """Connect to the other ranks. All ranks use the file `rendezvous`, which no other group has used.

        With `peer_memory`, reductions use symmetric memory if the GPUs have peer access. Raises RuntimeError if other
        ranks do not join within `timeout_s`. Raises ConfigError if this process is in a group already, since
        torch.distributed allows one group per process.
        """
        if dist.is_initialized():
            raise ConfigError(
                "--tensor-parallel-size: this process is in another group of torch.distributed, and can be in only one"
            )
        self.on_gpus = on_gpus = device.type == "cuda"
        if on_gpus:
            torch.cuda.set_device(device)
            # NVLink multicast is a resource of the whole machine that a failed program can leave blocked.
            os.environ["NCCL_NVLS_ENABLE"] = "0"
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise Gloo resolves the name of this host
        store = dist.FileStore(str(rendezvous), self.size)
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            store=dist.PrefixStore("collectives", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=device if on_gpus else None,
        )
        first_gpu = (device.index or 0) - self.rank
        if on_gpus and peer_memory and has_peer_access(range(first_gpu, first_gpu + self.size)):
            self.symmetric_memory = allocate_symmetric_memory(
                self.rank, self.size, device, lambda local: self._exchange_bytes(store, local)
            )
            verify_symmetric_memory(self.symmetric_memory, device)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit of collectives. A collective that exceeds its limit raises RuntimeError."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """Make the device skip all waits for other ranks. Results of collectives are undefined from then on."""
        if self.aborted:
            return
        self.aborted = True
        if self.symmetric_memory is not None:
            self.symmetric_memory.abort()
        if self.on_gpus and dist.is_initialized():
            # NCCL's abort may itself wait for ranks that are gone (NVIDIA/nccl issue 1777), so it runs unattended.
            threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True).start()

    def destroy(self) -> None:
        """Leave the group together with all other ranks, which are awaited for at most five seconds.

        No step may be running.
        """
        self.symmetric_memory = None
        if dist.is_initialized():
            destroy_thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
            destroy_thread.start()
            destroy_thread.join(_DESTROY_TIMEOUT_S)

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Return a context for warm-up launches, in which collectives neither send nor wait.

        Results of collectives are undefined.

        Small reductions launch the same kernels, in a separate symmetric memory whose waits are skipped. Reductions of
        long messages are compiled and not run.
        """
        memory, self._without_collectives = self.symmetric_memory, True
        if memory is not None:
            self.symmetric_memory = aborted_memory(memory)
        try:
            yield
        finally:
            self.symmetric_memory, self._without_collectives = memory, False

    # --- collectives ---

    def all_reduce(self, partial_sum: torch.Tensor) -> torch.Tensor:
        """Replace `partial_sum`, [rows, columns], by the sum of all ranks' partial sums."""
        if self.symmetric_memory is not None and can_all_reduce(partial_sum):
            return all_reduce(partial_sum, self.symmetric_memory)
        if not self._without_collectives:
            dist.all_reduce(partial_sum)
        return partial_sum

    def all_reduce_add_rms_norm(
        self, residual: torch.Tensor | None, partial_sum: torch.Tensor, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return total = residual + the sum of all ranks' partial sums, and norm(total).

        Without a `norm` return total twice. All tensors are [tokens, hidden_size]. The total is written to `residual`
        if that is given. `partial_sum` is overwritten. Shapes and types alone select the kernel, so that all ranks
        select the same one.
        """
        if norm is None:
            total = self.all_reduce(partial_sum)
            total = total if residual is None else residual.add_(total)
            return total, total
        memory = self.symmetric_memory
        if memory is not None and can_fuse_norm(partial_sum, self.size):
            return all_reduce_rms_norm(partial_sum, memory, norm, residual)
        if memory is not None and can_all_reduce(partial_sum):
            total = all_reduce(partial_sum, memory, residual)
            return total, rms_norm(total, *norm)
        if memory is not None and can_stage(partial_sum):
            return staged_all_reduce_rms_norm(partial_sum, memory, norm, residual)
        if not self._without_collectives:
            dist.all_reduce(partial_sum)
        if residual is None:
            return partial_sum, rms_norm(partial_sum, *norm)
        return residual, add_rms_norm(residual, partial_sum, *norm)

    def combine_all_reduce_add_rms_norm(
        self, residual: torch.Tensor, outputs: torch.Tensor, topk_weights: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `all_reduce_add_rms_norm` of the weighted sum of each token's expert outputs.

        outputs: [tokens * top_k, hidden_size]; topk_weights: [tokens, top_k] float32.
        """
        memory = self.symmetric_memory
        if memory is not None and can_fuse_norm(residual, self.size):
            return combine_all_reduce_rms_norm(outputs, memory, topk_weights, norm, residual)
        if memory is not None and not can_all_reduce(residual) and can_stage(residual):
            return staged_combine_all_reduce_rms_norm(outputs, memory, topk_weights, norm, residual)
        return self.all_reduce_add_rms_norm(residual, combine(outputs, topk_weights), norm)

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by the elementwise maximum over all ranks. values: [...] int64."""
        if self.symmetric_memory is not None and values.numel() <= MAX_INT64:
            return all_reduce_max(values, self.symmetric_memory)
        if not self._without_collectives:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, columns: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the columns of all ranks on rank 0, in rank order.

        [rows, columns] -> [rows, size * columns] on rank 0, and None on the other ranks.
        """
        columns = columns.contiguous()
        gathered = [torch.empty_like(columns) for _ in range(self.size)] if self.rank == 0 else None
        if not self._without_collectives:
            dist.gather(columns, gathered)
        return None if gathered is None else torch.cat(gathered, dim=1)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` by the values of rank 0."""
        if not self._without_collectives:
            dist.broadcast(values, src=0)
        return values

    def _exchange_bytes(self, store: dist.Store, local: bytes) -> list[bytes]:
        """Share this rank's bytes. Returns the bytes of all ranks in rank order."""
        store.set(f"symmetric memory of {self.rank}", local.hex())
        return [bytes.fromhex(store.get(f"symmetric memory of {rank}").decode()) for rank in range(self.size)]


class _IpcHandle(ctypes.Structure):
    """The driver's struct CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


def has_peer_access(devices: range) -> bool:
    """Return whether each of these GPUs can write to the memory of every other GPU."""
    return all(torch.cuda.can_device_access_peer(gpu, peer) for gpu in devices for peer in devices if gpu != peer)


def allocate_symmetric_memory(
    rank: int, world_size: int, device: torch.device, exchange: Callable[[bytes], list[bytes]]
) -> SymmetricMemory:
    """Allocate this rank's buffer and map the buffers of all other ranks; see `share_allocation`."""
    return SymmetricMemory.of(share_allocation(rank, buffer_bytes(world_size), device, exchange), rank, device)


def share_allocation(
    rank: int, num_bytes: int, device: torch.device, exchange: Callable[[bytes], list[bytes]]
) -> list[int]:
    """Allocate memory filled with EMPTY_BYTE and map the memory of all other ranks by CUDA's inter-process handles.

    It uses peer access without NVLink multicast, and calls the driver directly, since torch's symmetric memory sets up
    more. `exchange` takes this rank's bytes and returns the bytes of all ranks in rank order. Returns the address of
    each rank's memory on this device. The allocation lives as long as the process. Raises RuntimeError with the
    driver's reason if it fails.
    """
    torch.cuda.synchronize(device)  # makes the device's context the current one
    driver = ctypes.CDLL(_DRIVER)
    size = ctypes.c_size_t(num_bytes)
    local_pointer = ctypes.c_uint64()
    handle = _IpcHandle()
    _call_driver(driver, "cuMemAlloc_v2", ctypes.byref(local_pointer), size)
    _call_driver(driver, "cuMemsetD8_v2", local_pointer, ctypes.c_ubyte(EMPTY_BYTE), size)
    _call_driver(driver, "cuIpcGetMemHandle", ctypes.byref(handle), local_pointer)
    torch.cuda.synchronize(device)  # filled before any rank writes
    pointers = []
    for buffer_rank, handle_bytes in enumerate(exchange(bytes(handle))):
        pointer = local_pointer
        if buffer_rank != rank:
            pointer = ctypes.c_uint64()
            peer_handle = _IpcHandle.from_buffer_copy(handle_bytes)
            _call_driver(
                driver, "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), peer_handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
            )
        pointers.append(pointer.value)
    return pointers


def verify_symmetric_memory(memory: SymmetricMemory, device: torch.device) -> None:
    """Check each collective at start, together with all other ranks, so that a fault is not first seen in an answer.

    Raises RuntimeError if a result is late or wrong.
    """
    values = torch.arange(2**14, dtype=torch.float32, device=device).view(16, 1024)  # each rank owns some
    norm = Norm(values[1], 1e-6)
    int64_values = torch.arange(-50, 50, device=device)
    for _ in range(3):
        total = all_reduce(values + memory.rank, memory)
        normalized = all_reduce_rms_norm(values + memory.rank, memory, norm)
        staged = staged_all_reduce_rms_norm(values + memory.rank, memory, norm)
        maximum = all_reduce_max(int64_values * (1 if memory.rank == 0 else -1), memory)
    done_event = torch.cuda.Event()
    done_event.record()
    deadline = time.monotonic() + _VERIFY_TIMEOUT_S
    while not done_event.query():
        if time.monotonic() > deadline:
            memory.abort()
            raise RuntimeError(
                f"no data arrives through peer memory within {_VERIFY_TIMEOUT_S:g} s; {_PEER_MEMORY_ADVICE}"
            )
        time.sleep(0.001)
    expected_total, expected_norm = all_reduce_rms_norm_reference([values + rank for rank in range(memory.ranks)], norm)
    is_correct = (
        all(torch.equal(each, expected_total) for each in (total, normalized[0], staged[0]))
        and all(torch.allclose(each, expected_norm, rtol=1e-5) for each in (normalized[1], staged[1]))
        and torch.equal(maximum, int64_values.abs())
    )
    if not is_correct:
        raise RuntimeError(f"reductions through peer memory are wrong; {_PEER_MEMORY_ADVICE}")


def _call_driver(driver: ctypes.CDLL, name: str, *args: object) -> None:
    error_code = getattr(driver, name)(*args)
    if error_code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(error_code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'error {error_code}'}")
