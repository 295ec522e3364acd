"""The process shell of an engine handles messages, health, memory, profiler and the end of the process.

The shell knows only the ids of requests, and does not depend on what the engine computes.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meltcore.common.errors import MeltcoreError, RankError, RequestError
from meltcore.common.host_memory import keep_freed_memory, trim_memory
from meltcore.engine.host.client_sockets import open_sockets
from meltcore.engine.host.cpu_threads import CpuThreads, core_limit
from meltcore.engine.host.sleep import SleepMessage, SleepState
from meltcore.engine.host.step_pacing import StepPacing, StepTurn
from meltcore.protocol.shell import (
    AbortRequests,
    EngineFailed,
    EngineReady,
    ForgetClient,
    Loading,
    Profile,
    ProfileDone,
    Shutdown,
    Sleep,
    Wake,
)
from meltcore.settings.config import EngineSharing

# How often an idle process checks its engine. The thread on stdin notices the end of the server, not this.
_IDLE_POLL_MS = 1000
# Requests. The garbage of fewer is not worth a full collection.
_TRIM_AFTER_FINISHED = 256

STEP = "step"  # the name of a step's range in a trace, by which `meltcore profile` counts steps


class RequestOutput(Protocol):
    """Defines an output of one request. The last output has a `finish_reason`."""

    @property
    def request_id(self) -> str:
        """The id of the request."""

    @property
    def finish_reason(self) -> str | None:
        """The reason why the request has ended, or None if more outputs follow."""


class Outputs(Protocol):
    """Defines a message with the outputs of one step."""

    @property
    def outputs(self) -> Sequence[RequestOutput]:
        """The new outputs of the step, in any order."""

    def with_outputs(self, outputs: Any) -> Self:
        """Return the same message with only these outputs."""


class Engine(Protocol):
    """Defines the interface of an engine for the process shell. Requests are added and aborted between steps."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""

    @property
    def outside_bytes(self) -> int:
        """The bytes of the engine's budget that torch does not allocate."""

    def ready(self) -> EngineReady:
        """Return the message that reports that the engine can serve."""

    def add(self, message: Any, /) -> None:
        """Queue a request. Raises RequestError if the request cannot be served."""

    def refuse(self, request_id: str, error: str) -> Outputs:
        """Return the outputs that end a request which `add` has refused."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; the next `step` reports their ends. Unknown ids are ignored."""

    def take_turn(self, turn: StepTurn) -> None:
        """Receive the wait before the next step and the time limit of the step.

        The shell calls this only if engines of other priority classes share the GPUs.
        """

    def step(self) -> Outputs:
        """Compute a step. Return the new outputs of all requests."""

    def check(self) -> None:
        """Raise RankError if the engine has failed. The shell calls this while the engine has no work."""

    def close(self) -> None:
        """Release devices and other processes. No step may follow."""


# Loads an engine, which reports its progress (stage, fraction) to the given function.
BuildEngine = Callable[[Callable[[str, float], None]], Engine]


