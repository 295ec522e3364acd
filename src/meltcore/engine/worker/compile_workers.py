"""Processes that compile kernels for an engine: Triton holds Python's lock for most of its work.

They are forked from the engine's process, which has imported everything, before it uses the GPU. Until a kernel is
missing there is one process, which waits. A worker leaves its kernels in Triton's cache folder, where the engine finds
them. What a worker cannot compile the engine compiles itself, with the error that belongs to it.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from meltcore.kernels.nvrtc import Binary

# A worker that takes longer for one kernel is given up. The slowest of Qwen3-0.6B takes 2 s of CPU time.
_LIMIT_S = 30.0
# With more, workers wait for the slowest kernel. With fewer than two, threads of the engine do as well.
_MAX_WORKERS, _MIN_WORKERS = 16, 2


class KernelSource(NamedTuple):
    """A Triton kernel of a module, with what it is specialized for, as Triton's hook before its compiler reports it."""

    module: str
    name: str
    specialization: str
    target: Any  # triton.backends.compiler.GPUTarget


def worker_count(num_processes: int) -> int:
    """Return the number of workers for each of `num_processes` engine processes that compile on this machine; or 0."""
    count = min(_MAX_WORKERS, (len(os.sched_getaffinity(0)) - 1) // num_processes)
    return count if count >= _MIN_WORKERS and sys.platform == "linux" else 0


class CompileWorkers:
    """The workers of an engine, or none. Threads may ask at the same time, each for one kernel."""

    def __init__(self, count: int) -> None:
        """Fork the process that forks `count` workers, once there is work for them. None where no process may start."""
        self.count = count
        self._pid = 0
        self._connections: list[Connection] = []
        self._starting = threading.Lock()
        self._is_started = False
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        if not count:
            return
        pipes = []
        try:
            pipes += [multiprocessing.Pipe() for _ in range(count + 1)]
            with warnings.catch_warnings():
                # Of threads: the child has none, and it uses neither the GPU nor the locks of torch.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError:  # no memory, or too many processes or open files
            self.count = 0
            return
        if pid == 0:
            try:
                _serve([theirs for _, theirs in pipes])
            finally:
                os._exit(0)
        self._pid = pid
        for _, theirs in pipes:
            theirs.close()
        self._connections = [ours for ours, _ in pipes]
        for ours in self._connections[1:]:
            self._idle.put(ours)

    def compile(self, job: KernelSource | Binary) -> bool:
        """Compile a kernel. Returns whether the cache folder has it now; a failed worker is not asked again."""
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            return False
        try:
            with self._starting:
                if not self._is_started:
                    self._is_started = True
                    self._connections[0].send(None)
            connection.send(job)
            if not connection.poll(_LIMIT_S):
                return False
            compiled: bool = connection.recv()
        except (OSError, EOFError):  # it has ended
            return False
        self._idle.put(connection)
        return compiled

    def close(self) -> None:
        """End the workers. Those that still compile end after it."""
        for connection in self._connections:
            connection.close()
        if self._pid:
            pid, self._pid = self._pid, 0
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


# --- in the children -----------------------------------------------------------------------------------------------


def _serve(connections: Sequence[Connection]) -> None:
    """Fork a worker per connection once the first connection says so. Returns when it is closed."""
    gc.disable()  # nothing of the engine is freed here: its tensors are the GPU's
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the engine ends this process
    _close_other_files({connection.fileno() for connection in connections})
    starter, *others = connections
    with suppress(Exception):
        triton_key()  # a hash of all of Triton, which every worker needs
    try:
        starter.recv()
    except (EOFError, OSError):
        return
    for connection in others:
        if os.fork() == 0:
            for other in connections:
                if other is not connection:
                    other.close()
            _work(connection)
            os._exit(0)
    for connection in others:
        connection.close()
    with suppress(EOFError, OSError):
        starter.recv()


def _close_other_files(kept: set[int]) -> None:
    """Close all files but `kept`: clients of the engine must see that it has ended while a worker still compiles."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (number := int(entry.name)) > 2 and number not in kept:
            with suppress(OSError):
                os.close(number)


def _work(connection: Connection) -> None:
    """Compile what the engine asks for until it closes the connection."""
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            _compile(job)
            connection.send(True)
        except Exception:
            with suppress(OSError):
                connection.send(False)


def _compile(job: KernelSource | Binary) -> None:
    if isinstance(job, Binary):
        job.compile()
        return
    knobs.runtime.jit_cache_hook = knobs.compilation.listener = None
    driver.set_active(_AbsentGPU(job.target))
    function: Any = importlib.import_module(job.module)
    for name in job.name.split("."):
        function = getattr(function, name)
    kernel = function.preload(job.specialization)
    with suppress(Exception):  # the engine makes it, too
        CudaLauncher(kernel.src, kernel.metadata)


class _AbsentGPU:
    """What Triton's compiler asks its driver for. A worker cannot ask the GPU."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return -1
