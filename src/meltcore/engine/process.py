"""Between the sockets of the fronts and an engine, in the process of the engine (`python -m meltcore.engine`)."""

from __future__ import annotations

import gc
import os
import time
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch
import zmq

from meltcore.config import EngineConfig
from meltcore.engine.engine import Engine
from meltcore.engine.host_memory import give_back_memory, keep_freed_memory
from meltcore.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    ForgetFront,
    FromEngine,
    Loading,
    Profile,
    ProfileDone,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
    socket_address,
)
from meltcore.engine.profiler import Profiler
from meltcore.engine.rank_start import StartedRanks
from meltcore.errors import MeltcoreError, RankError, RequestError

# Between two looks at an idle inbox. The front's death is noticed by the thread on stdin, not by this.
_IDLE_POLL_MS = 1000
# A message that cannot be delivered for this long means that nobody reads: the front hangs.
_SEND_TIMEOUT_MS = 30_000
# For what was sent to go out at the end.
_LAST_WORDS_MS = 1000
# Requests; what fewer have left behind is not worth a look at the whole heap.
_ENOUGH_FINISHED = 256


class EngineProcess:
    """Moves messages between the fronts' sockets and an engine."""

    def __init__(self, socket_dir: Path, fronts: int = 1) -> None:
        self._context = context = zmq.Context()
        self._inboxes: list[zmq.Socket[bytes]] = []
        self._outboxes: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        for front in range(fronts):
            inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            for socket in (inbox, outbox):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
            outbox.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            inbox.connect(socket_address(socket_dir, "to-engine", front))
            outbox.connect(socket_address(socket_dir, "from-engine", front))
            self._inboxes.append(inbox)
            self._outboxes.append(outbox)
            self._poller.register(inbox, zmq.POLLIN)
        self._front_of: dict[str, int] = {}  # by request id; one ends with its last output
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()
        self._profiler: Profiler | None = None
        self._finished = 0  # requests, since memory was given back

    def serve(self, config: EngineConfig, ranks: StartedRanks | None = None) -> int:
        """Load, then step until told to leave. Returns the exit status."""
        try:
            return self._serve(config, ranks)
        except RankError as error:
            self._fail(str(error))
            self._context.destroy(linger=_LAST_WORDS_MS)
            # At once: a collective that a rank never joined may hold the device, and whoever tidies up, for ever.
            os._exit(1)

    def _serve(self, config: EngineConfig, ranks: StartedRanks | None) -> int:
        try:
            engine = Engine(config, progress=lambda stage, fraction: self.send(Loading(stage, fraction)), ranks=ranks)
        except RankError:
            raise
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
                    self._step(engine)
        except RankError:
            engine.close()
            raise
        except Exception as error:
            self._fail(f"a step failed: {type(error).__name__}: {error}")
            raise
        engine.close()
        return 0

    def _step(self, engine: Engine) -> None:
        """Run a step and send what is new. Nothing of it is kept: an idle engine would hold the last one's outputs, and
        each megabyte of Python's allocator that one of their objects lies in."""
        with self._profiler.step() if self._profiler is not None else nullcontext():
            outputs = engine.step()
        self.send_outputs(outputs)

    def send(self, message: FromEngine, front: int = 0) -> None:
        self._outboxes[front].send(self._encoder.encode(message))

    def send_outputs(self, step: StepOutputs) -> None:
        """Give each front the outputs of its own requests, in one message; a front that has none is not woken.

        A step without any goes to the first front all the same: it is a sign of life.
        """
        front_of = self._front_of
        parts: list[list[SequenceOutput]] = [[] for _ in self._outboxes]
        for output in step.outputs:
            request_id = output.request_id
            parts[front_of[request_id]].append(output)
            if output.finish_reason is not None:
                del front_of[request_id]
                self._finished += 1
        for front, outputs in enumerate(parts):
            if outputs or (front == 0 and not step.outputs):
                self.send(StepOutputs(outputs, step.stats, step.step_ended_s), front)

    def _receive(self, engine: Engine) -> bool:
        """Take in every message that has come; wait for one where there is nothing else to do. False: leave."""
        if not engine.has_work and not self._poller.poll(_IDLE_POLL_MS):
            engine.check()
            if self._finished >= _ENOUGH_FINISHED:
                self._finished = 0
                if not self._front_of:
                    self._front_of.clear()  # an emptied dict keeps the room of all it has held
                give_back_memory()
        return all(self._receive_from(front, engine) for front in range(len(self._inboxes)))

    def _receive_from(self, front: int, engine: Engine) -> bool:
        inbox = self._inboxes[front]
        while inbox.poll(0):
            for message in self._decoder.decode(inbox.recv()):
                if isinstance(message, Shutdown):
                    return False
                self._handle(engine, message, front)
        return True

    def _handle(self, engine: Engine, message: AddRequest | AbortRequests | Profile | ForgetFront, front: int) -> None:
        if isinstance(message, AddRequest):
            self._add(engine, message, front)
        elif isinstance(message, AbortRequests):
            engine.abort(message.request_ids)
        elif isinstance(message, ForgetFront):
            self._receive_from(message.front, engine)  # what it still said; or that would come to life after this
            orphans = [request_id for request_id, owner in self._front_of.items() if owner == message.front]
            self._front_of.update(dict.fromkeys(orphans, front))
            engine.abort(orphans)
        else:
            self.send(self._profile(message), front)

    def _add(self, engine: Engine, request: AddRequest, front: int) -> None:
        try:
            engine.add(request)
        except RequestError as error:
            refused = SequenceOutput(request.request_id, [], finish_reason="error", error=error.message)
            self.send(StepOutputs([refused], engine.stats(), time.monotonic()), front)
        else:
            self._front_of[request.request_id] = front

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


def serve(config: EngineConfig, ranks: StartedRanks | None, socket_dir: Path, fronts: int = 1) -> int:
    """Until the front has us leave; returns the exit status."""
    # On a CPU the fronts and clients need a core too: threads that wait for each other at every product are slowed by
    # the one that shares its core.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    keep_freed_memory()
    return EngineProcess(socket_dir, fronts).serve(config, ranks)
