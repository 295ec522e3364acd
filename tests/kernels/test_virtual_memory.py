"""Segments of device memory that are unmapped and mapped again, on a driver in Python that refuses every misuse."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from meltcore.common.errors import SleepError
from meltcore.kernels.virtual_memory import OutOfMemoryError, VirtualMemory

UNIT = 16


class Driver:
    """Device memory as bytes. Copies and fills wait for `synchronize`; what they use must stay mapped until then."""

    granularity = UNIT

    def __init__(self, capacity: int = 100 * UNIT) -> None:
        self.capacity = capacity
        self.reserved: dict[int, int] = {}
        self.physical: dict[int, bytearray] = {}
        self.mapped: dict[int, int] = {}
        self.pinned: dict[int, bytearray] = {}
        self.pinnable_bytes = 10**6
        self.queued: list[tuple[int, Callable[[], None]]] = []
        self.map_limit = 10**6
        self._numbers = count(1)

    def reserve(self, size: int) -> int:
        assert size % UNIT == 0
        address = next(self._numbers) << 20
        self.reserved[address] = size
        return address

    def free_address(self, address: int, size: int) -> None:
        assert address not in self.mapped
        assert self.reserved.pop(address) == size

    def create(self, size: int) -> int:
        if size > self.free_bytes():
            raise OutOfMemoryError("CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._numbers)
        self.physical[handle] = bytearray(b"?" * size)
        return handle

    def release(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        del self.physical[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        assert address not in self.mapped
        assert self.reserved[address] == size == len(self.physical[handle])
        if len(self.mapped) == self.map_limit:
            raise OutOfMemoryError("CUDA_ERROR_OUT_OF_MEMORY")
        self.mapped[address] = handle

    def unmap(self, address: int, size: int) -> None:
        assert self.reserved[address] == size
        assert address not in [used for used, _ in self.queued], "unmapped while a copy runs"
        del self.mapped[address]

    def allocate_pinned(self, size: int) -> int:
        if sum(map(len, self.pinned.values())) + size > self.pinnable_bytes:
            raise OutOfMemoryError("CUDA_ERROR_OUT_OF_MEMORY")
        address = next(self._numbers)
        self.pinned[address] = bytearray(size)
        return address

    def free_pinned(self, address: int) -> None:
        del self.pinned[address]

    def copy_to_host(self, host_address: int, address: int, size: int) -> None:
        def copy() -> None:
            self.pinned[host_address][:] = self.content(address)

        assert len(self.pinned[host_address]) == len(self.content(address)) == size
        self.queued.append((address, copy))

    def copy_to_device(self, address: int, host_address: int, size: int) -> None:
        def copy() -> None:
            self.content(address)[:] = self.pinned[host_address]

        assert len(self.pinned[host_address]) == len(self.content(address)) == size
        self.queued.append((address, copy))

    def fill_zero(self, address: int, size: int) -> None:
        def fill() -> None:
            self.content(address)[:] = bytes(size)

        self.queued.append((address, fill))

    def synchronize(self) -> None:
        for _, call in self.queued:
            call()
        self.queued.clear()

    def free_bytes(self) -> int:
        return self.capacity - sum(map(len, self.physical.values()))

    def content(self, address: int) -> bytearray:
        return self.physical[self.mapped[address]]


def fill(driver: Driver, address: int, text: bytes) -> None:
    driver.content(address)[: len(text)] = text


def make(capacity: int = 100 * UNIT, host_bytes: int = 10**6) -> tuple[Driver, VirtualMemory]:
    driver = Driver(capacity)
    return driver, VirtualMemory(driver, lambda: host_bytes)


def test_weights_return_to_their_addresses_and_caches_hold_zeros() -> None:
    driver, memory = make()
    weights = [memory.allocate("weights", size) for size in (UNIT, 3 * UNIT + 1)]
    cache = memory.allocate("kv_cache", 5 * UNIT)
    assert (memory.size("weights"), memory.size()) == (5 * UNIT, 10 * UNIT), "rounded up to whole units"
    for address, text in zip([*weights, cache], (b"one", b"two", b"page"), strict=True):
        fill(driver, address, text)
    for cycle in range(3):
        assert memory.sleep(["weights"]) == 10 * UNIT
        assert (driver.mapped, driver.physical, memory.mapped_bytes) == ({}, {}, 0)
        assert set(driver.reserved) == {*weights, cache}, "the addresses stay reserved"
        assert memory.wake(["weights"]) == 5 * UNIT
        assert [bytes(driver.content(address)[:3]) for address in weights] == [b"one", b"two"]
        assert not any(driver.content(cache))
        fill(driver, cache, f"page {cycle}".encode())
        assert memory.pinned_bytes == sum(map(len, driver.pinned.values())) == 5 * UNIT, "pinned once"
    for address in (*weights, cache):
        memory.free(address)
    assert [driver.reserved, driver.physical, driver.mapped, driver.pinned] == [{}, {}, {}, {}], "leaked"


def test_dropped_weights_need_no_host_memory() -> None:
    driver, memory = make(host_bytes=0)
    address = memory.allocate("weights", UNIT)
    memory.sleep([])
    assert memory.wake([]) == 0
    assert not any(driver.content(address))
    with pytest.raises(SleepError, match=r"pinned host memory, and 0 B are available; sleep with keep disk"):
        memory.sleep(["weights"])
    assert memory.mapped_bytes == UNIT, "it serves on"


def test_host_memory_that_cannot_be_pinned_leaves_the_engine_awake() -> None:
    driver, memory = make()
    for _ in range(3):
        memory.allocate("weights", UNIT)
    driver.pinnable_bytes = 2 * UNIT
    with pytest.raises(SleepError, match="cannot be pinned"):
        memory.sleep(["weights"])
    assert (memory.mapped_bytes, driver.pinned) == (3 * UNIT, {})
    driver.pinnable_bytes = 3 * UNIT
    memory.sleep(["weights"])


@pytest.mark.parametrize("hidden", [False, True], ids=["seen before", "met halfway"])
def test_wake_without_memory_maps_nothing_and_can_be_repeated(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, memory = make()
    first, second = (memory.allocate("weights", 4 * UNIT) for _ in range(2))
    fill(driver, second, b"kept")
    memory.sleep(["weights"])
    other = driver.create(94 * UNIT)
    with monkeypatch.context() as patch:
        if hidden:
            patch.setattr(driver, "free_bytes", lambda: 10**6)
            patch.setattr(driver, "map_limit", 1)
        for _ in range(2):
            with pytest.raises(SleepError, match="let another model sleep, then wake this one again"):
                memory.wake(["weights"])
            assert (driver.mapped, list(driver.physical)) == ({}, [other])
    driver.release(other)
    assert memory.wake(["weights"]) == 8 * UNIT
    assert bytes(driver.content(second)[:4]) == b"kept"
    assert first in driver.mapped


def test_allocation_without_memory_leaks_no_address() -> None:
    driver, memory = make(capacity=UNIT)
    with pytest.raises(OutOfMemoryError):
        memory.allocate("weights", 2 * UNIT)
    driver.map_limit = 0
    with pytest.raises(OutOfMemoryError):
        memory.allocate("weights", UNIT)
    assert (driver.reserved, driver.physical) == ({}, {})


def test_segment_of_a_sleeping_engine_can_be_freed() -> None:
    driver, memory = make()
    kept, freed = (memory.allocate("weights", UNIT) for _ in range(2))
    memory.sleep(["weights"])
    memory.free(freed)
    assert memory.wake(["weights"]) == UNIT
    assert set(driver.reserved) == {kept}
