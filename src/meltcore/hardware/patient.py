"""NVML with patience that ends: a driver call on a dying GPU may never return, and a certificate must.

A question that does not return in time is answered with NVML's TIMEOUT, which every reader takes for unreadable, and
its GPU is not asked again.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pynvml
from pynvml import NVMLError

from meltcore.errors import MeltcoreError
from meltcore.hardware.nvml import Nvml
from meltcore.results.patience import answer_within

START_LIMIT_S = 60.0  # NVML takes several seconds on a machine of eight GPUs without persistence mode
LIMIT_S = 10.0  # NVML answers in microseconds to milliseconds; waking a sleeping GPU takes two or three seconds

_NO_DRIVER_CALLS = ("identity",)

Item = TypeVar("Item")
Found = TypeVar("Found")


def at_once(question: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`question` of every item, side by side, in their order: eight GPUs have 144 NVLinks to be asked about."""
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        return list(pool.map(question, items))


def patiently(start: Callable[[], Nvml], limit_s: float = START_LIMIT_S) -> "PatientNvml":
    """`start` is what loads the driver's library; what it raises comes through. MeltcoreError where it hangs."""
    try:
        return PatientNvml(answer_within(limit_s, start))
    except TimeoutError as error:
        raise MeltcoreError(f"the NVIDIA driver does not answer: {error}; look in the kernel log") from error


class PatientNvml(Nvml):
    """Asks `inner` everything it is asked. The threads of calls that hang are left behind and end with the process."""

    def __init__(self, inner: Nvml, limit_s: float = LIMIT_S) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._stuck: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return object.__getattribute__(self, name)
        answer = getattr(self._inner, name)
        return answer if name in _NO_DRIVER_CALLS else partial(self._ask, answer)

    def _ask(self, question: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        handle = arguments[0] if arguments else None
        if any(handle is stuck for stuck in self._stuck if handle is not None):
            raise NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        try:
            return answer_within(self._limit_s, partial(question, *arguments, **named))
        except TimeoutError:
            self._stuck.append(handle)
            raise NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
