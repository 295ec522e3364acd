"""Step pacing: shares, bounded waits and deaths on a simulated clock; two real processes; the process shell."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import WAIT_S, wait_until

from meltcore.common.errors import ConfigError
from meltcore.common.process import end_group, start
from meltcore.engine.host import shell
from meltcore.engine.host.step_pacing import (
    HOLD_S,
    MAX_POLL_S,
    NO_WAIT,
    POLL_S,
    SHORT_STEPS_S,
    StepCounts,
    StepPacing,
    StepTurn,
)
from meltcore.protocol.generation import EngineStats, StepOutputs, ToEngine
from meltcore.protocol.shell import EngineReady
from meltcore.protocol.step_marks import MAX_ENGINES, StepMarks, make_marks_file
from meltcore.protocol.step_sums import StepKind, StepSums, sums_by_kind, total_steps
from meltcore.settings.config import EngineSharing, PriorityClass


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marks") / "marks"
    make_marks_file(path)
    return path


class World:
    """A clock that tests move, and a higher class that works at some times."""

    def __init__(self, marks: Path, works: Callable[[float], bool], **settings: float) -> None:
        self.now_s = 1000.0
        self.began_s = self.now_s
        self.works = works
        self.higher = StepMarks(marks, "interactive")
        self.higher.clear()
        self.settings = {"min_share": 0.5, "max_wait_ms": 100.0} | settings
        config = EngineSharing(priority_class="batch", marks=(str(marks),), step_ms=20.0, **self.settings)
        self.pacing = StepPacing(config, clock=self.clock, sleep=self.sleep)
        self.stepped_s = 0.0
        self.waits: list[float] = []

    def clock(self) -> float:
        if self.works(self.now_s - self.began_s):
            self.higher.mark(self.now_s + HOLD_S)
        else:
            self.higher.clear()
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 0.00005  # a sleep takes longer

    def step(self, took_s: float) -> StepTurn:
        before_s = self.now_s
        turn = self.pacing.begin_step()
        self.waits.append(self.now_s - before_s)
        self.now_s += took_s
        self.stepped_s += took_s
        self.pacing.end_step(has_work=True)
        return turn

    @property
    def share(self) -> float:
        return self.stepped_s / (self.now_s - self.began_s)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    share=st.floats(0.1, 1.0),
    step_ms=st.floats(0.5, 60.0),
    max_wait_ms=st.floats(5.0, 200.0),
)
def test_share_beside_a_class_that_never_rests(marks: Path, share: float, step_ms: float, max_wait_ms: float) -> None:
    """At least the guaranteed share; no more than 5 % above it where no single wait meets its limit."""
    world = World(marks, lambda _: True, min_share=share, max_wait_ms=max_wait_ms)
    for _ in range(100):  # until the first credit, one wait of the longest, is spent
        world.step(step_ms / 1000)
    world.began_s, world.stepped_s = world.now_s, 0.0
    for _ in range(200):
        world.step(step_ms / 1000)
    assert world.share >= 0.95 * share
    assert max(world.waits) <= max_wait_ms / 1000 + 2 * POLL_S
    if step_ms * (1 - share) / share <= max_wait_ms:
        assert world.share <= 1.05 * share + 0.01
        assert world.pacing.waited_s == pytest.approx(sum(world.waits))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    periods=st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0.001, 0.5)), min_size=1, max_size=8),
    steps_ms=st.lists(st.floats(0.2, 300.0), min_size=1, max_size=8),
    share=st.floats(0.2, 0.9),
)
def test_any_pattern_leaves_the_share(
    marks: Path, periods: list[tuple[float, float]], steps_ms: list[float], share: float
) -> None:
    """However a higher class works, waits stay within the share and one wait of the longest."""
    total_s = sum(map(sum, periods))

    def works(at_s: float) -> bool:
        at_s %= total_s
        for on_s, off_s in periods:
            if at_s < on_s:
                return True
            at_s -= on_s + off_s
            if at_s < 0:
                return False
        return False

    world = World(marks, works, min_share=share)
    for number in range(150):
        world.step(steps_ms[number % len(steps_ms)] / 1000)
        assert sum(world.waits) <= world.stepped_s * (1 - share) / share + 0.1 + 2 * POLL_S
    assert max(world.waits) <= 0.1 + 2 * POLL_S


def test_burst_is_waited_out_and_steps_stay_short_for_a_while(marks: Path) -> None:
    world = World(marks, lambda at_s: 1.0 <= at_s < 1.08)
    turns = []
    while world.now_s - world.began_s < 5:
        turns.append((world.now_s - world.began_s, world.step(0.01)))
    waited = [(at_s, turn) for at_s, turn in turns if turn.waited_s]
    assert len(waited) == 1
    at_s, turn = waited[0]
    assert at_s + turn.waited_s == pytest.approx(1.08, abs=MAX_POLL_S + 0.001)
    limited = [at_s for at_s, turn in turns if turn.limit_s == 0.02]
    assert min(limited) == at_s
    assert max(limited) == pytest.approx(1.08 + SHORT_STEPS_S, abs=0.02)


def test_dead_engine_holds_others_for_its_last_mark_at_most(marks: Path) -> None:
    """Its mark lapses; until then the others have their share."""
    world = World(marks, lambda at_s: at_s < 0.5)
    world.higher.clear = lambda: None  # type: ignore[method-assign]  # it died and left the mark
    turns = []
    while world.now_s - world.began_s < 4:
        turns.append((world.now_s - world.began_s, world.step(0.01).waited_s))
    assert max(at_s for at_s, waited_s in turns if waited_s) < 0.5 + HOLD_S
    assert sum(waited_s for _, waited_s in turns) <= 0.5 * (0.5 + HOLD_S) + 0.11


def test_only_higher_classes_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    make_marks_file(path)
    views = {each: StepMarks(path, cast(PriorityClass, each)) for each in ("interactive", "standard", "batch")}
    views["standard"].mark(7.0)
    assert {name: view.wait_until_s() for name, view in views.items()} == {"interactive": 0, "standard": 0, "batch": 7}
    views["interactive"].mark(5.0)
    assert {name: view.wait_until_s() for name, view in views.items()} == {"interactive": 0, "standard": 5, "batch": 7}
    views["standard"].clear()
    views["batch"].mark(9.0)  # no engine waits for the last class
    assert views["batch"].wait_until_s() == 5


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.*cannot be opened: No such file"):
        StepMarks(tmp_path / "gone", "batch")
    (tmp_path / "short").write_bytes(b"\0" * 9)
    with pytest.raises(ConfigError, match=rf"must have {2 * MAX_ENGINES * 8} bytes; it has 9"):
        StepMarks(tmp_path / "short", "batch")


def test_a_step_without_others_reads_the_clock_once(marks: Path) -> None:
    """With its marks it takes less than a microsecond."""
    world = World(marks, lambda _: False)
    reads: list[None] = []
    world.pacing._clock = lambda: reads.append(None) or world.now_s  # type: ignore[func-returns-value]
    for _ in range(100):
        world.step(0.01)
    assert len(reads) == 100
    assert world.pacing.waited_s == 0


# --- processes -----------------------------------------------------------------------------------------------------

WORKER = """
import sys, time
from meltcore.settings.config import EngineSharing
from meltcore.engine.host.step_pacing import StepPacing
pacing = StepPacing(EngineSharing(priority_class=sys.argv[2], marks=(sys.argv[1],)))
step_s = float(sys.argv[3])
print("ready", flush=True)
while True:
    waited_s = pacing.begin_step().waited_s
    time.sleep(step_s)
    pacing.end_step(has_work=True)
    print(waited_s, flush=True)
