"""Processes that compile kernels for an engine.

Threads would not help, since Triton holds Python's lock for most of its work. Workers are forked from the engine's
process after it has imported everything and before it uses the GPU. As long as no kernel is missing, there is only one
process, which waits. A worker leaves its kernels in Triton's cache folder, where the engine finds them. The engine
itself compiles what a worker cannot compile, and raises the error. No wait for a worker is longer than `_LIMIT_S`.

Every engine on a GPU compiles kernels in workers. With one core there is one worker, for which the engine waits. If no
process can be forked, the threads that would ask the workers compile the kernels themselves.

The processes live only as long as the engine's end of a pipe: they end when the engine closes it or dies. The first
process stays in the engine's process group and ignores the signals that end the engine in order. A worker leads a
separate group, together with the compilers that it starts.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from meltcore.kernels.nvrtc import Binary

# A worker that takes longer for one kernel is given up. The slowest kernels take 2.5 s of CPU time, and more where
# other processes have the cores.
_LIMIT_S = 60.0
_END_LIMIT_S = 5.0  # for the processes to end, from closing their pipe to SIGKILL
# With more, workers wait for the slowest kernel. With fewer than four, an engine that starts alone while others serve
# would leave most cores idle.
_MIN_WORKERS, _MAX_WORKERS = 4, 16
_ENDING_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends


class KernelSource(NamedTuple):
    """A Triton kernel of a module with its specialization, as Triton's hook reports them before compilation."""

    module: str
    name: str
    specialization: str
    target: Any  # triton.backends.compiler.GPUTarget


def worker_count(num_processes: int) -> int:
    """Return the number of workers for each of `num_processes` engine processes that may compile at the same time.

    They share all cores except one. Each gets at least four workers if the machine has that many cores.
    """
    cores = max(1, len(os.sched_getaffinity(0)) - 1)
    return min(cores, _MAX_WORKERS, max(_MIN_WORKERS, cores // num_processes))


def _print_reason(reason: str) -> None:
    print(f"meltcore: {reason}; the engine compiles instead", file=sys.stderr, flush=True)


class CompileWorkers:
    """The workers of an engine. Threads may ask at the same time, each for one kernel.

    They end with `close`, when this object is collected, or with the engine's process, whichever is first.
    """

    def __init__(self, count: int, *, report: Callable[[str], None] = _print_reason) -> None:
        """Fork the process that forks `count` workers when they are first needed.

        With a count of 0 there are no workers. `report` receives the reason if the engine has to compile a worker's
        kernel.
        """
        self.count = count
        self._report = report
        self._reported: set[str] = set()
        self._starting = threading.Lock()
        self._is_started = False
        self._starter: Connection | None = None
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._end: Callable[[], object] = lambda: None
        self.is_closed = False
        if not count:
            return
        pipes: list[tuple[Connection, Connection]] = []
        try:
            pipes += [multiprocessing.Pipe() for _ in range(count + 1)]
            with warnings.catch_warnings():
                # Of threads: the child has none, and it uses neither the GPU nor the locks of torch.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:  # no memory, or too many processes or open files
            self._report_once(f"no process that compiles kernels can be started: {error.strerror}")
            return
        if pid == 0:
            try:
                _serve([theirs for _, theirs in pipes])
            finally:
                os._exit(0)
        for _, theirs in pipes:
            theirs.close()
        self._starter, *others = (ours for ours, _ in pipes)
        for ours in others:
            self._idle.put(ours)
        self._end = weakref.finalize(self, _end, os.getpid(), pid, self._starter, self._idle)

    def compile(self, job: KernelSource | Binary) -> bool:
        """Compile a kernel. Returns whether the cache folder has it now. A worker that failed is not used again."""
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:  # the others have failed, and have been reported
            return False
        try:
            with self._starting:
                if not self._is_started and self._starter is not None:
                    self._is_started = True
                    self._starter.send(None)
            connection.send(job)
            if not connection.poll(_LIMIT_S):
                failure = f"a process that compiles kernels has not answered within {_LIMIT_S:g} s"
                return self._note_failure(connection, failure)
            error: str | None = connection.recv()
        except (OSError, EOFError):
            return self._note_failure(connection, "a process that compiles kernels has ended")
        self._idle.put(connection)
        if error is not None:
            self._report_once(f"a process that compiles kernels has failed with {error}")
        return error is None

    def _note_failure(self, connection: Connection, failure: str) -> bool:
        connection.close()
        if not self.is_closed:
            self._report_once(failure)
        return False

    def _report_once(self, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            self._report(reason)

    def close(self) -> None:
        """End the workers, including those that are compiling. A second call does nothing."""
        self.is_closed = True
        self._end()


def _end(owner: int, pid: int, starter: Connection, idle: queue.SimpleQueue[Connection]) -> None:
    """End the process that has forked the workers, which ends the workers too.

    Its pipe is closed first. If the process does not end, it gets SIGKILL.
    """
    if os.getpid() != owner:  # forked from the engine by something else
        return
    starter.close()
    with suppress(queue.Empty):
        while True:
            idle.get_nowait().close()
    deadline_s = time.monotonic() + _END_LIMIT_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.005)


# --- in the children -----------------------------------------------------------------------------------------------


def _serve(connections: Sequence[Connection]) -> None:
    """Fork a worker per connection when the first connection requests it.

    Returns after the first connection was closed and the workers were killed.
    """
    gc.disable()  # nothing of the engine is freed here: its tensors are the GPU's
    gc.freeze()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what a user of the engine has set would not keep ids of workers
    for signum in _ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # the end of the engine ends this process
    _close_other_files({connection.fileno() for connection in connections})
    starter, *others = connections
    with suppress(Exception):
        triton_key()  # a hash of all of Triton, which every worker needs
    try:
        starter.recv()
    except (EOFError, OSError):
        return
    server, workers = os.getpid(), []
    for connection in others:
        with suppress(OSError):  # too many processes: the engine sees that its connection is closed
            pid = os.fork()
            if pid == 0:
                try:
                    for signum in _ENDING_SIGNALS:
                        signal.signal(signum, signal.SIG_DFL)  # ptxas and the C compiler inherit it
                    os.setpgid(0, 0)
                    _die_with_parent(server)
                    for other in connections:
                        if other is not connection:
                            other.close()
                    _work(connection)
                finally:
                    os._exit(0)
            with suppress(OSError):  # the worker has done so, or has ended
                os.setpgid(pid, pid)
            workers.append(pid)
        connection.close()
    with suppress(EOFError, OSError):
        starter.recv()
    for pid in workers:  # not waited for before: no other process can have their ids
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # and the compilers that it has started
    for pid in workers:
        os.waitpid(pid, 0)


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent has ended for any reason, including SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _close_other_files(kept_fds: set[int]) -> None:
    """Close all files except `kept_fds`, so that clients notice the end of the engine while a worker still compiles."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (number := int(entry.name)) > 2 and number not in kept_fds:
            with suppress(OSError):
                os.close(number)


def _work(connection: Connection) -> None:
    """Compile the kernels that the engine requests, until the engine closes the connection."""
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            _compile(job)
            error = None
        except Exception as raised:
            first_line = str(raised).strip().partition("\n")[0]
            error = f"{type(raised).__name__}: {first_line}"
        try:
            connection.send(error)
        except OSError:  # the engine has ended
            return


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
    """Replaces the driver that Triton's compiler queries. A worker must not use the GPU."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return -1
