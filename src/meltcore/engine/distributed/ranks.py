"""Lets rank 0 send each step to the other ranks, and detect a rank that has ended or hangs.

Every wait here and in a step has a limit. Each rank writes the number of the step that it has begun to shared memory,
so that no rank needs to answer a step.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from subprocess import Popen

import numpy as np
import torch
import zmq

from meltcore.common.errors import RankError
from meltcore.common.process import describe_exit, is_stopped
from meltcore.engine.core.batch import Step
from meltcore.engine.distributed.rank_messages import (
    Allocate,
    CaptureGraphs,
    CompileKernels,
    FromRank,
    LeaveGroup,
    RankFailed,
    RankLoaded,
    RankStage,
    RunStep,
    SamplingStep,
    ToRank,
    decoder_on_driver,
    encoder,
    rank_address,
)
from meltcore.engine.distributed.rank_start import StartedRanks, steps_file
from meltcore.engine.memory.memory_plan import MemoryPlan
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.transfer import cuda_event
from meltcore.engine.worker.warm_up import StepLimits
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import Progress
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.config import EngineConfig

START_LIMIT_S = 120.0  # for a process to start; importing torch from a slow disk takes its time
NO_PROGRESS_LIMIT_S = 300.0  # while loading, without progress, which each file of weights counts as
STOPPED_LIMIT_S = 5.0  # while loading, for a process that a signal has stopped
SEND_LIMIT_MS = 5000  # for a message to a rank that is not connected
WARM_UP_LIMIT_S = 600.0  # for a step that compiles kernels
_LEAVE_LIMIT_S = 5.0
_POLL_S = 0.05  # between two checks for failures, while a step is awaited
_LINGER_MS = 200  # for the last message of a rank that has ended
_ALL_RANKS_BEGAN = "all ranks have begun it"
_CAUSE_DELAY_S = 1.0  # from the failure of a collective until its cause is visible


class Ranks:
    """Controls the processes of ranks 1 and up.

    Methods raise RankError if a rank has failed, because the engine cannot continue.
    """

    def __init__(self, config: EngineConfig, started: StartedRanks | None = None) -> None:
        """Send the rank processes their settings, and wait until all of them run.

        If `started` is None, the processes are started by this call.
        """
        started = started or StartedRanks(config.tensor_parallel_size)
        self._config, self._size = config, config.tensor_parallel_size
        self._group: TensorParallelGroup | None = None
        self._watch: LaunchWatch | None = None
        self._allocated = self._failed = False
        self.limit_s = WARM_UP_LIMIT_S
        self._folder, self._processes = started.folder, started.processes
        self._context = zmq.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.bind(rank_address(self._folder, 0))
        self._pending: deque[FromRank] = deque()  # messages received by a check, not asked for yet
        self._senders: list[zmq.Socket[bytes]] = []
        self._begun_steps, self._progress = step_counters(self._folder, self._size)
        self._stopped: dict[int, float] = {}  # since when, of ranks seen stopped
        self._step = 0
        # Runs when this object is collected or the interpreter ends, whichever is first.
        self._end = weakref.finalize(self, _end_processes, started, self._context)
        for rank in self._processes:
            sender = self._context.socket(zmq.PUSH)
            sender.set_hwm(0)
            sender.setsockopt(zmq.SNDTIMEO, SEND_LIMIT_MS)
            sender.bind(rank_address(self._folder, rank))
            self._senders.append(sender)
        started.configure(config)
        self._wait_for_all("started", START_LIMIT_S)

    def watched_progress(self, progress: Progress) -> Progress:
        """Return a function that reports the loading of rank 0 to `progress`.

        The function raises RankError if another rank has failed.
        """

        def checked_progress(stage: str, fraction: float) -> None:
            self._check_loading()
            progress(stage, fraction)

        return checked_progress

    def join(self, device: torch.device) -> TensorParallelGroup:
        """Join the process group as rank 0.

        A thread joins the group. If a rank has ended, the thread is abandoned, because the libraries would wait for
        that rank up to their own time limit.
        """
        self._group = group = TensorParallelGroup(0, self._size)
        join_errors: list[Exception] = []

        def join() -> None:
            try:
                join_group(group, self._folder, device, self._config)
            except Exception as error:
                join_errors.append(error)

        join_thread = threading.Thread(target=join, daemon=True)
        join_thread.start()
        while join_thread.is_alive():
            self.check()
            join_thread.join(_POLL_S)
        for error in join_errors:
            if isinstance(error, RuntimeError):
                raise self.explain_failure(error) from error
            raise error
        if group.on_gpus:
            self._watch = LaunchWatch(self._processes, group.abort)
            weakref.finalize(self, self._watch.close)
        return group

    def common_plan(self, local_plan: MemoryPlan) -> MemoryPlan:
        """Wait until all ranks have loaded their shards. Return the minimum of all ranks' memory plans.

        Its rows say that each rank has this memory.
        """
        plans = [local_plan]
        for message in self._collect(NO_PROGRESS_LIMIT_S, "loaded their weights"):
            assert isinstance(message, RankLoaded)
            plans.append(message.plan)
        smallest_plan = min(plans, key=lambda plan: plan.pages)
        rows = [
            MemoryRow(row.name, row.size_bytes, ", ".join(filter(None, [row.note, "on each rank"])))
            for row in smallest_plan.rows
        ]
        return smallest_plan._replace(
            rows=rows,
            recurrent_slots=min(plan.recurrent_slots for plan in plans),
            penalty_slots=min(plan.penalty_slots for plan in plans),
            max_num_seqs=min(plan.max_num_seqs for plan in plans),
        )

    def allocate(self, config: ModelRunnerConfig) -> None:
        """Make all other ranks allocate caches and tables; `wait_allocated` waits for them."""
        self._send(Allocate(config))

    def wait_allocated(self) -> None:
        """Wait until all other ranks have allocated their caches and tables."""
        self._wait_for_all("allocated", NO_PROGRESS_LIMIT_S)
        self._allocated = True

    def compile_kernels(self, limits: StepLimits) -> None:
        """Make all other ranks compile their kernels. Compilation continues after this call returns."""
        self._send(CompileKernels(limits))

    def capture_graphs(self) -> None:
        """Make all other ranks capture graphs together with rank 0."""
        self._send(CaptureGraphs())

    def serve(self) -> None:
        """Limit steps to `rank_timeout_s` from now on, since all kernels are compiled."""
        self.limit_s = self._config.rank_timeout_s
        assert self._group is not None
        set_collective_timeout(self._group, self._config)

    def run(self, step: Step, sampling: SamplingStep) -> None:
        """Make all other ranks compute a step."""
        self._step += 1
        self._send(RunStep(self._step, step, sampling))

    @contextmanager
    def attribute_failures(self) -> Iterator[None]:
        """Return a context for launches on all ranks, which attributes a failure to the rank that caused it."""
        try:
            with self._watch.watch_launch(self.limit_s) if self._watch else nullcontext():
                yield
        except RuntimeError as error:
            raise self.explain_failure(error) from error
        if self._watch and self._watch.aborted:
            self.check()
            raise self._rank_error(
                self._blocking_ranks() or _ALL_RANKS_BEGAN, f"step {self._step} is not launched within its limit"
            )

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device has passed `event`. Raises RankError when a rank has ended or hangs."""
        started = checked = time.monotonic()
        while not self._event_passed(event):
            now = time.monotonic()
            if now - checked > _POLL_S:
                checked = now
                self.check()
                if now - started > self.limit_s:
                    detail = f"step {self._step} is not done after {now - started:.1f} s"
                    raise self._rank_error(self._blocking_ranks() or _ALL_RANKS_BEGAN, detail)

    def _event_passed(self, event: torch.cuda.Event) -> bool:
        try:
            is_done: Callable[[], bool] = event.query
            return is_done()
        except RuntimeError as error:  # the device's own failure, or an aborted collective
            raise self.explain_failure(error) from error

    def check(self) -> None:
        """Raise RankError when a rank has failed or its process has ended."""
        ended_ranks = [rank for rank, process in self._processes.items() if process.poll() is not None]
        while self._receiver.poll(0 if not ended_ranks else _LINGER_MS):  # its own reason, if it gave one
            self._pending.append(self._decode(self._receiver.recv()))
        for rank in ended_ranks:
            raise self._rank_error(
                self._describe_rank(rank), f"has ended: {describe_exit(self._processes[rank].returncode)}"
            )

    def explain_failure(self, error: RuntimeError) -> RankError:
        """Return the error that explains the failure of a collective.

        The call waits a second, because the end of a process may become visible later than the failure.
        """
        deadline_s = time.monotonic() + _CAUSE_DELAY_S
        while time.monotonic() < deadline_s:
            try:
                self.check()
            except RankError as cause:
                return cause
            time.sleep(_POLL_S)
        return self._rank_error(self._blocking_ranks() or "rank 0", " ".join(str(error).split())[:300])

    def close(self, on_idle: Callable[[], None]) -> None:
        """Destroy the group together with the other ranks, or kill their processes if that fails.

        `on_idle` is called before the group is destroyed, when no step is in flight. A second call of this method does
        nothing.
        """
        if not self._end.alive:
            return
        if self._watch:
            self._watch.close()
        can_leave_together = self._allocated and not self._failed and self._is_idle()
        if can_leave_together:
            on_idle()
            with suppress(RankError):
                self._send(LeaveGroup())
            can_leave_together = not self._failed
        if self._group is not None:
            if can_leave_together or not self._group.on_gpus:
                self._group.destroy()
            else:
                self._group.abort()  # NCCL would wait for ranks that are gone
        deadline_s = time.monotonic() + (_LEAVE_LIMIT_S if can_leave_together else 0.0)
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._end()

    def _is_idle(self) -> bool:
        """Wait for a step in flight. Return False if the step does not end; the group has then failed."""
        if self._group is not None and self._group.on_gpus:
            in_flight = cuda_event()
            in_flight.record()
            with suppress(RankError):
                self.wait(in_flight)
        return not self._failed

    def _send(self, message: ToRank) -> None:
        encoded = encoder.encode(message)
        for rank, sender in zip(self._processes, self._senders, strict=True):
            try:
                sender.send(encoded)
            except zmq.Again as error:  # it is not connected, so there is no queue to put the message into
                self.check()
                raise self._rank_error(
                    self._describe_rank(rank), f"is not connected, for {SEND_LIMIT_MS} ms"
                ) from error

    def _decode(self, encoded: bytes) -> FromRank:
        message: FromRank = decoder_on_driver.decode(encoded)
        if isinstance(message, RankFailed):
            raise self._rank_error(self._describe_rank(message.rank), message.message)
        return message

    def _collect(self, limit_s: float, expected: str) -> Iterable[FromRank]:
        """Yield one message from each other rank.

        Raises RankError after `limit_s` seconds without a message or progress. `expected` names the message in the
        error.
        """
        last_progress_s, progress = time.monotonic(), self._progress.copy()
        for num_received in range(len(self._processes)):
            while not self._pending:
                self._receiver.poll(int(1000 * _POLL_S))
                self._check_loading()
                if self._pending or (self._progress != progress).any():
                    last_progress_s, progress = time.monotonic(), self._progress.copy()
                elif time.monotonic() - last_progress_s > limit_s:
                    progress_text = f"{num_received} of {len(self._processes)} other ranks have {expected}"
                    raise self._rank_error("ranks", f"{progress_text}; no progress for {limit_s:g} s")
            yield self._pending.popleft()

    def _check_loading(self) -> None:
        """Raise RankError when a rank has failed, has ended, or has been stopped by a signal for too long."""
        self.check()
        now = time.monotonic()
        for rank, process in self._processes.items():
            if not is_stopped(process.pid):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > STOPPED_LIMIT_S:
                raise self._rank_error(
                    self._describe_rank(rank), f"has been stopped by a signal for {STOPPED_LIMIT_S:g} s"
                )

    def _wait_for_all(self, stage: str, limit_s: float) -> None:
        for message in self._collect(limit_s, stage):
            assert isinstance(message, RankStage)
            assert message.stage == stage, f"rank {message.rank} reports {message.stage}"

    def _rank_error(self, subject: str, detail: str) -> RankError:
        """Abort the group and return the error to raise. The group can no longer be destroyed together."""
        if self._group is not None:
            self._group.abort()
        self._failed = True
        return RankError(f"{subject}: {detail}")

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank].pid})"

    def _blocking_ranks(self) -> str:
        """Return a text that names the ranks that block a step, or "" if rank 0 finds none."""
        stopped_ranks = [rank for rank, process in self._processes.items() if is_stopped(process.pid)]
        late_ranks = [rank for rank in self._processes if self._begun_steps[rank] < self._step]
        detail = "stopped by a signal" if stopped_ranks else f"has not begun step {self._step}"
        return ", ".join(f"{self._describe_rank(rank)}, {detail}" for rank in stopped_ranks or late_ranks)