"""


@contextmanager
def worker(marks: Path, priority_class: str, step_s: float, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = start([sys.executable, "-c", WORKER, str(marks), priority_class, str(step_s)], stdout=output)
    try:
        wait_until(log.read_text, "the worker to start")
        yield process
    finally:
        end_group(process, 0.0)


def waits_of(log: Path) -> list[float]:
    """How long each step that has ended waited for others."""
    *whole, _ = log.read_text().split("\n")
    return [float(line) for line in whole[1:]]


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """One marks, dies by SIGKILL and is replaced; the other waits, goes on, and waits again."""
    path = tmp_path / "marks"
    make_marks_file(path)
    lower = tmp_path / "lower"
    with worker(path, "standard", 0.005, lower):
        with worker(path, "interactive", 0.01, tmp_path / "higher") as higher:
            waits_more(lower, "the lower class waits, and goes on all the same")
            higher.kill()
            higher.wait(WAIT_S)
        wait_until(lambda: waits_of(lower)[-20:] == [0.0] * 20, "it waits for the dead no more")
        with worker(path, "interactive", 0.01, tmp_path / "second"):
            waits_more(lower, "it waits for the successor")


def waits_more(log: Path, what: str) -> None:
    """Until ten more steps have ended that waited for others."""
    before = sum(map(bool, waits_of(log)))
    wait_until(lambda: sum(map(bool, waits_of(log))) >= before + 10, what)


# --- engines -------------------------------------------------------------------------------------------------------


class _Enough(BaseException):
    """Ends the process's loop from within."""


class _Watched:
    """An engine of three steps that looks at the marks of its GPU, as a lower class sees them."""

    def __init__(self, lower: StepMarks) -> None:
        self.left = 3
        self.marked: list[bool] = []
        self.turns: list[StepTurn] = []
        self._lower = lower

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def ready(self) -> EngineReady:
        return EngineReady("cuda:0", "bfloat16", "real", [], 1.0)

    def take_turn(self, turn: StepTurn) -> None:
        self.turns.append(turn)

    def step(self) -> StepOutputs:
        self.left -= 1
        self.marked.append(self._lower.wait_until_s() > time.monotonic())
        return StepOutputs([], EngineStats(), 0.0)

    def check(self) -> None:
        self.marked.append(self._lower.wait_until_s() > time.monotonic())
        raise _Enough


