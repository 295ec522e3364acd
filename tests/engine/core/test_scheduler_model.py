"""A randomized test of scheduler, pool and prefix cache together, against a model of what must hold.

A fake device runs each plan: it writes every token into (page, offset) of each sub-group of layers as the real kernels
would, and "attends" by reading back what each query sees through the pages: the whole context, or a window of it. A
page allocated too early, hit wrongly or lost shows as wrong content.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import (
    FULL_ATTENTION,
    PAGE_SIZE,
    PageGroup,
    PageLayout,
    PagePool,
    PrefixCache,
    pages_for,
)
from meltcore.engine.core.recurrent_states import RecurrentStatePool
from meltcore.engine.core.request import Request, RequestStatus
from meltcore.engine.core.scheduler import Scheduler
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

END_ID = 1


def next_token(context: list[int]) -> int:
    """The fake model's answer: a fixed function of the whole context, sometimes the end id."""
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
    """Executes plans in order, with unread tokens, over pages that record the writes.

    A position in a page holds its token and a digest of everything before it, as a key and a value depend on the whole
    context: a page with the right tokens after the wrong beginning is wrong, and so is one that another sub-group of
    layers wrote. A state slot holds the digest alone.
    """

    def __init__(self, pages: int, slots: int, layout: PageLayout) -> None:
        self.layout = layout
        self.states: list[int | None] = [None] * (slots + 1)
        self.pages: list[list[tuple[int, int] | None]] = [[None] * PAGE_SIZE for _ in range(pages + 1)]
        self.writer = [0] * (pages + 1)  # sub-group
        self.last_token: dict[int, int] = {}
        self._content: dict[str, list[tuple[int, int]]] = {}  # what each position of a sequence must hold

    def run(self, plan: list[Chunk]) -> list[list[int]]:
        written: set[tuple[int, int]] = set()
        for chunk in plan:
            if chunk.restore:
                self.states[chunk.request.recurrent_slot] = self.states[chunk.restore]
        for chunk in plan:
            self._write(chunk, written)
            if chunk.request.recurrent_slot:
                self._advance(chunk)
        for chunk in plan:
            if chunk.snapshot:
                self.states[chunk.snapshot] = self.states[chunk.request.recurrent_slot]
        sampled = []
        for chunk in plan:
            self._attend(chunk)
            if chunk.samples:
                sampled.append(self._accept(chunk))
                self.last_token[chunk.request.row] = sampled[-1][-1]
                if chunk.drafts and chunk.request.recurrent_slot:  # rejected drafts leave no trace in the state
                    accepted = self.content(chunk.request, chunk.start + 1, sampled[-1][:-1])
                    self.states[chunk.request.recurrent_slot] = accepted[-1][1]
        return sampled

    def _accept(self, chunk: Chunk) -> list[int]:
        """The tokens that follow the newest one and the accepted drafts."""
        context = [token for token, _ in self.content(chunk.request, chunk.end - len(chunk.drafts))]
        tokens = [next_token(context)]
        for draft in chunk.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(next_token([*context, *tokens]))
        return tokens

    def content(self, request: Request, length: int, drafts: Sequence[int] = ()) -> list[tuple[int, int]]:
        """The tokens of the first positions and drafts after them, each with the digest of all up to it."""
        content = self._content.setdefault(request.id, [])
        while len(content) < length:
            known = len(content) < len(request.token_ids)
            token = request.token_ids[len(content)] if known else self.last_token[request.row]
            content.append((token, hash((content[-1][1] if content else 0, token))))
        content = content[:length]
        for token in drafts:
            content.append((token, hash((content[-1][1], token))))
        return content

    def _computed(self, chunk: Chunk) -> list[tuple[int, int]]:
        """What the positions up to the end of a chunk hold."""
        return self.content(chunk.request, chunk.end - len(chunk.drafts), chunk.drafts)

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        request, width = chunk.request, self.layout.column_pages
        content = self._computed(chunk)
        for position in range(chunk.start, chunk.end):
            column, offset = divmod(position, PAGE_SIZE)
            for sub_group, page in enumerate(request.pages[column * width : (column + 1) * width]):
                assert page, "a token goes to the null page"
                assert (page, offset) not in written, "two sequences write the same slot in one step"
                written.add((page, offset))
                self.pages[page][offset] = content[position]
                self.writer[page] = sub_group

    def _advance(self, chunk: Chunk) -> None:
        """The state of a sequence at position 0 starts from zeros, whatever its slot holds."""
        slot, content = chunk.request.recurrent_slot, self._computed(chunk)
        if chunk.start:
            assert self.states[slot] == content[chunk.start - 1][1], "the state of another beginning"
        self.states[slot] = content[-1][1]

    def _attend(self, chunk: Chunk) -> None:
        """Read the keys of all queries of a chunk."""
        request, width, expected = chunk.request, self.layout.column_pages, self._computed(chunk)
        for group in self.layout.groups:
            first = 0 if group.window is None else max(0, chunk.start - group.window + 1)
            for sub_group in range(group.first, group.first + group.pages):
                for column in range(first // PAGE_SIZE, pages_for(chunk.end)):
                    page, start = request.pages[column * width + sub_group], column * PAGE_SIZE
                    read = slice(max(first, start), min(chunk.end, start + PAGE_SIZE))
                    content = self.pages[page][read.start - start : read.stop - start]
                    assert page, "attended to the null page"
                    assert None not in content, "attended to a slot that was never written"
                    assert content == expected[read], "attended to a page of another beginning"
                    assert self.writer[page] == sub_group, "attended to a page of other layers"


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
        layout: PageLayout = FULL_ATTENTION,
        drafts: random.Random | None = None,
    ) -> None:
        self.pool = PagePool(pages)
        self.states = RecurrentStatePool(slots) if slots else None
        self.cache = PrefixCache(self.pool, layout) if cache else None
        self.layout = layout
        self.max_model_len = max_model_len
        self.penalty_slots = penalty_slots
        self.overlap = overlap
        self.device = FakeDevice(pages, slots, layout)
        self.scheduler = Scheduler(
            self.pool,
            self.cache,
            self.states,
            layout,
            max_num_seqs=seqs,
            penalty_slots=penalty_slots,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        self.restored = self.lost_with_page = self.lost_to_room = 0  # snapshots
        self.held = 0  # followers, in all steps
        self.passed = 0  # starts of a sequence before one of a lower rank, which waited for a slot for its counts
        self.slid = self.slid_hits = (
            0  # null pages of scheduled sequences, and those at their start from a cached prefix
        )
        self._snapshots: set[bytes] = set()
        self.launched: tuple[list[Chunk], list[list[int]]] | None = None
        self.drafts = drafts  # chooses how many are right, without overlap
        self.num_accepted = self.num_rejected = 0
        self.requests: list[Request] = []
        self._unfinished: list[Request] = []  # when they were last checked
        self.steps = 0

    def add(self, prompt: list[int], sampling: SamplingParams, priority: int, leader: Request | None = None) -> None:
        order = len(self.requests)
        stop_ids = frozenset() if sampling.ignore_eos else frozenset({END_ID})
        request = Request(AddRequest(str(order), prompt, sampling, priority), order, stop_ids, None, leader)
        self.requests.append(request)
        self._unfinished.append(request)
        self.scheduler.add(request)

    def abort(self, index: int) -> None:
        self.scheduler.finish(self.requests[index], "abort")

    def step(self) -> None:
        before = {request.id for request in self.scheduler.running}
        if self.drafts is not None:
            self.propose(self.drafts)
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        started = [request for request in self.scheduler.running if request.id not in before]
        self.check_order(started)
        self.slid_hits += sum(request.pages.count(0) for request in started)
        launched = (plan, self.device.run(plan)) if plan else None
        to_read = self.launched if self.overlap else launched
        self.launched = launched if self.overlap else None
        if to_read is not None:
            for chunk, tokens in zip([chunk for chunk in plan if chunk.samples], to_read[1], strict=not self.overlap):
                self.num_accepted += len(tokens) - 1
                self.num_rejected += len(chunk.drafts) - len(tokens) + 1
            self.scheduler.update(*to_read)
            if self.scheduler.pacer is not None:
                self.scheduler.record_step_time(to_read[0], 1 + sum(chunk.size for chunk in to_read[0]) / 20)
        self.check()
        self.steps += 1

    def propose(self, choice: random.Random) -> None:
        """Draft what the running sequences say next, up to a wrong token, or nothing."""
        self.scheduler.max_drafts = choice.choice([0, 1, 3, 7])
        for request in self.scheduler.running:
            context, drafts = list(request.token_ids), []
            for _ in range(choice.choice([0, 2, 7])):
                drafts.append(next_token([*context, *drafts]))
            if drafts and choice.random() < 0.7:
                drafts[choice.randrange(len(drafts))] += 1
            request.drafts, request.num_in_history = tuple(drafts), len(context)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or self.launched is not None

    def check_plan(self, plan: list[Chunk]) -> None:
        assert sum(chunk.size for chunk in plan) <= self.scheduler.max_num_batched_tokens
        assert len({chunk.request.id for chunk in plan}) == len(plan), "a sequence is in the plan twice"
        assert len({chunk.request.row for chunk in plan}) == len(plan), "two sequences share a row"
        for chunk in plan:
            assert chunk.request.status is RequestStatus.RUNNING
            assert chunk.size > 0
            self.check_pages(chunk)
        if self.states is not None:
            self.check_slots(plan)
        if self.scheduler.has_work and self.launched is None:
            assert plan, "there is work, nothing is under way, and nothing was scheduled"

    def check_pages(self, chunk: Chunk) -> None:
        """A sequence holds pages for its tokens, in sliding groups only those that a query from this step on reads."""
        pages, width = chunk.request.pages, self.layout.column_pages
        assert len(pages) % width == 0
        assert len(pages) >= width * pages_for(chunk.end)
        for group in self.layout.groups:
            first = 0 if group.window is None else max(0, chunk.start - group.window + 1) // PAGE_SIZE
            for sub_group in range(group.first, group.first + group.pages):
                held = [page > 0 for page in pages[sub_group::width]]
                assert held == [column >= first for column in range(len(held))]
                self.slid += first
        held_pages = sum(page > 0 for page in pages)
        most_drafts = 7 * (self.drafts is not None)  # pages for rejected drafts are kept for the next tokens
        longest = min(chunk.request.length + most_drafts, self.max_model_len)
        assert held_pages <= self.layout.max_pages(longest, self.scheduler.max_num_batched_tokens)

    def check_order(self, started: list[Request]) -> None:
        """A starting request overtakes only those that wait for a penalty slot, while none is free, or for a leader."""
        held = {request.id for followers in self.scheduler._followers.values() for request in followers}
        self.held += len(held)
        waiting = [request for request in self._unfinished if request.status is RequestStatus.WAITING]
        waiting = [request for request in waiting if request.id not in held]
        for request in started:
            passed = [other for other in waiting if other.priority < request.priority]
            assert not any(other.has_penalties and request.has_penalties for other in passed)
            assert all(other.has_penalties for other in passed)
            self.passed += len(passed)
            if passed:
                assert len(self.penalised_running()) == self.penalty_slots, "passed, though a slot is free"

    def penalised_running(self) -> list[Request]:
        return [request for request in self.scheduler.running if request.has_penalties]

    def check_slots(self, plan: list[Chunk]) -> None:
        own = [request.recurrent_slot for request in self.scheduler.running]
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
        for request in self._unfinished:
            assert (request.recurrent_slot > 0) == (request.status is RequestStatus.RUNNING)
        under_way = self.launched[0] if self.launched else []
        held = len(self.scheduler.running) + sum(chunk.snapshot > 0 for chunk in under_way)
        assert self.states.num_used == held, "slots are held that no sequence has"
        snapshots = self.scheduler.snapshots
        if snapshots is not None:
            snapshots.check()
            assert self.cache is not None
            lost = self._snapshots - snapshots._slot_by_hash.keys()
            self.lost_to_room += sum(self.cache.is_known(key) for key in lost)
            self.lost_with_page += sum(not self.cache.is_known(key) for key in lost)
            self._snapshots = set(snapshots._slot_by_hash)
            for key, slot in snapshots._slot_by_hash.items():
                last = self.device.pages[self.cache._page_sets[0][key][0]][-1]
                assert last is not None
                assert self.device.states[slot] == last[1], "a snapshot of another beginning"

    def check(self) -> None:
        self.pool.check()
        if self.states is not None:
            self.check_states()
        if self.cache is not None:
            self.cache.check()
        holders: dict[int, int] = {}
        for request in self._unfinished:
            assert request.priority[1] == int(request.id), "a sequence lost its priority"
            assert (request.row > 0) == (request.status is RequestStatus.RUNNING)
            assert bool(request.pages) <= (request.status is RequestStatus.RUNNING)
            assert (request.penalty_slot >= 0) == (request.has_penalties and request.status is RequestStatus.RUNNING)
            assert request.num_computed_tokens <= request.length
            for page in filter(None, request.pages):
                holders[page] = holders.get(page, 0) + 1
        self._unfinished = [request for request in self._unfinished if request.finish_reason is None]
        assert self.pool.num_used == len(holders), "pages are held that no sequence has"
        penalty_slots = {request.penalty_slot for request in self.penalised_running()}
        assert len(penalty_slots) == len(self.penalised_running()), "two sequences share a slot for their counts"
        assert penalty_slots <= set(range(self.penalty_slots)), "more slots than planned"
        ranks = [request.priority for request in self.scheduler.running]
        assert ranks == sorted(ranks)

    def check_text(self) -> None:
        for request in self.requests:
            expected = expected_output(request.token_ids[: request.prompt_length], request.sampling, self.max_model_len)
            if request.finish_reason == "abort":
                assert expected[: len(request.output_ids)] == request.output_ids
            else:
                assert request.finish_reason in ("stop", "length")
                assert request.output_ids == expected


def draw_prompt(choice: random.Random, limit: int, contents: tuple[int, ...] = (5, 6)) -> list[int]:
    """Pages chosen from a set of two, cut anywhere, so that prefixes are shared, the same page follows different ones,
    and a prompt often ends where a page does."""
    length = choice.randint(1, choice.choice([30, limit]))
    if length > PAGE_SIZE and choice.random() < 0.5:
        length -= length % PAGE_SIZE
    pages = [choice.choice(contents) for _ in range(pages_for(length))]
    return [(page + offset) % 40 + 2 for page in pages for offset in range(PAGE_SIZE)][:length]


def draw_layout(choice: random.Random) -> PageLayout:
    """Up to three cache groups, at least one of them sliding."""
    windows = choice.choice([[None, 96], [None, 64], [None, 1], [None, 2], [96], [None, 65, 1], [1, 130], [None, 1000]])
    sizes = [choice.choice([1, 1, 2, 3]) for _ in windows]
    return PageLayout(tuple(PageGroup(sum(sizes[:i]), sizes[i], window) for i, window in enumerate(windows)))


def drive(
    choice: random.Random,
    steps: int,
    *,
    recurrent: bool = False,
    penalised: bool = False,
    mixed: bool = False,
    several_answers: bool = False,
    speculating: bool = False,
) -> World:
    """One random history: adds, aborts and steps over tiny pools, then run to the end."""
    max_model_len = choice.choice([40, 400, 600, 600] if mixed else [40, 150, 400, 400, 400])
    seqs = choice.choice([1, 5, 8, 8])
    extra = choice.choice([0, 10, 20, 30] if recurrent else [0, 4, 10] if mixed else [0, 1, 2, 4])
    budget = choice.choice([1, 12, 64, 64, 300, 300] if not mixed else [1, 12, 40, 64, 300, 300, 300, 300])
    layout = draw_layout(choice) if mixed else FULL_ATTENTION
    world = World(
        layout=layout,
        pages=layout.max_pages(max_model_len, budget) + extra * layout.column_pages,
        slots=seqs + choice.choice([0, 1, 2, 4]) if recurrent else 0,
        max_model_len=max_model_len,
        seqs=seqs,
        penalty_slots=choice.randint(1, min(3, seqs)) if penalised else 1,
        budget=budget,
        overlap=choice.random() < 0.5 and not speculating,
        cache=choice.random() < 0.8,
        drafts=choice if speculating else None,
    )
    for _ in range(steps):
        if choice.random() < 0.4:
            lengths = [1, 5, 20, 200] if recurrent or mixed else [1, 20, 200, 400]  # more beginnings, more snapshots
            sampling = SamplingParams(
                max_tokens=choice.choice(lengths),
                ignore_eos=choice.random() < 0.9,
                presence_penalty=float(penalised and choice.random() < 0.4),  # the fake model knows none
            )
            prompt = draw_prompt(choice, max_model_len - 1, (5, 5, 5, 6) if mixed else (5, 6))
            world.add(prompt, sampling, priority=choice.choice([0, 0, 0, 1, -1]))
            leader = world.requests[-1]
            for _ in range(choice.choice([0, 0, 1, 4]) if several_answers else 0):
                world.add(prompt, sampling, leader.priority[0], leader)
        if world.requests and choice.random() < 0.1:
            world.abort(choice.randrange(len(world.requests)))
        world.step()
    # The next request in priority advances at least one token every other step (one ahead: one to launch, one to read),
    # and is recomputed at most once for each sequence ranked before it.
    tokens = sum(request.prompt_length + request.sampling.max_tokens for request in world.requests)
    limit = world.steps + 4 * (len(world.requests) + 1) * (tokens + 10)
    while world.busy:
        world.step()
        assert world.steps < limit, "a sequence starves"
    world.check_text()
    assert world.pool.num_used == 0
    return world


@pytest.mark.slow
@settings(
    max_examples=40,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
@given(
    choice=st.randoms(use_true_random=False),
    kinds=st.fixed_dictionaries(
        {name: st.booleans() for name in ("recurrent", "penalised", "mixed", "several_answers", "speculating")}
    ),
)
def test_random_histories_keep_all_invariants_and_texts(choice: random.Random, kinds: dict[str, bool]) -> None:
    """Hypothesis draws every step of the history, so that a failing history shrinks to a short one."""
    drive(choice, steps=30, **kinds)


def histories(steps: int, **kinds: bool) -> Iterator[World]:
    seed = 0
    while steps > 0:
        world = drive(random.Random(seed), steps=100, **kinds)
        steps -= world.steps
        seed += 1
        yield world


@pytest.mark.slow
def test_long_histories_preempt_and_hit_the_prefix_cache() -> None:
    preemptions = hits = 0
    for world in histories(12_000):
        preemptions += world.scheduler.preemptions
        hits += world.scheduler.prefix_hit_tokens
    assert preemptions > 50, "the histories must reach the corner that they are for"
    assert hits > 3_000


@pytest.mark.slow
def test_long_histories_of_mixed_groups_slide_preempt_and_hit_the_prefix_cache() -> None:
    preemptions = slid = slid_hits = 0
    for world in histories(20_000, mixed=True):
        preemptions += world.scheduler.preemptions
        slid += world.slid
        slid_hits += world.slid_hits
    assert preemptions > 20
    assert slid_hits > 50
    assert slid > 10_000


@pytest.mark.slow
def test_long_histories_of_mixed_groups_with_recurrent_layers_restore_snapshots() -> None:
    restored = slid_hits = 0
    for world in histories(15_000, mixed=True, recurrent=True):
        restored += world.restored
        slid_hits += world.slid_hits
    assert min(restored, slid_hits) > 5


@pytest.mark.slow
def test_long_histories_accept_and_reject_drafts() -> None:
    accepted = rejected = preemptions = restored = 0
    for mixed in (False, True):
        for world in histories(2_000, mixed=mixed, recurrent=mixed, penalised=True, speculating=True):
            accepted += world.num_accepted
            rejected += world.num_rejected
            preemptions += world.scheduler.preemptions
            restored += world.restored
    assert min(accepted, rejected) > 300
    assert min(preemptions, restored) > 2


@pytest.mark.slow
def test_keeping_rejected_drafts_breaks_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected_drafts_are_kept(monkeypatch)
    with pytest.raises(AssertionError):
        for _ in histories(2_000, speculating=True):
            pass


def rejected_drafts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed for rejected drafts counts as computed."""
    whole = Scheduler.update

    def kept(self: Scheduler, scheduled: list[Chunk], sampled: list[list[int]]) -> None:
        whole(self, [chunk._replace(drafts=()) for chunk in scheduled], sampled)

    monkeypatch.setattr(Scheduler, "update", kept)


def freed_one_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are released by the position after the step that is being scheduled."""
    whole = Scheduler.allocate_pages

    def early(self: Scheduler, request: Request, tokens: int) -> bool:
        computed, request.num_computed_tokens = request.num_computed_tokens, tokens
        try:
            return whole(self, request, tokens)
        finally:
            request.num_computed_tokens = computed

    monkeypatch.setattr(Scheduler, "allocate_pages", early)


def window_off_by_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PageGroup.first_column
    monkeypatch.setattr(PageGroup, "first_column", lambda self, tokens: whole(self, tokens + PAGE_SIZE))


def window_off_by_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PageGroup.first_column
    monkeypatch.setattr(PageGroup, "first_column", lambda self, tokens: whole(self, tokens + 1))


def hit_without_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is a hit when full attention has it: its last page set of a sliding group may be anything."""

    def hits(self: PrefixCache, request: Request) -> range:
        hashes = self.page_hashes(request, (len(request.token_ids) - 1) // PAGE_SIZE)
        known = next(
            (count for count, page_hash in enumerate(hashes) if page_hash not in self._page_sets[0]), len(hashes)
        )
        return range(1, known + 1)

    monkeypatch.setattr(PrefixCache, "hits", hits)


def evicted_page_set_half_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "unregister", lambda self, page: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        freed_one_step_early,
        window_off_by_one_column,
        window_off_by_one_token,
        hit_without_its_window,
        evicted_page_set_half_kept,
    ],
)
def test_mutation_of_sliding_groups_breaks_a_history(
    monkeypatch: pytest.MonkeyPatch, mutation: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The device must notice by itself, whatever `check_pages` knows of the layout."""
    mutation(monkeypatch)
    monkeypatch.setattr(World, "check_pages", lambda self, chunk: None)
    with pytest.raises((AssertionError, KeyError)):
        for _ in histories(20_000, mixed=True):
            pass


@pytest.mark.slow
def test_long_histories_restore_and_evict_snapshots() -> None:
    preemptions = restored = lost_with_page = lost_to_room = 0
    for world in histories(8_000, recurrent=True):
        preemptions += world.scheduler.preemptions
        restored += world.restored
        lost_with_page += world.lost_with_page
        lost_to_room += world.lost_to_room
    assert min(preemptions, restored, lost_with_page, lost_to_room) > 12


@pytest.mark.slow
def test_long_histories_with_few_penalty_slots_preempt_and_overtake() -> None:
    """`World.check_order` checks the order of requests, and `drive` that none starves."""
    preemptions = passed = 0
    for world in histories(12_000, penalised=True):
        preemptions += world.scheduler.preemptions
        passed += world.passed
    assert min(preemptions, passed) > 50


@pytest.mark.slow
def test_long_histories_of_several_answers_preempt_and_share_prompts() -> None:
    held = preemptions = hits = 0
    for kinds in ({}, {"mixed": True, "recurrent": True}):
        for world in histories(4_000, several_answers=True, **kinds):
            held += world.held
            preemptions += world.scheduler.preemptions
            hits += world.scheduler.prefix_hit_tokens
    assert min(held, preemptions) > 50
    assert hits > 10_000
