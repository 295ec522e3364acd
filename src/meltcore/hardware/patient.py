"""NVML with patience that ends: a driver call on a dying GPU may never return, and a certificate must.

Each question is asked on a thread of its own. One that does not return in time is answered with NVML's TIMEOUT, which
every reader takes for unreadable, and its GPU is not asked again.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pynvml
from pynvml import NVMLError

from meltcore.hardware.nvml import Nvml

LIMIT_S = 10.0  # NVML answers in microseconds to milliseconds; waking a sleeping GPU takes two or three seconds

_NO_DRIVER_CALLS = ("identity",)

Item = TypeVar("Item")
Found = TypeVar("Found")


def at_once(question: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`question` of every item, side by side, in their order: eight GPUs have 144 NVLinks to be asked about."""
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        return list(pool.map(question, items))


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
        answers: list[Any] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(question(*arguments, **named))
            except BaseException as error:  # handed to whoever asked
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if thread.is_alive():
            self._stuck.append(handle)
            raise NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        if errors:
            raise errors[0]
        return answers[0]