@pytest.mark.slow
@pytest.mark.parametrize("with_higher", [False, True])
def test_process_marks_its_steps_and_not_its_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_higher: bool
) -> None:
    path = tmp_path / "marks"
    make_marks_file(path)
    if with_higher:
        StepMarks(path, "interactive").mark(time.monotonic() + 30)
    monkeypatch.setattr(shell, "_IDLE_POLL_MS", 10)
    monkeypatch.setattr("gc.freeze", lambda: None)
    engine = _Watched(StepMarks(path, "batch"))
    sharing = EngineSharing(priority_class="standard", marks=(str(path),), max_wait_ms=30.0)
    with pytest.raises(_Enough):
        shell.EngineShell(tmp_path, ToEngine, sharing=sharing).serve(lambda progress: engine)
    if with_higher:
        assert [turn.limit_s for turn in engine.turns] == [0.05] * 3
        assert engine.turns[0].waited_s >= 0.03
    else:
        assert engine.marked == [True, True, True, False]
        assert engine.turns == [StepTurn(0.0, None)] * 3


def test_the_time_of_steps_has_no_gaps_while_there_is_work_and_no_waits() -> None:
    counts = StepCounts()
    counts.begin(7.0)  # before the engine had work
    assert counts.end(1.0, 1.5, 1, 0, NO_WAIT, goes_on=True) == 0.5
    counts.begin(0.25)  # of the second from the last end on, a quarter was waited
    assert counts.end(1.75, 2.5, 1, 0, NO_WAIT, goes_on=True) == 0.75
    counts.begin(5.0, is_in_flight=True)
    assert counts.end(2.5, 3.0, 1, 0, NO_WAIT, goes_on=False) is None, "it ended during the wait"
    counts.begin(0.0)
    counts.begin(0.25, is_in_flight=True)  # the first step after a rest is in flight
    assert counts.end(9.0, 9.5, 1, 0, NO_WAIT, goes_on=True) is None
    counts.begin(0.5)
    assert counts.end(10.0, 12.0, 1, 0, NO_WAIT, goes_on=False, yielded_s=1.0) == 1.0
    assert sums_by_kind(counts.packed()) == {StepKind("decode", 1): StepSums(5, 0.5 + 0.75 + 0.0 + 0.25 + 1.0, 5, 0)}


def test_steps_of_every_size_have_a_kind() -> None:
    counts = StepCounts()
    for rows, tokens in ((1, 0), (7, 0), (4096, 0), (1, 2), (4096, 1 << 20)):
        counts.end(1.0, 2.0, rows, tokens, NO_WAIT, goes_on=False)
    counts.end(1.0, 2.0, 3, 9, StepTurn(0.0, 0.025), goes_on=False)
    found = sums_by_kind(counts.packed())
    assert set(found) == {("decode", 1), ("decode", 4), ("decode", 512), ("prompt", 2), ("prompt", 32768), ("paced", 0)}
    assert total_steps(found) == StepSums(6, 6.0, 1 + 7 + 4096 + 1 + 4096 + 3, 2 + (1 << 20) + 9)


def test_a_step_waits_between_its_parts_and_its_waits_earn_nothing(marks: Path) -> None:
    """A higher class works from 1 ms to 6 ms, and from 30 ms on without a rest."""
    world = World(marks, lambda since_s: 0.001 < since_s < 0.006 or since_s > 0.030, max_wait_ms=10.0)
    world.now_s += 0.002
    wait = world.step(0.0).wait  # steps are short now
    assert wait is not None
    world.now_s = world.began_s + 0.0295
    world.pacing.begin_step()
    assert wait() == 0.0, "no mark stands"
    world.now_s += 0.001
    assert 0.003 < wait() < 0.009, "what the first wait has left of 10 ms"
    assert wait() < 0.001, "the credit is spent, and no part has run since"
    spent_s = world.pacing._credit_s
    world.now_s += 0.001
    world.pacing.end_step(has_work=True)
    assert world.pacing._credit_s - spent_s == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize(
    ("parts", "part_ms", "share"), [(1, 50.0, 0.5), (24, 25.0, 0.5), (48, 25.0, 0.5), (24, 25.0, 0.3)]
)
def test_a_step_of_many_parts_yields_the_same_share(marks: Path, parts: int, part_ms: float, share: float) -> None:
    """Beside a class that never rests, no part runs on without a wait: each earns its own."""
    world = World(marks, lambda _: True, min_share=share)
    runs_s = [0.0]

    def run_step() -> None:
        wait = world.pacing.begin_step().wait
        assert wait is not None
        for _ in range(parts):
            runs_s[-1] += part_ms / 1000
            world.now_s += part_ms / 1000
            if wait() > 0:
                runs_s.append(0.0)
        world.pacing.end_step(has_work=True)

    run_step()  # which spends the first credit
    world.began_s = world.now_s
    runs_s[:] = [0.0]
    for _ in range(200 // parts):
        run_step()
    assert sum(runs_s) / (world.now_s - world.began_s) == pytest.approx(share, rel=0.05)
    assert max(runs_s) <= 2 * part_ms / 1000
