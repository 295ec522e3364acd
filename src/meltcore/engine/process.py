"""The engine as a process of its own: `python -m meltcore.engine.process SOCKET_DIR`.

The front binds `to-engine.sock` and `from-engine.sock` in that folder, writes the EngineConfig as one JSON line to our
standard input and keeps it open. Its end means the front is gone, however it went, and so do we go.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
import zmq

from meltcore.config import EngineConfig
from meltcore.engine.engine import Engine
from meltcore.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FromEngine,
    Loading,
    Profile,
    ProfileDone,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from meltcore.engine.profiler import Profiler
from meltcore.errors import MeltcoreError, RequestError

# Between two looks at an idle inbox. The front's death is noticed by the thread on stdin, not by this.
_IDLE_POLL_MS = 1000
# A message that cannot be delivered for this long means that nobody reads: the front hangs.
_SEND_TIMEOUT_MS = 30_000
# Parameter numbers of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class EngineProcess:
    """Moves messages between the sockets and an engine."""

    def __init__(self, socket_dir: Path) -> None:
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 1000)
        self._outbox.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        self._inbox.connect(f"ipc://{socket_dir}/to-engine.sock")
        self._outbox.connect(f"ipc://{socket_dir}/from-engine.sock")
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()
        self._profiler: Profiler | None = None

    def serve(self, config: EngineConfig) -> int:
        """Load, then step until told to leave. Returns the exit status."""
        try:
            engine = Engine(config, progress=lambda stage, fraction: self.send(Loading(stage, fraction)))
        except MeltcoreError as error:
            return self._fail(str(error))
        except Exception as error:
            return self._fail(f"the engine could not start: {type(error).__name__}: {error}")
        # What loading left behind lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self.send(engine.ready())
        try:
            while self._receive(engine):
                if engine.has_work:
                    self.send(engine.step())
        except Exception as error:
            self._fail(f"a step failed: {type(error).__name__}: {error}")
            raise
        return 0

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def _receive(self, engine: Engine) -> bool:
        """Take in every message that has come; wait for one where there is nothing else to do. False: leave."""
        if not engine.has_work:
            self._inbox.poll(_IDLE_POLL_MS)
        while self._inbox.poll(0):
            for message in self._decoder.decode(self._inbox.recv()):
                if isinstance(message, Shutdown):
                    return False
                self._handle(engine, message)
        return True

    def _handle(self, engine: Engine, message: AddRequest | AbortRequests | Profile) -> None:
        if isinstance(message, AddRequest):
            try:
                engine.add(message)
            except RequestError as error:
                refused = SequenceOutput(message.request_id, [], finish_reason="error", error=error.message)
                self.send(StepOutputs([refused], engine.stats(), time.monotonic()))
        elif isinstance(message, AbortRequests):
            engine.abort(message.request_ids)
        else:
            self.send(self._profile(message))

    def _profile(self, message: Profile) -> ProfileDone:
        try:
            if message.action == "start":
                if self._profiler is not None:
                    return ProfileDone("", "a profile is being taken already")
                self._profiler = Profiler(Path(message.directory))
                return ProfileDone(message.directory)
            if self._profiler is None:
                return ProfileDone("", "no profile is being taken")
            profiler, self._profiler = self._profiler, None
            return ProfileDone(str(profiler.stop()))
        except (OSError, RuntimeError) as error:
            self._profiler = None
            return ProfileDone("", f"{type(error).__name__}: {error}")

    def _fail(self, message: str) -> int:
        self.send(EngineFailed(" ".join(message.split())))
        return 1


def main() -> int:
    # On a CPU the fronts and clients need a core too: threads that wait for each other at every product are slowed by
    # the one that shares its core.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    keep_freed_memory()
    # The front decides when we leave; a Ctrl-C in its terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_leave_with_front, daemon=True).start()
    return EngineProcess(Path(sys.argv[1])).serve(config)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, instead of giving megabytes back and faulting them in again.

    The bundled model on a CPU, 256 sequences a step, spent 4.7 s of CPU without and 3.2 s with it (2026-11-21).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's; another C library has other habits
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def _leave_with_front() -> None:
    """Wait for the end of standard input, then exit at once, whatever the main thread is doing."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
