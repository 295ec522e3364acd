"""The queue of a model: classes get their shares, none starves, deadlines end what waits, and room is never lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from exchanges import new_exchange
from waiting import WAIT_S

from meltcore.common.errors import RequestError
from meltcore.serve.requests.admission import MAX_RETRY_S, RATE_WINDOW_S, UNKNOWN_RETRY_S, Admission, DrainRate, Load
from meltcore.serve.requests.fair_queue import STALE_S, FairQueue
from meltcore.serve.requests.request_queue import RequestQueue, max_requests_at_engine
from meltcore.serve.requests.stats import CLASSES, ModelStats, ServerStats
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.settings.config import PriorityClass

SHARES = (60, 30, 10)


def processes(count: int) -> list[ModelStats]:
    """The views that `count` API servers have of one model."""
    first = ServerStats(num_processes=count + 1)
    views = [ServerStats(num_processes=count + 1, process_index=row, fds=first.fds) for row in range(1, count + 1)]
    return [view.models[0] for view in views]


def request(name: PriorityClass, now_s: float, cost: float = 1.0) -> Ticket[Child]:
    """A request with one child."""
    ticket: Ticket[Child] = Ticket(now_s)
    ticket.exchange = new_exchange()
    Child(ticket)
    ticket.request_turn(name, units=0, cost=cost)
    ticket.admitted_s = ticket.order_s = now_s
    return ticket


class Simulation:
    """Two processes that share an engine of `slots` slots, under seeded random arrivals, costs and times."""

    def __init__(self, seed: int, slots: int = 8) -> None:
        self.draw = random.Random(seed)
        self.stats = processes(2)
        self.queues = [FairQueue(stats, SHARES) for stats in self.stats]
        self.slots, self.now_s = slots, 0.0
        self.running: list[tuple[FairQueue, Ticket[Child]]] = []
        self.work: Counter[str] = Counter()  # of each class that is done
        self.waits_s: dict[str, list[float]] = {name: [] for name in CLASSES}

    def arrive(self, name: PriorityClass) -> None:
        self.draw.choice(self.queues).push(request(name, self.now_s, cost=self.draw.uniform(1, 40)))

    def waits(self, name: PriorityClass) -> float:
        return self.stats[0].total(f"queue_requests/{name}")

    def step(self) -> None:
        """One request may end, and what fits begins. The real cost differs from the expected one."""
        self.now_s += 0.001
        for queue in self.queues:
            queue.beat(self.now_s)
        if len(self.running) == self.slots:
            queue, ticket = self.running.pop(self.draw.randrange(self.slots))
            cost = self.draw.uniform(1, 40)
            queue.settle(ticket, cost)
            self.work[ticket.priority_class] += cost  # type: ignore[assignment]
        idle = 0
        while len(self.running) < self.slots and idle < 20:
            queue = self.draw.choice(self.queues)
            if (found := queue.pop(self.now_s)) is None:
                idle += 1
                continue
            self.waits_s[found.priority_class].append(self.now_s - found.admitted_s)
            self.running.append((queue, found))


@pytest.mark.parametrize("seed", range(4))
def test_classes_that_wait_get_their_shares_of_the_work(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(4000):
        for name in CLASSES:  # each always has some that wait, and not always as many
            while simulation.waits(name) < 1 + simulation.draw.randrange(5):
                simulation.arrive(name)
        simulation.step()
    total = sum(simulation.work.values())
    for name, share in zip(CLASSES, SHARES, strict=True):
        assert simulation.work[name] / total == pytest.approx(share / 100, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_none_starves_and_a_class_saves_nothing_up(seed: int) -> None:
    """A batch request waits at most for its share's turn, and an idle class does not take over when it returns."""
    simulation = Simulation(seed)
    while simulation.now_s < 2:
        while simulation.waits("interactive") < 20:
            simulation.arrive("interactive")
        if simulation.draw.random() < 0.02:  # below its share
            simulation.arrive("batch")
        simulation.step()
    assert len(simulation.waits_s["batch"]) >= 20
    assert max(simulation.waits_s["batch"]) < 0.2
    done_before, begun = simulation.work.copy(), simulation.now_s
    while simulation.now_s < begun + 1:  # standard comes for the first time, after 2 s
        for name in ("interactive", "standard"):
            while simulation.waits(name) < 20:  # type: ignore[arg-type]
                simulation.arrive(name)  # type: ignore[arg-type]
        simulation.step()
    done = {name: simulation.work[name] - done_before[name] for name in ("interactive", "standard")}
    assert done["standard"] / sum(done.values()) == pytest.approx(1 / 3, rel=0.1)


