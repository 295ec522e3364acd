"""Which sleepable models are awake: properties over random fleets, service times, on a simulated clock."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from meltcore.fleet.swap.residency import LONGEST_TURNS, SWAP_WINDOW_S, Demand, Residency
from meltcore.settings.fleet_spec import ResidencySection

TICK_S = 0.25
SLEEP_S, WAKE_S = 0.5, 1.0


@dataclass
class Model:
    rank: int
    sizes: dict[str, int | None]
    rate: float  # requests per second
    service_s: float
    slots: int
    waiting: list[float] = field(default_factory=list)  # arrivals
    ends: list[float] = field(default_factory=list)  # of running requests
    awake_since_s: float | None = None
    draining: bool = False
    away_since_s: float | None = None  # since when requests have waited for it while it was not awake
    longest_away_s: float = 0.0


class Simulation:
    """Models that take turns as the policy decides; checks memory, minimum times and swaps at each tick."""

    def __init__(self, models: list[Model], config: ResidencySection, seed: int = 0) -> None:
        self.models, self.config, self.random = models, config, random.Random(seed)
        self.policy = Residency(config, {})
        self.log: list[tuple[float, int, tuple[int, ...]]] = []
        self.evictions_s: list[float] = []
        self._events: list[tuple[float, int, str, float]] = []
        self._waiting_for: dict[int, set[int]] = {}
        for key, model in enumerate(models):
            self.policy.add(key, model.rank, model.sizes)

    def run(self, duration_s: float) -> None:
        for tick in range(round(duration_s / TICK_S)):
            now_s = tick * TICK_S
            for model in self.models:
                if self.random.random() < model.rate * TICK_S:
                    model.waiting.append(now_s)
                self._serve(model, now_s)
            self._follow(now_s)
            demands = {
                key: Demand(model.rank if model.waiting else None, bool(model.ends))
                for key, model in enumerate(self.models)
            }
            for swap in self.policy.decide(now_s, demands):
                self._begin(now_s, swap.wake, swap.sleep)
            self._check_memory()

    def _serve(self, model: Model, now_s: float) -> None:
        model.ends = [end_s for end_s in model.ends if end_s > now_s]
        while (
            model.awake_since_s is not None and not model.draining and model.waiting and len(model.ends) < model.slots
        ):
            model.waiting.pop(0)
            model.ends.append(now_s + model.service_s)

        if model.awake_since_s is not None or not model.waiting:
            model.away_since_s = None
        else:
            model.away_since_s = now_s if model.away_since_s is None else model.away_since_s
            model.longest_away_s = max(model.longest_away_s, now_s - model.away_since_s)

    def _begin(self, now_s: float, wake: int, sleep: tuple[int, ...]) -> None:
        self.log.append((now_s, wake, sleep))
        for key in sleep:
            since_s = self.models[key].awake_since_s
            assert since_s is not None
            assert now_s - since_s >= self.config.minimum_s, "a model must stay for its minimum time"
            self.models[key].draining = True
        if sleep:
            self.evictions_s.append(now_s)
            recent = [at_s for at_s in self.evictions_s if now_s - at_s < SWAP_WINDOW_S]
            assert len(recent) <= self.config.swaps_per_minute
        self._waiting_for[wake] = set(sleep)

    def _follow(self, now_s: float) -> None:
        """End drains and sleeps, and wake the models whose memory is free."""
        for key, model in enumerate(self.models):
            if model.draining and not model.ends:
                model.draining, model.awake_since_s = False, None
                heapq.heappush(self._events, (now_s + SLEEP_S, key, "asleep", now_s))
        while self._events and self._events[0][0] <= now_s:
            _, key, what, began_s = heapq.heappop(self._events)
            if what == "asleep":
                self.policy.fell_asleep(key)
                for victims in self._waiting_for.values():
                    victims.discard(key)
            else:
                self.policy.woke(key, now_s, now_s - began_s)
                self.models[key].awake_since_s = now_s
        for key, victims in list(self._waiting_for.items()):
            if not victims:
                del self._waiting_for[key]
                heapq.heappush(self._events, (now_s + WAKE_S, key, "awake", now_s))

    def _check_memory(self) -> None:
        devices = {device for model in self.models for device in model.sizes}
        for device in devices:
            on_it = [key for key, model in enumerate(self.models) if device in model.sizes]
            # A waking model takes memory only once those that it replaces have given theirs up.
            holding = [key for key in on_it if self.policy.state(key) != "asleep" and not self._waiting_for.get(key)]
            sizes = [self.models[key].sizes[device] for key in holding]
            if len(sizes) > 1:
                assert None not in sizes, "a model of unknown size shares with none"
                largest = max(self.models[key].sizes[device] or 0 for key in on_it)
                assert sum(size or 0 for size in sizes) <= largest


def random_models(source: random.Random) -> list[Model]:
    devices = ["0", "1"][: source.choice([1, 1, 2])]
    models = []
    for _ in range(source.randint(2, 5)):
        used = source.sample(devices, source.randint(1, len(devices)))
        sizes: dict[str, int | None] = {device: source.choice([10, 20, 40, 60, None]) for device in used}
        models.append(
            Model(
                rank=source.randint(0, 2),
                sizes=sizes,
                rate=source.choice([0.0, 0.02, 0.2, 2.0]),
                service_s=source.choice([0.25, 2.0, 8.0]),
                slots=source.choice([1, 8]),
            )
        )
    return models


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_memory_minimum_times_and_swaps_hold_and_no_model_starves(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        source = random.Random(seed)
        models = random_models(source)
        config = ResidencySection(
            minimum_s=source.choice([0.0, 5.0]),
            turn_s=source.choice([5.0, 20.0]),
            swaps_per_minute=source.choice([3, 12]),
        )
        simulation = Simulation(models, config, seed)
        simulation.run(800)
        # The wait for a turn, then each other turn with its drain and its swap, and the pause of the swap limit.
        one_turn_s = max(config.turn_s, config.minimum_s) + 8.0 + SLEEP_S + WAKE_S + 3 * TICK_S
        between_s = one_turn_s + SWAP_WINDOW_S / config.swaps_per_minute
        bound_s = LONGEST_TURNS * max(config.turn_s, config.minimum_s) + (2 * len(models)) * between_s
        away_s = max(model.longest_away_s for model in models)
        assert away_s < bound_s, f"seed {seed}: requests of a model waited {away_s} s"
        repeated = Simulation(random_models(random.Random(seed)), config, seed)
        repeated.run(200)
        assert repeated.log == [entry for entry in simulation.log if entry[0] < 200]


def two_models() -> tuple[Residency, float]:
    """Model 0 (standard) is awake since 0 s, model 1 (interactive) and 2 (batch) sleep on the same device."""
    policy = Residency(ResidencySection(minimum_s=5, turn_s=20, swaps_per_minute=6), {})
    for key, rank in enumerate((1, 0, 2)):
        policy.add(key, rank, {"0": 10})
    assert policy.decide(0.0, {0: Demand(1)}) == [(0, ())]
    policy.woke(0, 0.0, 1.0)
    return policy, 0.0


def first_swap_s(policy: Residency, demands: dict[int, Demand], limit_s: float = 200) -> float | None:
    for tick in range(1, round(limit_s / TICK_S)):
        if policy.decide(tick * TICK_S, demands):
            return tick * TICK_S
    return None


@pytest.mark.parametrize(
    ("wanted", "awake", "expected_s"),
    [
        (Demand(0), Demand(None, True), 5.0),  # a more urgent class: after the minimum time
        (Demand(0), Demand(), 5.0),
        (Demand(1), Demand(None, True), 20.0),  # its own class: after its turn
        (Demand(2), Demand(), 5.0),  # it has no work
        (Demand(2), Demand(None, True), 80.0),  # a less urgent class: after several turns
        (Demand(0), Demand(2), 5.0),  # a batch of requests waits for the awake one: its own class does not count
        (Demand(2, is_forced=True), Demand(0, True), 0.25),
    ],
)
def test_turn_of_a_model_depends_on_the_classes(wanted: Demand, awake: Demand, expected_s: float) -> None:
    policy, _ = two_models()
    assert first_swap_s(policy, {0: awake, 1: wanted}) == expected_s


def test_victims_are_idle_then_least_urgent_then_longest_unused_and_no_more_than_needed() -> None:
    policy = Residency(ResidencySection(minimum_s=1), {"0": 40})
    for key, (rank, size) in enumerate([(1, 10), (1, 10), (2, 10), (0, 10), (0, 20)]):
        policy.add(key, rank, {"0": size})
    for key in range(4):
        assert policy.decide(float(key), {key: Demand(1)}) == [(key, ())]
        policy.woke(key, float(key), 0.0)
    assert policy.decide(9.0, {4: Demand(0), 1: Demand(None, True), 2: Demand(None, True)}) == [(4, (0, 3))]
    policy, _ = two_models()
    policy.block(1, 50.0)  # it could not be woken
    assert first_swap_s(policy, {1: Demand(0)}) == 50.0


def test_large_model_waits_for_no_small_ones_that_come_after_it() -> None:
    policy = Residency(ResidencySection(minimum_s=5), {})
    for key, size in enumerate([20, 20, 40, 20]):
        policy.add(key, 1, {"0": size})
    for key, now_s in ((0, 0.0), (1, 4.0)):
        assert policy.decide(now_s, {key: Demand(1)}) == [(key, ())]
        policy.woke(key, now_s, 0.0)
    demands = {2: Demand(1)}
    for tick in range(17, 36):  # at 5 s the small one would fit, and keep the large one waiting
        assert policy.decide(tick * TICK_S, demands) == []
        demands[3] = Demand(1)
    assert policy.decide(9.0, demands) == [(2, (0, 1))]


def test_models_are_loaded_by_their_ranks_however_long_it_takes() -> None:
    policy = Residency(ResidencySection(minimum_s=5, turn_s=5), {})
    for key in range(3):
        policy.add(key, 1, {"0": 10})
    demands = {0: Demand(0, is_forced=True), 1: Demand(-2, is_forced=True), 2: Demand(-1, is_forced=True)}
    order = []
    for step in range(3):
        (swap,) = policy.decide(100.0 * step, demands)
        order.append(swap.wake)
        del demands[swap.wake]
        for victim in swap.sleep:
            policy.fell_asleep(victim)
        policy.woke(swap.wake, 100.0 * step + 99, 0.0)
    assert order == [1, 2, 0]


def test_model_that_cannot_be_awake_in_time_is_known() -> None:
    policy, _ = two_models()
    assert policy.wake_at_s(1, 1.0) == 5.0  # the other one's minimum time
    assert policy.wake_at_s(1, 7.0) == 7.0
    assert policy.decide(7.0, {1: Demand(0)}) == [(1, (0,))]
    policy.fell_asleep(0)
    policy.woke(1, 9.0, 2.0)
    assert policy.decide(15.0, {0: Demand(0)}) == [(0, (1,))]
    policy.fell_asleep(1)
    policy.woke(0, 16.0, 1.0)
    assert policy.wake_at_s(1, 17.0) == 23.0  # and its last wake took 2 s
