"""Memory of each rank's GPU that the GPUs of all others can write to, by CUDA's inter-process handles.

Plain peer access, and no NVLink multicast. The driver's own library is called, since torch has no words for it that do
not set up more.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from meltcore.kernels.all_reduce import normalised_sum_of_shares, peer_largest, peer_sum, peer_sum_normalised
from meltcore.kernels.inbox import EMPTY_BYTE, Peers, inbox_bytes, make_peers
from meltcore.kernels.norm import Norm

_DRIVER = "libcuda.so.1"
_PROOF_LIMIT_S = 120.0  # other ranks may still be compiling
_ADVICE = "--debug no-peer-memory leaves all sums to NCCL"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


def can_reach_all(devices: range) -> bool:
    """Whether every one of these GPUs can write to every other's memory."""
    return all(
        torch.cuda.can_device_access_peer(first, second) for first in devices for second in devices if first != second
    )


def open_inboxes(rank: int, ranks: int, device: torch.device, exchange: Callable[[bytes], list[bytes]]) -> Peers:
    """Allocate our inbox and open everybody else's.

    `exchange` gives everybody's bytes, in order of ranks, for ours. What is allocated stays for as long as the process
    does. Raises RuntimeError with the driver's reason where it refuses.
    """
    torch.cuda.synchronize(device)  # makes the device's context the current one
    driver = ctypes.CDLL(_DRIVER)
    size = ctypes.c_size_t(inbox_bytes(ranks))
    own = ctypes.c_uint64()
    handle = _Handle()
    _call(driver, "cuMemAlloc_v2", ctypes.byref(own), size)
    _call(driver, "cuMemsetD8_v2", own, ctypes.c_ubyte(EMPTY_BYTE), size)
    _call(driver, "cuIpcGetMemHandle", ctypes.byref(handle), own)
    torch.cuda.synchronize(device)  # empty before anybody writes
    addresses = []
    for other, content in enumerate(exchange(bytes(handle))):
        address = own
        if other != rank:
            address = ctypes.c_uint64()
            theirs = _Handle.from_buffer_copy(content)
            _call(driver, "cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(_LAZY_PEER_ACCESS))
        addresses.append(address.value)
    return make_peers(addresses, rank, device)


def prove_inboxes(peers: Peers, device: torch.device) -> None:
    """Send something through all inboxes, together with all other ranks.

    Raises RuntimeError where it does not arrive, or not as it was sent: better at the start than in an answer.
    """
    numbers = torch.arange(4096, dtype=torch.float32, device=device).view(4, 1024)
    norm = Norm(numbers[1], 1e-6)
    keys = torch.arange(-50, 50, device=device)
    for _ in range(3):
        total = peer_sum(numbers + peers.rank, peers)
        normalised = peer_sum_normalised(numbers + peers.rank, peers, norm)
        largest = peer_largest(keys * (1 if peers.rank == 0 else -1), peers)
    sent = torch.cuda.Event()
    sent.record()
    until = time.monotonic() + _PROOF_LIMIT_S
    while not sent.query():
        if time.monotonic() > until:
            peers.give_up()
            raise RuntimeError(f"nothing arrives through peer memory within {_PROOF_LIMIT_S:g} s; {_ADVICE}")
        time.sleep(0.001)
    expected = normalised_sum_of_shares([numbers + rank for rank in range(peers.ranks)], norm)
    right = (
        torch.equal(total, expected[0])
        and torch.equal(normalised[0], expected[0])
        and torch.allclose(normalised[1], expected[1], rtol=1e-5)
        and torch.equal(largest, keys.abs())
    )
    if not right:
        raise RuntimeError(f"sums through peer memory are wrong; {_ADVICE}")


def _call(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")
