"""Lets an engine sleep and wake between its steps.

An engine that sleeps holds no weights and no caches on its device.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from meltcore.common.errors import RequestError, SleepError
from meltcore.protocol.shell import Asleep, Awake, Sleep, Wake

SleepMessage = Sleep | Wake


class SleepResult(NamedTuple):
    """The result of a sleep: the released bytes, and the bytes that the engine still holds on its device."""

    freed_bytes: int
    resident_bytes: int


@runtime_checkable
class SleepableEngine(Protocol):
    """Defines the part of an engine's interface that only engines with a sleep mode have."""

    def sleep(self, keep: Literal["host", "disk"]) -> SleepResult:
        """Release memory. The shell calls this only while there is no work.

        Raises SleepError and changes nothing if this is not possible.
        """

    def wake(self) -> int:
        """Allocate the memory again. Return the bytes of weights that were copied.

        Raises SleepError if this is not possible; the engine then stays asleep.
        """


class SleepState:
    """Stores whether an engine is asleep or awake, and answers `Sleep` and `Wake`."""

    def __init__(self) -> None:
        self._is_asleep = False

    def check_awake(self) -> None:
        """Raise RequestError if the engine sleeps. Its server should have held the request, or woken the engine."""
        if self._is_asleep:
            raise RequestError("the model sleeps and must be woken before it is asked", status=503, code="model_asleep")

    def handle(self, engine: object, message: SleepMessage, open_requests: int) -> Asleep | Awake:
        """Change the state of an engine without work, and return its answer."""
        start_s = time.monotonic()
        try:
            if isinstance(message, Sleep):
                slept = self._sleep(engine, message.keep, open_requests)
                return Asleep(slept.freed_bytes, time.monotonic() - start_s, slept.resident_bytes)
            return Awake(bytes_copied=self._wake(engine), seconds=time.monotonic() - start_s)
        except SleepError as error:
            seconds = time.monotonic() - start_s
            return Asleep(0, seconds, error=str(error)) if isinstance(message, Sleep) else Awake(seconds, 0, str(error))

    def _sleep(self, engine: object, keep: Literal["host", "disk"], open_requests: int) -> SleepResult:
        if self._is_asleep:
            raise SleepError("the engine sleeps already")
        if open_requests:
            raise SleepError(f"the engine has {open_requests} open requests; it sleeps only without any")
        if not isinstance(engine, SleepableEngine):
            raise SleepError(f"{type(engine).__name__} has no sleep mode")
        slept = engine.sleep(keep)
        self._is_asleep = True
        return slept

    def _wake(self, engine: object) -> int:
        if not self._is_asleep:
            raise SleepError("the engine does not sleep")
        assert isinstance(engine, SleepableEngine)
        bytes_copied = engine.wake()
        self._is_asleep = False
        return bytes_copied