class EngineShell:
    """Passes messages between an engine and its clients: the supervisor, which has index 0, and the API servers."""

    def __init__(
        self, socket_dir: Path, to_engine: Any, client_count: int = 1, sharing: EngineSharing | None = None
    ) -> None:
        """Connect to the sockets.

        Args:
            socket_dir: the folder of the sockets.
            to_engine: the union of the types of messages that the engine and the shell receive.
            client_count: the number of clients.
            sharing: how the engine waits for engines of higher classes. None means that it does not wait.
        """
        self._sockets = open_sockets(socket_dir, client_count, to_engine)
        self._client_by_request: dict[str, int] = {}  # by request id, until its last output
        self._profiler: _Profiler | _CudaProfiler | None = None
        self._sleep_state = SleepState()
        self._finished = 0  # requests, since memory was given back
        self._sharing = sharing
        self._pacing: StepPacing | None = None
        self._threads: CpuThreads | None = None

    def close(self) -> None:
        """Send the last messages, and close the sockets."""
        self._sockets.close()

    def serve(self, build: BuildEngine) -> int:
        """Load an engine, then run its steps until a Shutdown message. Return the exit status."""
        try:
            return self._serve(build)
        except RankError as error:
            self._report_failure(str(error))
            self.close()
            # Without teardown: a collective that a rank never joined may hold the device for ever.
            os._exit(1)

    def _serve(self, build: BuildEngine) -> int:
        try:
            engine = build(lambda stage, fraction: self.send(Loading(stage, fraction)))
            self._pacing = None if self._sharing is None else StepPacing(self._sharing)
        except RankError:
            raise
        except MeltcoreError as error:
            return self._report_failure(str(error))
        except Exception as error:
            traceback.print_exc()  # to the model's log, for the one who looks for the fault
            return self._report_failure(f"the engine could not start: {type(error).__name__}: {error}")
        # The objects of the loaded engine live as long as the process: the collector need not traverse them again.
        gc.collect()
        gc.freeze()
        ready = engine.ready()
        if ready.device == "CPU":  # as `describe_device` names it
            self._threads = CpuThreads(core_limit())
        self.send(ready)
        try:
            while self._receive(engine):
                if engine.has_work:
                    self._step(engine)
        except RankError:
            engine.close()
            raise
        except Exception as error:
            self._report_failure(f"a step failed: {type(error).__name__}: {error}")
            raise
        engine.close()
        return 0

    def _step(self, engine: Engine) -> None:
        """Run a step and send its outputs, and keep no reference to the outputs.

        With a reference, an idle engine would keep the outputs alive, and so each memory arena of Python that contains
        one of them.
        """
        pacing = self._pacing
        if pacing is not None:
            engine.take_turn(pacing.begin_step())
        with self._profiler.step() if self._profiler is not None else nullcontext():
            outputs = engine.step()
        if pacing is not None:
            pacing.end_step(has_work=engine.has_work)
        if self._threads is not None:
            self._threads.end_step()
        self.send_outputs(outputs)

    def send(self, message: msgspec.Struct, client_index: int = 0) -> None:
        """Send a message to one API server."""
        self._sockets.send(client_index, message)

    def send_outputs(self, step: Outputs) -> None:
        """Send each client the outputs of its own requests in one message.

        A client without outputs receives no message. A step without any outputs is sent to client 0, as a sign of
        progress.
        """
        client_of = self._client_by_request
        outputs_by_client: list[list[RequestOutput]] = [[] for _ in range(self._sockets.client_count)]
        for output in step.outputs:
            request_id = output.request_id
            outputs_by_client[client_of[request_id]].append(output)
            if output.finish_reason is not None:
                del client_of[request_id]
                self._finished += 1
        for client_index, outputs in enumerate(outputs_by_client):
            if outputs or (client_index == 0 and not step.outputs):
                self._sockets.send(client_index, step.with_outputs(outputs))

    def _receive(self, engine: Engine) -> bool:
        """Handle all messages received so far. Return False if the process should end.

        If the engine has no work, wait for a message.
        """
        if not engine.has_work and not self._sockets.poll(_IDLE_POLL_MS):
            engine.check()
            if self._finished >= _TRIM_AFTER_FINISHED:
                self._finished = 0
                if not self._client_by_request:
                    self._client_by_request.clear()  # an emptied dict keeps the memory of all its entries
                trim_memory()
        return all(self._receive_from(client_index, engine) for client_index in range(self._sockets.client_count))

    def _receive_from(self, client_index: int, engine: Engine) -> bool:
        while (messages := self._sockets.receive(client_index)) is not None:
            for message in messages:
                if isinstance(message, Shutdown):
                    return False
                self._handle_message(engine, message, client_index)
        return True

    def _handle_message(self, engine: Engine, message: Any, client_index: int) -> None:
        if isinstance(message, AbortRequests):
            engine.abort(message.request_ids)
        elif isinstance(message, ForgetClient):
            self._receive_from(message.client_index, engine)  # its last messages: their requests would never be aborted
            orphans = [
                request_id for request_id, owner in self._client_by_request.items() if owner == message.client_index
            ]
            self._client_by_request.update(dict.fromkeys(orphans, client_index))
            engine.abort(orphans)
        elif isinstance(message, Profile):
            self.send(self._profile(message), client_index)
        elif isinstance(message, Sleep | Wake):
            self._sleep_or_wake(engine, message, client_index)
        else:
            self._add(engine, message, client_index)

    def _add(self, engine: Engine, request: Any, client_index: int) -> None:
        try:
            self._sleep_state.check_awake()
            engine.add(request)
        except RequestError as error:
            self._sockets.send(client_index, engine.refuse(request.request_id, error.message))
        else:
            self._client_by_request[request.request_id] = client_index

    def _sleep_or_wake(self, engine: Engine, message: SleepMessage, client_index: int) -> None:
        """Handle a sleep or wake message when the device is idle, and answer the client.

        With async scheduling one more step follows the last output of all requests.
        """
        while not self._client_by_request and engine.has_work:
            self._step(engine)
        self.send(self._sleep_state.handle(engine, message, len(self._client_by_request)), client_index)
        if isinstance(message, Sleep):
            trim_memory()

    def _profile(self, message: Profile) -> ProfileDone:
        try:
            if message.action == "start":
                if self._profiler is not None:
                    return ProfileDone("", "a profile is being taken already")
                uses_cuda_profiler = message.profiler == "cuda"
                self._profiler = _CudaProfiler() if uses_cuda_profiler else _Profiler(Path(message.directory))
                return ProfileDone(message.directory)
            if self._profiler is None:
                return ProfileDone("", "no profile is being taken")
            profiler, self._profiler = self._profiler, None
            return ProfileDone(profiler.stop())
        except (OSError, RuntimeError) as error:
            self._profiler = None
            return ProfileDone("", f"{type(error).__name__}: {error}")

    def _report_failure(self, message: str) -> int:
        self.send(EngineFailed(" ".join(message.split())))
        return 1


class _Profiler:
    """Records a torch trace from construction until `stop`, which writes it into `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path = directory / f"trace-{time.strftime('%Y%m%dT%H%M%S')}.json.gz"
        self._profile = profile(activities=activities)
        self._profile.start()

    def step(self) -> AbstractContextManager[object]:
        return record_function(STEP)

    def stop(self) -> str:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return str(self._path)


class _CudaProfiler:
    """Marks the capture range of an external profiler such as Nsight Systems, from construction until `stop`."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("the cuda profiler needs an NVIDIA GPU")
        torch.cuda.synchronize()  # or kernels of steps before the range would be captured without their launches
        torch.cuda.profiler.start()

    def step(self) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(STEP)

    def stop(self) -> str:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return ""


def serve(
    build: BuildEngine, to_engine: Any, socket_dir: Path, client_count: int = 1, sharing: EngineSharing | None = None
) -> int:
    """Serve clients until one of them sends Shutdown. Return the exit status."""
    keep_freed_memory()
    shell = EngineShell(socket_dir, to_engine, client_count, sharing)
    try:
        return shell.serve(build)
    finally:
        shell.close()
