"""What a process keeps of the host's memory: while it works all that helps, and after a burst only what it needs.

Memory goes back in whole: pages of 4 KiB from the C library, arenas of 1 MiB from Python's own allocator. A few small
objects that outlive a burst, strewn over all it took, hold on to far more than they are.
"""

from __future__ import annotations

import ctypes
import gc
import sys

# Parameter numbers of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# glibc's; other C libraries have other habits.
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

# glibc gives threads arenas of their own, and `malloc_trim` keeps the free end of all but the first: what ZeroMQ's
# thread read of 10,000 prompts stayed with the engine, 8 MB; nothing does with one arena for all (2026-11-21).
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # for the environment of a process


def use_one_arena() -> None:
    """`ONE_ARENA` for this process; before its first thread, since what exists stays."""
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, instead of giving megabytes back and faulting them in again.

    The bundled model on a CPU, 256 sequences a step, spent 4.7 s of CPU without and 3.2 s with it (2026-11-21).
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc takes
        _mallopt(_M_TRIM_THRESHOLD, 2**30)


def give_back_memory() -> None:
    """Free what can be freed, at a time when nothing waits for it: it takes up to a tenth of a second."""
    # CPython remembers where a method is by the address of its name, and keeps the name. C code often makes the name
    # anew for each call (numpy's `cumsum`, torch's look at an array), so up to 4096 strings are left of a burst.
    sys._clear_type_cache()
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)