class LaunchWatch:
    """Aborts a launch that blocks because the device waits for a rank that has ended or hangs.

    A device queues about a thousand launches, and the next launch blocks in the driver. The launching thread cannot
    check the other ranks then, so a thread of this class checks them. If a process has ended or a limit has passed
    during a launch, the thread calls `abort` once and sets `aborted`.
    """

    def __init__(self, processes: Mapping[int, Popen[bytes]], abort: Callable[[], None]) -> None:
        self.aborted = False
        self._processes = list(processes.values())
        self._abort = abort
        self._deadline_s: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch_launches, daemon=True).start()

    @contextmanager
    def watch_launch(self, limit_s: float) -> Iterator[None]:
        """Return a context whose launches are watched. They are aborted after `limit_s`."""
        self._deadline_s = time.monotonic() + limit_s
        try:
            yield
        finally:
            self._deadline_s = None

    def close(self) -> None:
        """End the thread that watches launches."""
        self._closed.set()

    def _watch_launches(self) -> None:
        while not self._closed.wait(_POLL_S):
            deadline_s = self._deadline_s
            if deadline_s is None:
                continue
            if time.monotonic() > deadline_s or any(process.poll() is not None for process in self._processes):
                self.aborted = True
                self._abort()
                return


def step_counters(folder: Path, size: int) -> np.memmap:
    """Return the counters of all ranks, [2, size] int64, in memory that the processes of `folder` share.

    Row 0 has the number of the latest step that each rank has begun. Each rank increments its entry of row 1 while it
    loads.
    """
    return np.memmap(steps_file(folder), dtype=np.int64, mode="r+", shape=(2, size))


def join_group(group: TensorParallelGroup, folder: Path, device: torch.device, config: EngineConfig) -> None:
    """Join the process group as the rank of `group`. Raises RuntimeError if another rank does not join."""
    peer_memory = not {"no-peer-memory", "reference-kernels"} & set(config.debug)
    group.join(folder / "group", device, WARM_UP_LIMIT_S, peer_memory=peer_memory)


def set_collective_timeout(group: TensorParallelGroup, config: EngineConfig) -> None:
    """Set the time limit of collectives on a CPU, which detects a rank that hangs.

    On GPUs rank 0 detects such a rank in `Ranks.wait`, and the error names the rank.
    """
    if group.on_gpus:
        return
    group.set_timeout(config.rank_timeout_s)


def _end_processes(started: StartedRanks, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    started.end()
    context.destroy(linger=0)
