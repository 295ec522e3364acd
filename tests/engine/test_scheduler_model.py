"""A randomised test of scheduler, pool and prefix cache together, against a model of what must hold.

A fake device runs each plan: it writes every token into (page, offset) as the real kernels would, and "attends" by
reading the whole context back through the pages. A page handed out too early, hit wrongly or lost shows as wrong text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meltcore.engine.messages import AddRequest
from meltcore.engine.page_pool import PAGE_SIZE, PagePool
from meltcore.engine.prefix_cache import PrefixCache
from meltcore.engine.request import Request, Sampled, State
from meltcore.engine.sampling_params import SamplingParams
from meltcore.engine.scheduler import Chunk, Scheduler, pages_for
from meltcore.engine.state_pool import StatePool

END_ID = 1


def next_token(context: list[int]) -> int:
    """What the fake model answers: any fixed function of the whole context; now and then the end id."""
    value = hash(tuple(context)) % 50
    return END_ID if value < 2 else value + 2


def expected_output(prompt: list[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    context = list(prompt)
    while True:
        context.append(next_token(context))
        produced = len(context) - len(prompt)
        stops = context[-1] == END_ID and not sampling.ignore_eos
        if stops or produced >= sampling.max_tokens or len(context) >= max_model_len:
            return context[len(prompt) :]


class FakeDevice:
    """Executes plans in order, tokens still unread included, over pages that remember what was written.

    A place in a page holds its token and a digest of everything before it, as a key and a value depend on the whole
    context: a page with the right tokens after the wrong beginning is wrong. A state slot holds the digest alone.
    """

    def __init__(self, pages: int, slots: int) -> None:
        self.states: list[int | None] = [None] * (slots + 1)
        self.pages: list[list[tuple[int, int] | None]] = [[None] * PAGE_SIZE for _ in range(pages + 1)]
        self.last_token: dict[int, int] = {}

    def run(self, plan: list[Chunk]) -> list[Sampled]:
        written: set[tuple[int, int]] = set()
        for chunk in plan:
            if chunk.restore:
                self.states[chunk.request.state_slot] = self.states[chunk.restore]
        for chunk in plan:
            self._write(chunk, written)
            if chunk.request.state_slot:
                self._advance(chunk)
        for chunk in plan:
            if chunk.snapshot:
                self.states[chunk.snapshot] = self.states[chunk.request.state_slot]
        sampled = []
        for chunk in plan:
            if chunk.samples:
                token = next_token(self._read_context(chunk.request, chunk.start + chunk.size))
                self.last_token[chunk.request.row] = token
                sampled.append(Sampled(token))
        return sampled

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        request = chunk.request
        for position in range(chunk.start, chunk.start + chunk.size):
            known = position < len(request.token_ids)
            token = request.token_ids[position] if known else self.last_token[request.row]
            page, offset = request.pages[position // PAGE_SIZE], position % PAGE_SIZE
            assert (page, offset) not in written, "two sequences write the same slot in one step"
            written.add((page, offset))
            self.pages[page][offset] = (token, hash((self._digest(request, position - 1), token)))

    def _advance(self, chunk: Chunk) -> None:
        """The state of a sequence at position 0 begins from nothing, whatever its slot holds."""
        slot = chunk.request.state_slot
        if chunk.start:
            assert self.states[slot] == self._digest(chunk.request, chunk.start - 1), "the state of another beginning"
        self.states[slot] = self._digest(chunk.request, chunk.end - 1)

    def _digest(self, request: Request, position: int) -> int:
        if position < 0:
            return 0
        slot = self.pages[request.pages[position // PAGE_SIZE]][position % PAGE_SIZE]
        assert slot is not None, "attended to a slot that was never written"
        return slot[1]

    def _read_context(self, request: Request, length: int) -> list[int]:
        context: list[int] = []
        digest = 0
        for position in range(length):
            slot = self.pages[request.pages[position // PAGE_SIZE]][position % PAGE_SIZE]
            assert slot is not None, "attended to a slot that was never written"
            digest = hash((digest, slot[0]))
            assert slot[1] == digest, "attended to a page of another beginning"
            context.append(slot[0])
        return context


class World:
    """A scheduler on a fake device, driven one step ahead or not, with every invariant checked after every step."""

    def __init__(
        self,
        *,
        pages: int,
        slots: int,
        max_model_len: int,
        seqs: int,
        penalty_slots: int,
        budget: int,
        overlap: bool,
        cache: bool,
    ) -> None:
        self.pool = PagePool(pages)
        self.states = StatePool(slots) if slots else None
        self.cache = PrefixCache(self.pool) if cache else None
        self.max_model_len = max_model_len
        self.penalty_slots = penalty_slots
        self.overlap = overlap
        self.device = FakeDevice(pages, slots)
        self.scheduler = Scheduler(
            self.pool,
            self.cache,
            self.states,
            max_num_seqs=seqs,
            penalty_slots=penalty_slots,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        self.restored = self.lost_with_page = self.lost_to_room = 0  # snapshots
        self.passed = 0  # starts of a sequence before one of a lower rank, which waited for a slot for its counts
        self._snapshots: set[bytes] = set()
        self.launched: tuple[list[Chunk], list[Sampled]] | None = None
        self.requests: list[Request] = []
        self.steps = 0

    def add(self, prompt: list[int], sampling: SamplingParams, priority: int) -> None:
        order = len(self.requests)
        stop_ids = frozenset() if sampling.ignore_eos else frozenset({END_ID})
        request = Request(AddRequest(str(order), prompt, sampling, priority), order, stop_ids, None)
        self.requests.append(request)
        self.scheduler.add(request)

    def abort(self, index: int) -> None:
        self.scheduler.finish(self.requests[index], "abort")

    def step(self) -> None:
        before = {request.id for request in self.scheduler.running}
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        self.check_order([request for request in self.scheduler.running if request.id not in before])
        launched = (plan, self.device.run(plan)) if plan else None
        to_read = self.launched if self.overlap else launched
        self.launched = launched if self.overlap else None
        if to_read is not None:
            self.scheduler.update(*to_read)
            if self.scheduler.pacer is not None:
                self.scheduler.note_time(to_read[0], 1 + sum(chunk.size for chunk in to_read[0]) / 20)
        self.check()
        self.steps += 1

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or self.launched is not None

    def check_plan(self, plan: list[Chunk]) -> None:
        assert sum(chunk.size for chunk in plan) <= self.scheduler.max_num_batched_tokens
        assert len({chunk.request.id for chunk in plan}) == len(plan), "a sequence is in the plan twice"
        assert len({chunk.request.row for chunk in plan}) == len(plan), "two sequences share a row"
        for chunk in plan:
            assert chunk.request.state is State.RUNNING
            assert chunk.size > 0
            assert len(chunk.request.pages) >= pages_for(chunk.start + chunk.size)
        if self.states is not None:
            self.check_slots(plan)
        if self.scheduler.has_work and self.launched is None:
            assert plan, "there is work, nothing is under way, and nothing was scheduled"

    def check_order(self, started: list[Request]) -> None:
        """Who starts passes only those that wait for a slot for their counts, while none is free."""
        waiting = [request for request in self.requests if request.state is State.WAITING]
        for request in started:
            passed = [other for other in waiting if other.rank < request.rank]
            assert not any(other.penalised and request.penalised for other in passed)
            assert all(other.penalised for other in passed)
            self.passed += len(passed)
            if passed:
                assert len(self.penalised_running()) == self.penalty_slots, "passed, though a slot is free"

    def penalised_running(self) -> list[Request]:
        return [request for request in self.scheduler.running if request.penalised]

    def check_slots(self, plan: list[Chunk]) -> None:
        own = [request.state_slot for request in self.scheduler.running]
        targets = [chunk.snapshot for chunk in plan if chunk.snapshot]
        assert 0 not in own, "a sequence runs on the null slot"
        assert len({*own, *targets}) == len(own) + len(targets), "two states share a slot"
        for chunk in plan:
            self.restored += chunk.restore > 0
            assert chunk.restore == 0 or chunk.start > 0
            assert chunk.snapshot == 0 or chunk.end % PAGE_SIZE == 0

    def check_states(self) -> None:
        """A sequence has a slot while it runs, a step under way one for each snapshot, and nothing else has one. A
        snapshot is the state after the very page that it is found by."""
        assert self.states is not None
        self.states.check()
        for request in self.requests:
            assert (request.state_slot > 0) == (request.state is State.RUNNING)
        under_way = self.launched[0] if self.launched else []
        held = len(self.scheduler.running) + sum(chunk.snapshot > 0 for chunk in under_way)
        assert self.states.used == held, "slots are held that no sequence has"
        snapshots = self.scheduler.snapshots
        if snapshots is not None:
            snapshots.check()
            assert self.cache is not None
            lost = self._snapshots - snapshots._slot_of.keys()
            self.lost_to_room += sum(self.cache.knows(key) for key in lost)
            self.lost_with_page += sum(not self.cache.knows(key) for key in lost)
            self._snapshots = set(snapshots._slot_of)
            for key, slot in snapshots._slot_of.items():
                last = self.device.pages[self.cache._page_of[key]][-1]
                assert last is not None
                assert self.device.states[slot] == last[1], "a snapshot of another beginning"

    def check(self) -> None:
        self.pool.check()
        if self.states is not None:
            self.check_states()
        if self.cache is not None:
            self.cache.check()
        holders: dict[int, int] = {}
        for order, request in enumerate(self.requests):
            assert request.rank[1] == order, "a sequence lost its place"
            assert (request.row > 0) == (request.state is State.RUNNING)
            assert bool(request.pages) <= (request.state is State.RUNNING)
            assert (request.penalty_slot >= 0) == (request.penalised and request.state is State.RUNNING)
            assert request.computed <= request.length
            for page in request.pages:
                holders[page] = holders.get(page, 0) + 1
        assert self.pool.used == len(holders), "pages are held that no sequence has"
        penalty_slots = {request.penalty_slot for request in self.penalised_running()}
        assert len(penalty_slots) == len(self.penalised_running()), "two sequences share a slot for their counts"
        assert penalty_slots <= set(range(self.penalty_slots)), "more slots than planned"
        ranks = [request.rank for request in self.scheduler.running]
        assert ranks == sorted(ranks)

    def check_text(self) -> None:
        for request in self.requests:
            expected = expected_output(request.token_ids[: request.prompt_length], request.sampling, self.max_model_len)
            if request.finish_reason == "abort":
                assert expected[: len(request.output_ids)] == request.output_ids
            else:
                assert request.finish_reason in ("stop", "length")
                assert request.output_ids == expected


def draw_prompt(choice: random.Random, limit: int) -> list[int]:
    """Pages chosen from a set of two, cut anywhere, so that beginnings are shared, the same page follows unlike ones,
    and a prompt often ends where a page does."""
    length = choice.randint(1, choice.choice([30, limit]))
    if length > PAGE_SIZE and choice.random() < 0.5:
        length -= length % PAGE_SIZE
    pages = [choice.choice([5, 6]) for _ in range(pages_for(length))]
    return [(page + offset) % 40 + 2 for page in pages for offset in range(PAGE_SIZE)][:length]


def drive(choice: random.Random, steps: int, *, recurrent: bool, penalised: bool) -> World:
    """One random history: adds, aborts and steps over tiny pools, then run to the end."""
    max_model_len = choice.choice([40, 150, 400, 400, 400])
    seqs = choice.choice([1, 5, 8, 8])
    world = World(
        pages=pages_for(max_model_len) + choice.choice([0, 10, 20, 30] if recurrent else [0, 1, 2, 4]),
        slots=seqs + choice.choice([0, 1, 2, 4]) if recurrent else 0,
        max_model_len=max_model_len,
        seqs=seqs,
        penalty_slots=choice.randint(1, min(3, seqs)) if penalised else 1,
        budget=choice.choice([1, 12, 64, 64, 300, 300]),
        overlap=choice.random() < 0.5,
        cache=choice.random() < 0.8,
    )
    for _ in range(steps):
        if choice.random() < 0.4:
            lengths = [1, 5, 20, 200] if recurrent else [1, 20, 200, 400]  # more beginnings, more snapshots
            sampling = SamplingParams(
                max_tokens=choice.choice(lengths),
                ignore_eos=choice.random() < 0.9,
                presence_penalty=float(penalised and choice.random() < 0.4),  # the fake model knows none
            )
            world.add(draw_prompt(choice, max_model_len - 1), sampling, priority=choice.choice([0, 0, 0, 1, -1]))
        if world.requests and choice.random() < 0.1:
            world.abort(choice.randrange(len(world.requests)))
        world.step()
    # Whoever is next in rank advances at least one token every other step (one ahead: one to launch, one to read),
    # and is recomputed at most once for each sequence ranked before it.
    tokens = sum(request.prompt_length + request.sampling.max_tokens for request in world.requests)
    limit = world.steps + 4 * (len(world.requests) + 1) * (tokens + 10)
    while world.busy:
        world.step()
        assert world.steps < limit, "a sequence starves"
    world.check_text()
    assert world.pool.used == 0
    return world


@settings(
    max_examples=60,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
@given(choice=st.randoms(use_true_random=False), recurrent=st.booleans(), penalised=st.booleans())
def test_random_histories_keep_every_invariant_and_every_text(
    choice: random.Random, recurrent: bool, penalised: bool
) -> None:
    """Hypothesis makes every choice of the history, so that a failing one shrinks to a short one."""
    drive(choice, steps=30, recurrent=recurrent, penalised=penalised)


def histories(steps: int, *, recurrent: bool = False, penalised: bool = False) -> Iterator[World]:
    seed = 0
    while steps > 0:
        world = drive(random.Random(seed), steps=100, recurrent=recurrent, penalised=penalised)
        steps -= world.steps
        seed += 1
        yield world


def test_forty_thousand_steps_preempt_and_hit_the_prefix_cache() -> None:
    preemptions = hits = 0
    for world in histories(40_000):
        preemptions += world.scheduler.preemptions
        hits += world.scheduler.prefix_hit_tokens
    assert preemptions > 100, "the histories must reach the corner that they are for"
    assert hits > 10_000


def test_forty_thousand_steps_with_recurrent_states_restore_and_evict_snapshots() -> None:
    preemptions = restored = lost_with_page = lost_to_room = 0
    for world in histories(40_000, recurrent=True):
        preemptions += world.scheduler.preemptions
        restored += world.restored
        lost_with_page += world.lost_with_page
        lost_to_room += world.lost_to_room
    assert min(preemptions, restored, lost_with_page, lost_to_room) > 50


def test_twenty_thousand_steps_with_few_slots_for_penalties_preempt_and_pass() -> None:
    """`World.check_order` says who may pass whom, and `drive` that nobody starves."""
    preemptions = passed = 0
    for world in histories(20_000, penalised=True):
        preemptions += world.scheduler.preemptions
        passed += world.passed
    assert min(preemptions, passed) > 50