def test_order_within_a_class_and_a_process_that_has_stopped() -> None:
    (own, other), now_s = processes(2), 100.0
    mine, theirs = FairQueue(own, SHARES), FairQueue(other, SHARES)
    late, early, urgent = (request("standard", now_s + delay) for delay in (0.2, 0.0, 0.3))
    urgent.order_s -= 5
    for ticket in (late, early, urgent):
        mine.push(ticket)
    elder = request("standard", now_s - 1)
    theirs.push(elder)
    theirs.beat(now_s)
    assert mine.pop(now_s) is urgent
    assert mine.pop(now_s) is None  # the other process has the eldest
    assert mine.pop(now_s + 2 * STALE_S) is early  # but does not take its turn
    theirs.remove(elder)
    assert (len(theirs), own.total("queue_requests/standard")) == (0, 1)
    assert mine.pop(now_s) is late


class Scene:
    """A queue before an engine of two slots, which is sent three."""

    def __init__(self, max_queue: int = 100, stats: ModelStats | None = None) -> None:
        self.stats = stats or processes(1)[0]
        admission = Admission(max_queue=max_queue, max_units=1000, max_num_seqs=2)
        self.queue = RequestQueue(self.stats, admission, slots=2, shares=SHARES)
        self.queue.accept = lambda _ticket: self.stats.add("in_flight")
        self.queue.start = lambda ticket: self.starts[ticket]()
        self.starts: dict[Ticket[Child], Callable[[], object]] = {}
        self.started: list[str] = []

    def admit(
        self, name: str, priority_class: PriorityClass = "standard", start: Callable[[], object] | None = None
    ) -> Ticket[Child]:
        """Admit a request. At its turn `start` is called, or else its name is noted."""
        ticket = request(priority_class, time.monotonic())
        self.starts[ticket] = start or (lambda: self.started.append(name))
        self.queue.admit(ticket)
        return ticket

    def end(self, ticket: Ticket[Child]) -> None:
        self.stats.add("in_flight", -1)
        self.stats.add("finished")
        self.queue.leave(ticket)
        self.queue.free_slots(ticket, ticket.cost)


def run(scenario: Callable[[], object]) -> None:
    async def main() -> None:
        await scenario()  # type: ignore[misc]

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_requests_start_immediately_until_the_engine_is_full_then_in_turn() -> None:
    async def scenario() -> None:
        scene = Scene()
        running = [scene.admit(str(index)) for index in range(max_requests_at_engine(2))]
        assert scene.started == ["0", "1", "2"]
        batch = scene.admit("batch", "batch")
        left = scene.admit("left", "interactive")
        scene.admit("standard", "standard")
        scene.admit("interactive", "interactive")
        scene.end(left)  # its client has gone: its place is free, and no engine hears of it
        assert (len(scene.queue), scene.stats.total("queue_requests")) == (3, 3)
        for ticket in running:
            scene.end(ticket)
        await asyncio.sleep(0.02)
        assert scene.started[3:] == ["interactive", "standard", "batch"]
        assert batch.exchange.queue_wait_s > 0
        assert scene.stats.total("in_flight") == 3
        buckets, _ = scene.stats.queue_waits["standard"].totals()
        assert buckets[-1][1] == 4  # those that need not wait too

    run(scenario)


def test_two_processes_share_the_room() -> None:
    """What ends in one process makes room for a request that waits in the other."""

    async def scenario() -> None:
        here, there = (Scene(stats=stats) for stats in processes(2))
        running = [here.admit(str(index)) for index in range(max_requests_at_engine(2))]
        there.admit("waits")
        assert there.started == []
        await asyncio.sleep(0.05)
        assert there.started == []
        here.end(running[0])
        await asyncio.sleep(0.1)
        assert there.started == ["waits"]

    run(scenario)


