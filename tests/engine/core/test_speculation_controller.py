"""When an engine drafts, against models of the time and the tokens of a step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from meltcore.engine.core.speculation import (
    MAX_LOSS,
    MAX_PROBE_SHARE,
    MEMORY_STEPS,
    MIN_STEPS,
    PROBE_STEPS,
    DraftCounts,
    SpeculationController,
)

K = 3
# How many times as long a step with drafts takes, and the tokens that it yields per sequence.
Cost = Callable[[int], tuple[float, float]]


class Sim:
    """Runs steps of given batches. A step without drafts takes 5 ms."""

    def __init__(self, cost: Cost, seed: int = 0) -> None:
        self.cost = cost
        self.controller = SpeculationController(K)
        self.lines: list[str] = []
        self._chance = random.Random(seed)

    def run(self, decodes: int, steps: int) -> list[bool]:
        """Return which steps had drafts."""
        had_drafts = []
        for _ in range(steps):
            num_drafts = self.controller.begin(decodes)
            assert num_drafts in (0, K)
            slowdown, mean = self.cost(decodes) if num_drafts else (1.0, 1.0)
            tokens = sum(self._tokens(mean) for _ in range(decodes))
            took_s = 0.005 * slowdown * self._chance.uniform(0.95, 1.05)
            line = self.controller.record(took_s, decodes, num_drafts, tokens)
            self.lines += [] if line is None else [line]
            had_drafts.append(num_drafts > 0)
        return had_drafts

    def _tokens(self, mean: float) -> int:
        """The tokens of a window: `mean` on average."""
        return int(mean) + (self._chance.random() < mean % 1)


def share(had_drafts: list[bool]) -> float:
    return sum(had_drafts) / len(had_drafts)


def test_each_size_of_batches_gets_the_faster_kind() -> None:
    sim = Sim(lambda decodes: {1: (1.1, 1.3), 12: (1.42, 1.31), 40: (1.9, 2.4), 64: (1.3, 1.0)}[decodes])
    for _ in range(3):
        for decodes in (1, 12, 40, 64):
            sim.run(decodes, 1000)
    assert [round(share(sim.run(decodes, 1000))) for decodes in (1, 12, 40, 64)] == [1, 0, 0, 0]
    with_other_sizes = Sim(lambda decodes: (1.9, 2.4) if decodes == 40 else (1.42, 1.31))
    for decodes in (16, 40, 9, 33):
        with_other_sizes.run(decodes, 200)
    assert [line.partition(":")[0] for line in with_other_sizes.lines] == [
        "speculative decoding is off in batches of 9 to 16",
        "speculative decoding is on in batches of 33 to 64",
    ]


def test_a_small_gain_is_kept_and_not_begun() -> None:
    """Of 3 %: steps with drafts stay in use where they were faster before, and are not taken into use for it."""
    assert share(Sim(lambda _: (1.28, 1.32)).run(4, 3000)) < 0.1
    gains = [(1.28, 1.8)] * 500 + [(1.28, 1.32)] * 3000
    sim = Sim(lambda _: gains.pop(0) if len(gains) > 1 else gains[0])
    assert share(sim.run(4, 3000)) > 0.9


def test_log_line_says_why() -> None:
    controller = SpeculationController(K)
    lines = [
        controller.record(took_s, 16, num_drafts, tokens)
        for took_s, num_drafts, tokens in [(0.0142, K, 21)] * PROBE_STEPS + [(0.01, 0, 16)] * PROBE_STEPS
    ]
    assert lines[:-1] == [None] * (2 * PROBE_STEPS - 1)
    assert lines[-1] == (
        "speculative decoding is off in batches of 9 to 16: with num_speculative_tokens 3 a step takes 1.42 times as "
        "long and yields 1.31 tokens per sequence"
    )


@pytest.mark.parametrize(("decodes", "name"), [(1, "1"), (2, "2"), (3, "3 to 4"), (4, "3 to 4"), (5, "5 to 8")])
def test_sizes_are_powers_of_two(decodes: int, name: str) -> None:
    sim = Sim(lambda _: (1.5, 2.0))
    sim.run(decodes, 2 * PROBE_STEPS)
    assert [line.partition(":")[0] for line in sim.lines] == [f"speculative decoding is on in batches of {name}"]


def test_fewer_steps_than_the_minimum_decide_nothing() -> None:
    for kinds in ((K, 0), (0, K)):
        controller = SpeculationController(K)
        # Drafts without any gain. The first step of each kind is not measured.
        steps = [(0.02 if kind else 0.01, kind) for kind in kinds for _ in range(MIN_STEPS + 1)]
        lines = [controller.record(took_s, 8, kind, 8) for took_s, kind in steps]
        assert lines[:-1] == [None] * (len(steps) - 1)
        assert lines[-1] is not None
    sim = Sim(lambda _: (9.0, 1.0))
    assert sim.run(8, PROBE_STEPS) == [True] * PROBE_STEPS
    assert sim.run(8, PROBE_STEPS) == [False] * PROBE_STEPS


def test_texts_that_change_are_noticed() -> None:
    """Drafts stop within a few remembered steps, and begin again at the next probe or the one after."""
    mean = 2.5
    sim = Sim(lambda _: (1.4, mean))
    assert share(sim.run(8, 3000)) > 0.95
    mean = 1.0
    sim.run(8, 2 * MEMORY_STEPS)
    assert share(sim.run(8, 800)) < 0.05
    mean = 2.5
    sim.run(8, round(2 * PROBE_STEPS / MAX_PROBE_SHARE))
    assert share(sim.run(8, 3000)) > 0.95
    assert [line.split()[3] for line in sim.lines] == ["on", "off", "on"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slowdown", "mean"), [(1.05, 1.0), (1.42, 1.31), (5.0, 1.0), (1.5, 2.4), (1.1, 3.9), (1.0, 3.0)]
)
def test_probes_have_a_bounded_share_of_steps_and_time(slowdown: float, mean: float) -> None:
    sim = Sim(lambda _: (slowdown, mean))
    assert sim.run(8, 2 * PROBE_STEPS) == [True] * PROBE_STEPS + [False] * PROBE_STEPS
    had_drafts, steps = sim.run(8, 20_000), 20_000
    pays = mean / slowdown > 1
    probes = steps - sum(had_drafts) if pays else sum(had_drafts)
    assert 0 < probes <= MAX_PROBE_SHARE * steps + PROBE_STEPS
    # In steps of the kind in use; the first probe after the comparison is included.
    lost = probes * (1 / slowdown - 1 / mean if pays else slowdown - mean)
    assert lost <= 1.1 * (MAX_LOSS * steps + PROBE_STEPS * abs(slowdown - mean))


def test_kinds_that_are_as_fast_do_not_alternate() -> None:
    for seed in range(3):
        sim = Sim(lambda _: (1.5, 1.5), seed)
        sim.run(16, 3000)
        assert len(sim.lines) == 1


def test_a_stalled_step_is_no_result() -> None:
    sim = Sim(lambda _: (1.3, 2.0))
    sim.run(4, 200)
    assert sim.controller.record(3.0, 4, K, 8) is None
    assert share(sim.run(4, 200)) == 1.0


def test_probe_ends_while_every_step_has_prompts() -> None:
    """Such steps are not measured, so nothing is judged."""
    controller = SpeculationController(K)
    kinds = [controller.begin(4) for _ in range(2000)]
    assert 2 * PROBE_STEPS < kinds.count(0) + PROBE_STEPS <= 4 * PROBE_STEPS


def test_counts_are_by_position() -> None:
    counts = DraftCounts(3)
    for num_drafts, num_accepted in ((3, 0), (3, 1), (3, 3), (1, 1), (0, 0)):
        counts.add(num_drafts, num_accepted)
    assert counts.drafted == [4, 3, 3]
    assert counts.accepted == [3, 1, 1]


def test_steps_that_are_not_measured_have_drafts_once_these_are_known_to_pay() -> None:
    controller = SpeculationController(3)
    assert controller.in_use(4) == 0
    for _ in range(200):
        num_drafts = controller.begin(4)
        controller.record(1.2 if num_drafts else 1.0, 4, num_drafts, 8 if num_drafts else 4)
    assert (controller.in_use(4), controller.in_use(3), controller.in_use(9)) == (3, 3, 0)
    for _ in range(200):
        num_drafts = controller.begin(9)
        controller.record(1.2 if num_drafts else 1.0, 9, num_drafts, 9)
    assert controller.in_use(9) == 0
