"""Rank 0's hold on the other ranks: it tells them each step, and sees when one is gone or stuck.

No wait here or in a step is without a limit. Which step each rank has begun stands in a small array of shared memory,
so that a step costs rank 0 no message back.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
import zmq

from meltcore.config import EngineConfig
from meltcore.engine.batch import Step
from meltcore.engine.launch_watch import LaunchWatch
from meltcore.engine.memory import MemoryPlan
from meltcore.engine.rank_messages import (
    CaptureGraphs,
    Choices,
    CompileKernels,
    FromRank,
    Leave,
    RankFailed,
    RankLoaded,
    RankStage,
    RunStep,
    Settle,
    ToRank,
    encoder,
    from_rank_decoder,
    rank_address,
)
from meltcore.engine.rank_start import StartedRanks, steps_file
from meltcore.engine.runner import Layout
from meltcore.engine.warm_up import Limits
from meltcore.errors import RankError
from meltcore.layers.group import Group
from meltcore.models.loader import Progress

START_LIMIT_S = 120.0  # for a process to start; importing torch from a slow disk takes its time
QUIET_LIMIT_S = 300.0  # while loading, without a sign of life, which comes with each file of weights
STOPPED_LIMIT_S = 5.0  # while loading, for a process held by SIGSTOP or a debugger
SEND_LIMIT_MS = 5000  # for a word to a rank that is not there
WARM_UP_LIMIT_S = 600.0  # for a step that compiles kernels
_LEAVE_LIMIT_S = 5.0
_LOOK_EVERY_S = 0.05  # for failures, while a step is awaited
_LAST_WORDS_MS = 200  # for what a rank said before its end
_ALL_BEGUN = "all ranks have begun it"
_BLAME_S = 1.0  # after a collective has failed: how long until its cause is seen


class Ranks:
    """The processes of ranks 1 and up. Their end is our end: every method raises RankError where one has failed."""

    def __init__(self, config: EngineConfig, started: StartedRanks | None = None) -> None:
        """Have them load, started before or now, and wait until all run."""
        started = started or StartedRanks(config.tp)
        self._config, self._size = config, config.tp
        self._group: Group | None = None
        self._watch: LaunchWatch | None = None
        self._settled = self._failed = False
        self.limit_s = WARM_UP_LIMIT_S
        self._folder, self._processes = started.folder, started.processes
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(rank_address(self._folder, 0))
        self._come: deque[FromRank] = deque()  # what others have said and nobody has asked for yet
        self._outboxes: list[zmq.Socket[bytes]] = []
        self._begun, self._signs = step_board(self._folder, self._size)
        self._stopped: dict[int, float] = {}  # since when, of ranks that were seen so
        self._step = 0
        # Runs when we are collected or the interpreter ends, whichever is first.
        self._end = weakref.finalize(self, _end, started, self._context)
        for rank in self._processes:
            outbox = self._context.socket(zmq.PUSH)
            outbox.set_hwm(0)
            outbox.setsockopt(zmq.SNDTIMEO, SEND_LIMIT_MS)
            outbox.bind(rank_address(self._folder, rank))
            self._outboxes.append(outbox)
        started.configure(config)
        self._wait_for_all("started", START_LIMIT_S)

    def watched(self, progress: Progress) -> Progress:
        """`progress` of our own loading, which ends where a rank has failed meanwhile."""

        def watching(stage: str, fraction: float) -> None:
            self._check_loading()
            progress(stage, fraction)

        return watching

    def meet(self, device: torch.device) -> Group:
        """Join the group as rank 0.

        In a thread, which nobody waits for where a rank is gone: the libraries would wait for that one to the limit.
        """
        self._group = group = Group(0, self._size)
        failures: list[Exception] = []

        def join() -> None:
            try:
                join_group(group, self._folder, device, self._config)
            except Exception as error:
                failures.append(error)

        joining = threading.Thread(target=join, daemon=True)
        joining.start()
        while joining.is_alive():
            self.check()
            joining.join(_LOOK_EVERY_S)
        for error in failures:
            if isinstance(error, RuntimeError):
                raise self.blame(error) from error
            raise error
        if group.on_gpus:
            self._watch = LaunchWatch(self._processes, group.give_up)
            weakref.finalize(self, self._watch.close)
        return group

    def common_plan(self, own: MemoryPlan) -> MemoryPlan:
        """Once all have loaded their share: what every rank can hold, from our plan and theirs."""
        plans = [own]
        for message in self._collect(QUIET_LIMIT_S, "load its weights"):
            assert isinstance(message, RankLoaded)
            plans.append(message.plan)
        least = min(plans, key=lambda plan: plan.pages)
        return least._replace(
            state_slots=min(plan.state_slots for plan in plans),
            penalty_slots=min(plan.penalty_slots for plan in plans),
            max_num_seqs=min(plan.max_num_seqs for plan in plans),
        )

    def settle(self, layout: Layout) -> None:
        """Have all others lay out caches and tables; `wait_settled` waits for them."""
        self._send(Settle(layout))

    def wait_settled(self) -> None:
        self._wait_for_all("settled", QUIET_LIMIT_S)
        self._settled = True

    def compile_kernels(self, limits: Limits) -> None:
        self._send(CompileKernels(limits))

    def capture_graphs(self) -> None:
        self._send(CaptureGraphs())

    def serve(self) -> None:
        """From now on nothing is compiled: a step that takes longer than `rank_timeout_s` is stuck."""
        self.limit_s = self._config.rank_timeout_s
        assert self._group is not None
        limit_waits(self._group, self._config)

    def run(self, step: Step, choices: Choices) -> None:
        """Have all others compute a step."""
        self._step += 1
        self._send(RunStep(self._step, step, choices))

    @contextmanager
    def together(self) -> Iterator[None]:
        """While the host has its device compute what all compute: a failure is put down to the rank that caused it."""
        try:
            with self._watch.during(self.limit_s) if self._watch else nullcontext():
                yield
        except RuntimeError as error:
            raise self.blame(error) from error
        if self._watch and self._watch.gave_up:
            self.check()
            raise self._failure(self._suspects() or _ALL_BEGUN, f"step {self._step} is not launched within its limit")

    def wait(self, event: torch.cuda.Event) -> None:
        """Until the device is past `event`, or a rank is gone or stuck."""
        started = looked = time.monotonic()
        while not self._passed(event):
            now = time.monotonic()
            if now - looked > _LOOK_EVERY_S:
                looked = now
                self.check()
                if now - started > self.limit_s:
                    waited = f"step {self._step} is not done after {now - started:.1f} s"
                    raise self._failure(self._suspects() or _ALL_BEGUN, waited)

    def _passed(self, event: torch.cuda.Event) -> bool:
        try:
            return event.query()
        except RuntimeError as error:  # the device's own failure, or a collective that was given up
            raise self.blame(error) from error

    def check(self) -> None:
        """Raise RankError where a rank has failed or its process is gone."""
        ended = [rank for rank, process in self._processes.items() if process.poll() is not None]
        while self._inbox.poll(0 if not ended else _LAST_WORDS_MS):  # its own reason, where it gave one
            self._come.append(self._take(self._inbox.recv()))
        for rank in ended:
            raise self._failure(self._name(rank), f"has ended: {_how(self._processes[rank].returncode)}")

    def blame(self, error: RuntimeError) -> RankError:
        """What a collective's failure is due to: it may be seen before the end of the process that caused it."""
        until = time.monotonic() + _BLAME_S
        while time.monotonic() < until:
            try:
                self.check()
            except RankError as cause:
                return cause
            time.sleep(_LOOK_EVERY_S)
        return self._failure(self._suspects() or "rank 0", " ".join(str(error).split())[:300])

    def close(self, at_rest: Callable[[], None]) -> None:
        """Leave the group together, or end the processes by force where that cannot be. Can be called twice.

        `at_rest` is called before the group is left, when no step is under way.
        """
        if not self._end.alive:
            return
        if self._watch:
            self._watch.close()
        together = self._settled and not self._failed and self._is_done()
        if together:
            at_rest()
            with suppress(RankError):
                self._send(Leave())
            together = not self._failed
        if self._group is not None:
            if together or not self._group.on_gpus:
                self._group.leave()
            else:
                self._group.give_up()  # NCCL would wait for ranks that are gone
        until = time.monotonic() + (_LEAVE_LIMIT_S if together else 0.0)
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < until:
            time.sleep(0.01)
        self._end()

    def _is_done(self) -> bool:
        """Wait for the step that the device may have under way. False: it does not end, and so the group has failed."""
        if self._group is not None and self._group.on_gpus:
            under_way = torch.cuda.Event()
            under_way.record()
            with suppress(RankError):
                self.wait(under_way)
        return not self._failed

    def _send(self, message: ToRank) -> None:
        content = encoder.encode(message)
        for rank, outbox in zip(self._processes, self._outboxes, strict=True):
            try:
                outbox.send(content)
            except zmq.Again as error:  # nobody is connected: there is no queue to put it into
                self.check()
                raise self._failure(self._name(rank), f"does not listen, for {SEND_LIMIT_MS} ms") from error

    def _take(self, content: bytes) -> FromRank:
        message = from_rank_decoder.decode(content)
        if isinstance(message, RankFailed):
            raise self._failure(self._name(message.rank), message.message)
        return message

    def _collect(self, limit_s: float, what: str) -> Iterable[FromRank]:
        """One message of every other rank. limit_s: without one, and without a sign of life."""
        heard, signs = time.monotonic(), self._signs.copy()
        for count in range(len(self._processes)):
            while not self._come:
                self._inbox.poll(int(1000 * _LOOK_EVERY_S))
                self._check_loading()
                if self._come or (self._signs != signs).any():
                    heard, signs = time.monotonic(), self._signs.copy()
                elif time.monotonic() - heard > limit_s:
                    could = f"{count} of {len(self._processes)} others could {what}"
                    raise self._failure("ranks", f"{could}; none was heard for {limit_s:g} s")
            yield self._come.popleft()

    def _check_loading(self) -> None:
        """`check`, for times in which no step has a limit: who is stopped for long has failed too."""
        self.check()
        now = time.monotonic()
        for rank, process in self._processes.items():
            if not _is_stopped(process.pid):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > STOPPED_LIMIT_S:
                raise self._failure(self._name(rank), f"has been stopped by a signal for {STOPPED_LIMIT_S:g} s")

    def _wait_for_all(self, stage: str, limit_s: float) -> None:
        for message in self._collect(limit_s, f"be {stage}"):
            assert isinstance(message, RankStage)
            assert message.stage == stage, f"rank {message.rank} says {message.stage}"

    def _failure(self, who: str, what: str) -> RankError:
        """There is no leaving together any more."""
        if self._group is not None:
            self._group.give_up()
        self._failed = True
        return RankError(f"{who}: {what}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank].pid})"

    def _suspects(self) -> str:
        """The ranks that keep a step from being done, where that can be seen from here."""
        stopped = [rank for rank, process in self._processes.items() if _is_stopped(process.pid)]
        late = [rank for rank in self._processes if self._begun[rank] < self._step]
        what = "stopped by a signal" if stopped else f"has not begun step {self._step}"
        return ", ".join(f"{self._name(rank)}, {what}" for rank in stopped or late)


def step_board(folder: Path, size: int) -> np.memmap:
    """[2, size] int64, shared by the processes that open it in `folder`: the number of the step each rank has begun,
    and one that each counts up while it loads, as a sign of life."""
    return np.memmap(steps_file(folder), dtype=np.int64, mode="r+", shape=(2, size))


def join_group(group: Group, folder: Path, device: torch.device, config: EngineConfig) -> None:
    """Every rank's way into its group. Raises RuntimeError where another does not come."""
    peer_memory = not {"no-peer-memory", "reference-kernels"} & set(config.debug)
    group.join(folder / "group", device, WARM_UP_LIMIT_S, peer_memory=peer_memory)


def limit_waits(group: Group, config: EngineConfig) -> None:
    """On a CPU the collectives notice a rank that is stuck; on GPUs the host does (`Ranks.wait`), which names it."""
    if group.on_gpus:
        return
    group.limit_waits(config.rank_timeout_s)


def _end(started: StartedRanks, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    started.end()
    context.destroy(linger=0)


def _is_stopped(process: int) -> bool:
    """Whether it is held by SIGSTOP or a debugger; proc(5), the third field of stat."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _how(returncode: int) -> str:
    return f"exit status {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"