def test_a_class_can_fill_its_share_of_a_queue_that_another_has_filled() -> None:
    async def scenario() -> None:
        scene = Scene(max_queue=10)
        for index in range(2 + 10):
            scene.admit(str(index), "batch")
        with pytest.raises(RequestError, match="11 requests would wait, the limit is 10") as full:
            scene.admit("more", "batch")
        assert (full.value.status, full.value.code, full.value.retry_after_s) == (429, "queue_full", UNKNOWN_RETRY_S)
        for index in range(5):  # 6 of 10 are theirs; one of those that the engine has is counted as such
            scene.admit(str(index), "interactive")
        with pytest.raises(RequestError, match="16 requests would wait"):
            scene.admit("more", "interactive")
        refused = [scene.stats.total(f"refused_full/{name}") for name in CLASSES]
        assert (refused, scene.stats.total("rejected_queue_full")) == ([1, 0, 1], 2)

    run(scenario)


def test_units_bound_the_queue_and_a_class_has_its_share_of_them() -> None:
    admission = Admission(max_queue=100, max_units=100, max_num_seqs=1)
    admission.check(Load(1, 0), requests=1, replicas=1, units=1e6)  # alone it may be of any size
    admission.check(Load(1, 100, 0, 100), requests=1, replicas=1, units=60, share=0.6)
    for others, units in ((100, 61), (0, 1)):
        with pytest.raises(RequestError, match=f"{100 + units} prompt tokens would wait, the limit is 100"):
            admission.check(Load(1, 100, 0, others), requests=1, replicas=1, units=units, share=0.6)


def test_retry_after_follows_the_drain_rate() -> None:
    """Refused clients are sent to the places that the queue will have: one after the other."""
    rate = DrainRate()
    assert rate.retry_after_s(0.0, 0, excess=1, requests=1) == UNKNOWN_RETRY_S
    for tick in range(11):
        rate.record(tick * 0.5, tick * 5)  # 10 requests per second
    retries = [rate.retry_after_s(5.0, 50, excess=1, requests=1) for _ in range(20)]
    assert retries == pytest.approx([0.1 * index for index in range(1, 21)])
    assert rate.retry_after_s(5.0, 50, excess=300, requests=1) == pytest.approx(30)
    assert rate.retry_after_s(5.0, 50, excess=1e9, requests=1) == MAX_RETRY_S
    assert rate.retry_after_s(5.0 + 2 * RATE_WINDOW_S, 50, excess=1, requests=1) == UNKNOWN_RETRY_S  # all too old
    assert DrainRate(4).retry_after_s(1, 1, excess=1, requests=1) == UNKNOWN_RETRY_S


@pytest.mark.parametrize("seed", range(3))
def test_no_request_starts_after_its_deadline_and_those_that_leave_lose_no_room(seed: int) -> None:
    draw = random.Random(seed)

    async def scenario() -> None:
        scene = Scene()
        running: set[int] = set()
        late: set[int] = set()

        async def request_of(index: int) -> None:
            await asyncio.sleep(draw.uniform(0, 0.05))
            started = asyncio.Event()

            def start() -> None:
                assert index not in late, "it started after its deadline"
                running.add(index)
                assert len(running) <= max_requests_at_engine(2)
                started.set()

            ticket = scene.admit(str(index), draw.choice(CLASSES), start)
            try:
                await asyncio.wait_for(started.wait(), draw.uniform(0.001, 0.1))
                await asyncio.sleep(draw.uniform(0, 0.005))
            except TimeoutError:
                late.add(index)
            running.discard(index)
            scene.end(ticket)

        await asyncio.gather(*map(request_of, range(90)))
        assert 0 < len(late) < 90
        assert (len(scene.queue), scene.stats.total("queue_requests"), scene.stats.total("in_flight")) == (0, 0, 0)
        for _ in range(max_requests_at_engine(2)):
            scene.admit("after")
        assert scene.started == ["after"] * max_requests_at_engine(2), "the room is whole again"

    run(scenario)
