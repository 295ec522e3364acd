"""Compiles kernels side by side instead of one after the other as they are first launched.

A rehearsal goes through the launches of serving. Triton's hook in front of its compiler notes what is missing and
leaves it out, then a few threads compile what was noted: most of that work runs outside of Python's lock. Processes
that need the same kernels begin at unlike ones, and find in Triton's cache what another has compiled meanwhile.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Beyond these the part that Python's lock keeps in line is all that is left.
_MOST_THREADS = 8

_Item = TypeVar("_Item")


class Turn(NamedTuple):
    """Of processes that compile the same at the same time: which one this is, and how many there are."""

    number: int = 0
    processes: int = 1

    def order(self, items: Sequence[_Item]) -> list[_Item]:
        """All of them, from this process's share on."""
        first = len(items) * self.number // self.processes
        return [*items[first:], *items[:first]]


_ALONE = Turn()


def compile_ahead(rehearse: Callable[[], None], use_device: Callable[[], None], turn: Turn = _ALONE) -> int:
    """Compile what `rehearse` would launch and what is not compiled yet. Returns how many kernels that were.

    Nothing that is missing runs in the rehearsal: what such kernels would have written is whatever was in memory.
    `use_device` makes the device the current one of a thread.
    """
    missing: dict[tuple[JITFunction[Any], str], None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # the hook's own names
        missing[fn.jit_function, compile["specialization_data"]] = None
        return True  # neither compile nor launch it

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        rehearse()
    finally:
        knobs.runtime.jit_cache_hook = before
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    making: defaultdict[tuple[str, ...], Lock] = defaultdict(Lock)
    with ThreadPoolExecutor(threads, initializer=use_device) as pool:
        jobs = [
            pool.submit(_compile, function, specialization, making)
            for function, specialization in turn.order(list(missing))
        ]
    for job in jobs:
        job.result()
    return len(missing)


def _compile(
    function: JITFunction[Any], specialization: str, making: Mapping[tuple[str, ...], AbstractContextManager[Any]]
) -> None:
    """The kernel, and what launches it: a C compiler makes that for each kind of arguments, as slowly as the kernel
    itself. It stays in Triton's cache, where the first launch finds it. `making`: by kind, so that none is made twice.
    """
    kernel = function.preload(specialization)
    if kernel is not None:
        with making[tuple(map(str, kernel.src.signature.values()))]:
            driver.active.launcher_cls(kernel.src, kernel.metadata)
