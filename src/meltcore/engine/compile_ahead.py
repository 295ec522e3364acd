"""Compiles kernels side by side instead of one after the other as they are first launched.

A rehearsal goes through the launches of serving. Triton's hook in front of its compiler notes what is missing and
leaves it out, then a few threads compile what was noted: most of that work runs outside of Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Beyond these the part that Python's lock keeps in line is all that is left.
_MOST_THREADS = 8


def compile_ahead(rehearse: Callable[[], None], use_device: Callable[[], None]) -> int:
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
    with ThreadPoolExecutor(threads, initializer=use_device) as pool:
        list(pool.map(lambda each: _compile(*each), missing))
    return len(missing)


def _compile(function: JITFunction[Any], specialization: str) -> None:
    """The kernel, and what launches it: a C compiler makes that for each kind of arguments, in a process of its own, as
    slowly as the kernel itself. It stays in Triton's cache, where the first launch finds it."""
    kernel = function.preload(specialization)
    if kernel is not None:
        driver.active.launcher_cls(kernel.src, kernel.metadata)
