"""Manages device memory whose physical part can be released and allocated again while its addresses stay.

A segment is a range of reserved addresses with physical memory mapped into it (CUDA's virtual memory management). While
it is unmapped, tensors, CUDA graphs and descriptors keep its address; a kernel that reads it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meltcore.common.errors import MeltcoreError, SleepError
from meltcore.common.host_memory import host_available_bytes
from meltcore.common.sizes import size_text


class OutOfMemoryError(MeltcoreError):
    """Reports that the driver has no physical memory, of the device or pinned, for a request."""


class MemoryDriver(Protocol):
    """The calls of CUDA's driver that segments need, for one device. Addresses and handles are integers.

    Copies and fills are asynchronous; `synchronize` waits for all work of the device.
    """

    granularity: int  # bytes; sizes of segments are multiples of it

    def reserve(self, size: int) -> int: ...  # noqa: D102
    def free_address(self, address: int, size: int) -> None: ...  # noqa: D102
    def create(self, size: int) -> Any: ...  # noqa: D102
    def release(self, handle: Any) -> None: ...  # noqa: D102
    def map(self, address: int, size: int, handle: Any) -> None: ...  # noqa: D102
    def unmap(self, address: int, size: int) -> None: ...  # noqa: D102
    def allocate_pinned(self, size: int) -> int: ...  # noqa: D102
    def free_pinned(self, address: int) -> None: ...  # noqa: D102
    def copy_to_host(self, host_address: int, address: int, size: int) -> None: ...  # noqa: D102
    def copy_to_device(self, address: int, host_address: int, size: int) -> None: ...  # noqa: D102
    def fill_zero(self, address: int, size: int) -> None: ...  # noqa: D102
    def synchronize(self) -> None: ...  # noqa: D102
    def free_bytes(self) -> int: ...  # noqa: D102


@dataclass
class Segment:
    """A range of addresses. Its physical memory is `handle`, which is None while unmapped.

    `host_address` is the address of the segment's copy in host memory, if it has one.
    """

    tag: str
    address: int
    size: int
    handle: Any | None = None
    host_address: int | None = None


class VirtualMemory:
    """The segments of one engine on one device.

    Each has a tag, by which its content is copied or dropped during sleep.
    """

    def __init__(self, driver: MemoryDriver, available_host_bytes: Callable[[], int] = host_available_bytes) -> None:
        self._driver = driver
        self._available_host_bytes = available_host_bytes
        self._segments: dict[int, Segment] = {}  # by address

    def size(self, tag: str | None = None) -> int:
        """Return the bytes of all segments, or of the segments with a tag, mapped or not."""
        return sum(segment.size for segment in self._segments.values() if tag in (None, segment.tag))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of physical memory that are mapped."""
        return sum(segment.size for segment in self._segments.values() if segment.handle is not None)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory that hold copies, or held some."""
        return sum(segment.size for segment in self._segments.values() if segment.host_address is not None)

    def allocate(self, tag: str, size: int) -> int:
        """Return the address of a new segment of at least `size` bytes.

        Raises OutOfMemoryError and allocates nothing.
        """
        size = -(-size // self._driver.granularity) * self._driver.granularity
        segment = Segment(tag, self._driver.reserve(size), size)
        try:
            self._map(segment)
        except MeltcoreError:
            self._driver.free_address(segment.address, size)
            raise
        self._segments[segment.address] = segment
        return segment.address

    def free(self, address: int) -> None:
        """Release a segment with its address and its copy, after all work of the device."""
        segment = self._segments.pop(address)
        if segment.handle is not None:
            self._driver.synchronize()  # unlike cudaFree, unmapping does not wait for kernels that use the memory
            self._unmap(segment)
        self._driver.free_address(segment.address, segment.size)
        if segment.host_address is not None:
            self._driver.free_pinned(segment.host_address)

    def sleep(self, copied_tags: Collection[str]) -> int:
        """Unmap all segments, after copying the segments with `copied_tags` to pinned memory.

        Returns the unmapped bytes.

        The pinned memory is allocated at the first copy and kept. Raises SleepError and unmaps nothing if it cannot be
        allocated.
        """
        copied = [segment for segment in self._segments.values() if segment.tag in copied_tags]
        self._pin(copied)
        self._driver.synchronize()
        for segment in copied:
            assert segment.host_address is not None
            self._driver.copy_to_host(segment.host_address, segment.address, segment.size)
        self._driver.synchronize()
        unmapped_bytes = self.mapped_bytes
        for segment in self._segments.values():
            self._unmap(segment)
        return unmapped_bytes

    def wake(self, copied_tags: Collection[str]) -> int:
        """Map all segments at their addresses. Return the number of bytes that were copied back.

        Segments with `copied_tags` have the content that they had before the last sleep. Other segments have zeros.
        Raises SleepError if physical memory is missing. Nothing is mapped then, and `wake` can be called again.
        """
        needed_bytes, free_bytes = self.size(), self._driver.free_bytes()
        if needed_bytes > free_bytes:
            raise _too_little_memory(needed_bytes, free_bytes)
        copied_bytes = 0
        try:
            for segment in self._segments.values():
                self._map(segment)
                if segment.tag in copied_tags:
                    assert segment.host_address is not None
                    self._driver.copy_to_device(segment.address, segment.host_address, segment.size)
                    copied_bytes += segment.size
                else:
                    self._driver.fill_zero(segment.address, segment.size)
        except OutOfMemoryError as error:
            self.drop()
            raise _too_little_memory(needed_bytes, self._driver.free_bytes()) from error
        self._driver.synchronize()
        return copied_bytes

    def drop(self) -> None:
        """Unmap all mapped segments. Their content is lost."""
        self._driver.synchronize()
        for segment in self._segments.values():
            if segment.handle is not None:
                self._unmap(segment)

    def _pin(self, segments: Collection[Segment]) -> None:
        """Allocate pinned memory for the copy of every segment. On failure, no segment gets new memory."""
        unpinned = [segment for segment in segments if segment.host_address is None]
        needed_bytes = sum(segment.size for segment in unpinned)
        available_bytes = self._available_host_bytes() if unpinned else 0
        if needed_bytes > available_bytes:  # a host overcommits, and later ends a process
            raise SleepError(
                f"the copy of the weights takes {size_text(needed_bytes)} of pinned host memory, and "
                f"{size_text(available_bytes)} are available; sleep with keep disk needs none"
            )
        pinned: list[Segment] = []
        try:
            for segment in unpinned:
                segment.host_address = self._driver.allocate_pinned(segment.size)
                pinned.append(segment)
        except OutOfMemoryError as error:
            for segment in pinned:
                assert segment.host_address is not None
                self._driver.free_pinned(segment.host_address)
                segment.host_address = None
            raise SleepError(
                f"{size_text(needed_bytes)} of host memory cannot be pinned: {error}; sleep with keep disk needs none"
            ) from error

    def _map(self, segment: Segment) -> None:
        assert segment.handle is None
        handle = self._driver.create(segment.size)
        try:
            self._driver.map(segment.address, segment.size, handle)
        except MeltcoreError:
            self._driver.release(handle)
            raise
        segment.handle = handle

    def _unmap(self, segment: Segment) -> None:
        handle, segment.handle = segment.handle, None
        self._driver.unmap(segment.address, segment.size)
        self._driver.release(handle)


def _too_little_memory(needed_bytes: int, free_bytes: int) -> SleepError:
    return SleepError(
        f"waking takes {size_text(needed_bytes)} of device memory, and {size_text(free_bytes)} are free; "
        "let another model sleep, then wake this one again"
    )


class CudaMemoryDriver:
    """Implements `MemoryDriver` for a GPU. Calls run in its primary context, which torch has made current."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for a device. Raises MeltcoreError if the device has no virtual memory management."""
        from cuda.bindings import driver

        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.zeros(1, device=device)  # makes the context
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call(driver.cuDeviceGetAttribute(attribute, index), "asking for virtual memory management"):
            raise MeltcoreError(f"{torch.cuda.get_device_name(device)} has no virtual memory management")
        self._driver, self._device = driver, device
        self._fill_stream = torch.cuda.Stream(device)
        location = driver.CUmemLocation()
        location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        found = self._call(driver.cuMemGetAllocationGranularity(self._properties, least), "asking for the granularity")
        self.granularity = int(found)

    def reserve(self, size: int) -> int:
        """Return the first of `size` addresses that no other allocation gets."""
        return int(self._call(self._driver.cuMemAddressReserve(size, 0, 0, 0), "reserving addresses"))

    def free_address(self, address: int, size: int) -> None:
        """Release reserved addresses."""
        self._call(self._driver.cuMemAddressFree(address, size), "freeing addresses")

    def create(self, size: int) -> Any:
        """Return the handle of new physical memory."""
        return self._call(self._driver.cuMemCreate(size, self._properties, 0), "creating physical memory")

    def release(self, handle: Any) -> None:
        """Release physical memory as soon as it is not mapped."""
        self._call(self._driver.cuMemRelease(handle), "releasing physical memory")

    def map(self, address: int, size: int, handle: Any) -> None:
        """Map physical memory at reserved addresses, for reads and writes of this device."""
        self._call(self._driver.cuMemMap(address, size, 0, handle, 0), "mapping memory")
        try:
            self._call(self._driver.cuMemSetAccess(address, size, [self._access], 1), "setting access to memory")
        except MeltcoreError:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        """End a mapping. The caller has waited for all kernels that use it."""
        self._call(self._driver.cuMemUnmap(address, size), "unmapping memory")

    def allocate_pinned(self, size: int) -> int:
        """Return the address of new pinned host memory."""
        return int(self._call(self._driver.cuMemHostAlloc(size, 0), "pinning host memory"))

    def free_pinned(self, address: int) -> None:
        """Free pinned host memory."""
        self._call(self._driver.cuMemFreeHost(address), "freeing host memory")

    def copy_to_host(self, host_address: int, address: int, size: int) -> None:
        """Queue a copy from the device."""
        self._call(self._driver.cuMemcpyDtoHAsync(host_address, address, size, 0), "copying to the host")

    def copy_to_device(self, address: int, host_address: int, size: int) -> None:
        """Queue a copy to the device."""
        self._call(self._driver.cuMemcpyHtoDAsync(address, host_address, size, 0), "copying to the device")

    def fill_zero(self, address: int, size: int) -> None:
        """Queue a fill with zeros on a stream of its own. It overlaps with copies, which are limited by the bus."""
        self._call(self._driver.cuMemsetD8Async(address, 0, size, self._fill_stream.cuda_stream), "filling memory")

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self._device)

    def free_bytes(self) -> int:
        """Return the free bytes of the device."""
        return torch.cuda.mem_get_info(self._device)[0]

    @staticmethod
    def _call(result: tuple[Any, ...], action: str) -> Any:
        """Return the output of a driver call. Raises OutOfMemoryError, or MeltcoreError for other errors."""
        error, *values = result
        if error.value:
            kind = OutOfMemoryError if error.name == "CUDA_ERROR_OUT_OF_MEMORY" else MeltcoreError
            raise kind(f"CUDA error {error.name} when {action}")
        return values[0] if values else None
