"""Long steps of a lower class yield between their layers: an urgent step begins before they end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import engine_tools as tools
import pytest
import torch

from meltcore.engine.host.step_pacing import HOLD_S, StepPacing, StepTurn
from meltcore.engine.worker.launched_step import MAX_LAYERS_IN_FLIGHT, LayerYield
from meltcore.protocol.step_marks import make_marks_file
from meltcore.protocol.step_sums import StepKind, sums_by_kind
from meltcore.settings.config import EngineSharing, PriorityClass

NUM_LAYERS = 3  # of the test checkpoint


def pacing_of(marks: Path, priority_class: PriorityClass, clock: list[float]) -> StepPacing:
    """A pacing on a clock that only sleeping moves."""

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    config = EngineSharing(priority_class=priority_class, marks=(str(marks),), step_ms=25.0)
    return StepPacing(config, clock=lambda: clock[0], sleep=sleep)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_urgent_step_begins_between_the_layers_of_a_long_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    prompt = tools.random_prompt(290, 1)
    alone = tools.open_engine(checkpoint)
    alone.add("long", prompt)
    expected = alone.run()
    make_marks_file(tmp_path / "marks")
    clock, events = [1000.0], list[str]()
    urgent = pacing_of(tmp_path / "marks", "interactive", clock)
    low = pacing_of(tmp_path / "marks", "batch", clock)
    urgent.begin_step()
    clock[0] += HOLD_S + 0.5  # its mark has lapsed, and steps are short for a while
    seen = tools.open_engine(checkpoint, overlap=overlap)
    for index, block in enumerate(seen.engine.runner.model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: events.append(f"layer {index}"))

    def wait_for_urgent() -> float:
        """The urgent engine gets a request while layer 0 runs, and its step takes until the low engine has slept."""
        if events == ["layer 0"]:
            urgent.begin_step()
            events.append("urgent begins")
        return low._wait_in_step()

    sleep = low._sleep

    def urgent_steps(seconds: float) -> None:
        sleep(seconds)
        events.append("urgent ends")
        urgent.end_step(has_work=False)

    monkeypatch.setattr(low, "_sleep", urgent_steps)
    seen.add("long", prompt)
    seen.engine.take_turn(StepTurn(0.0, 0.025, wait_for_urgent))
    assert seen.engine.scheduler.max_prompt_tokens == 2048 // 8, "nothing is measured"
    seen.engine.scheduler.max_prompt_tokens = 2048  # as with more layers
    assert seen.run() == expected
    assert events[:5] == ["layer 0", "urgent begins", "urgent ends", "layer 1", "layer 2"]
    assert low.waited_s > 0
    [paced] = [sums for kind, sums in sums_by_kind(seen.engine.stats().step_sums).items() if kind.phase == "paced"]
    assert paced.prompt_tokens == 290
    assert torch.stack(seen.logits["long"]).equal(torch.stack(alone.logits["long"]))


def test_parts_of_a_step_are_limited_and_not_the_whole(checkpoint: Path) -> None:
    engine = tools.open_engine(checkpoint).engine
    engine._prompt_speed.record(2.048, 2048)  # 1 ms for a token
    for turn, tokens in (
        (StepTurn(0.0, None), 2048),
        (StepTurn(0.0, 0.5), 500),
        (StepTurn(0.0, 0.5, lambda: 0.0), 500 * (NUM_LAYERS // MAX_LAYERS_IN_FLIGHT)),
        (StepTurn(0.0, None), 2048),
    ):
        engine.take_turn(turn)
        assert engine.scheduler.max_prompt_tokens == tokens
    engine.runner.caches = [*engine.runner.caches, *engine.runner.caches, *engine.runner.caches]  # of a deeper model
    engine.take_turn(StepTurn(0.0, 0.3, lambda: 0.0))
    assert engine.scheduler.max_prompt_tokens == 300 * (3 * NUM_LAYERS // MAX_LAYERS_IN_FLIGHT)


class RecordedEvent:
    """An event of a device that has passed no point until it is waited for."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)

    def query(self) -> bool:
        return self.number in self.waited


def test_few_layers_are_in_flight() -> None:
    waited, numbers = list[int](), iter(range(9))
    layer_yield = LayerYield(lambda: 0.5, lambda: RecordedEvent(next(numbers), waited))
    assert layer_yield.waited_s is None
    for launched in range(6):
        layer_yield()
        assert waited == list(range(launched + 1 - MAX_LAYERS_IN_FLIGHT)), "all but the newest have ended"
    assert layer_yield.waited_s == 3.0


def test_time_of_waits_within_a_step_is_no_time_of_steps(checkpoint: Path) -> None:
    """Each look takes an hour, by its own account."""
    seen = tools.open_engine(checkpoint)
    seen.add("a", tools.random_prompt(257, 2), max_tokens=4)
    seen.engine.take_turn(StepTurn(0.0, 0.001, lambda: 3600.0))
    seen.engine.scheduler.max_prompt_tokens = 2048
    first = seen.engine.step()
    sums = sums_by_kind(first.stats.step_sums)
    assert sums[StepKind("paced", 0)] == (1, 0.0, 1, 257)
    seen.run()
    sums = sums_by_kind(seen.engine.stats().step_sums)
    assert sums[StepKind("paced", 0)].steps == 4
    assert sums[StepKind("paced", 0)].seconds > 0, "short steps do not wait between their layers"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_times_of_steps_that_yield_one_after_another(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, wait_s: float
) -> None:
    """Each layer takes 0.1 s of a clock that only layers and waits move. The step of 200 tokens does not yield."""
    seen, clock, recorded = tools.open_engine(checkpoint, overlap=overlap), [1000.0], list[tuple[float, int]]()
    engine = seen.engine

    def move(seconds: float) -> float:
        clock[0] += seconds
        return seconds

    monkeypatch.setattr("meltcore.engine.generation.engine.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for block in engine.runner.model.blocks:
        block.register_forward_pre_hook(lambda *_: move(0.1) and None)
    monkeypatch.setattr(engine._prompt_speed, "record", lambda took_s, tokens: recorded.append((took_s, tokens)))
    monkeypatch.setattr(engine._prompt_speed, "tokens_in", lambda limit_s: 256)
    seen.add("a", tools.random_prompt(3 * 256 + 200, 2), max_tokens=3)
    while engine.has_work:
        engine.take_turn(StepTurn(move(wait_s), 0.025, lambda: move(wait_s)))
        engine.runner._longest_whole = 255
        engine.step()
    long = [took_s for took_s, tokens in recorded if tokens == 256]
    assert long == [pytest.approx(0.1 * NUM_LAYERS)] * 3
    [paced] = sums_by_kind(engine.stats().step_sums).values()
    assert (paced.steps, paced.prompt_tokens) == (6, 3 * 256 + 200)
    assert paced.seconds == pytest.approx(6 * 0.1 * NUM_LAYERS), "waits are no part of steps"


def test_each_step_is_counted_by_its_own_turn(checkpoint: Path) -> None:
    """With async scheduling a step ends after the next one has had its turn."""
    seen = tools.open_engine(checkpoint, overlap=True)
    seen.add("a", tools.random_prompt(9, 2), max_tokens=3)
    limits = iter((None, 0.025, None, None))
    while seen.engine.has_work:
        seen.engine.take_turn(StepTurn(0.0, next(limits)))
        seen.engine.step()
    sums = sums_by_kind(seen.engine.stats().step_sums)
    assert {kind: each.steps for kind, each in sums.items()} == {("prompt", 8): 1, ("paced", 0): 1, ("decode", 1): 1}
