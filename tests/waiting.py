"""How long a test waits.

No test judges how fast something is: what must end ends within one limit that a machine at several times its load
keeps, what must not block is shown by the order of events or by CPU time, and what must be fast is a benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 120.0  # the longest that takes 20 s on two idle cores; below the limit of a whole test, which names no reason
POLL_S = 0.02

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], what: str = "the condition", limit_s: float = WAIT_S) -> Found:
    """Poll until `condition()` is true and return its value; fail with `what` after the limit."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"waited {limit_s:g} s in vain for: {what}"
        time.sleep(POLL_S)
    return found


async def until(condition: Callable[[], object], what: str = "the condition", limit_s: float = WAIT_S) -> None:
    """Poll as `wait_until` does, while the event loop goes on."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {limit_s:g} s in vain for: {what}"
        await asyncio.sleep(POLL_S / 4)
