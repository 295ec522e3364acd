"""Which snapshots of recurrent states stay: those that are of use, while they are."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.engine.messages import AddRequest
from meltcore.engine.page_pool import PAGE_SIZE, PagePool
from meltcore.engine.prefix_cache import PrefixCache
from meltcore.engine.request import Request, Sampled
from meltcore.engine.sampling_params import SamplingParams
from meltcore.engine.scheduler import Finished, Scheduler
from meltcore.engine.state_pool import StatePool

OPERATIONS = ["take", "room", "keep", "touch", "outgrow", "drop"]


def pool_of(snapshots: int) -> StatePool:
    """One in which every slot is a snapshot, made in the order of their numbers."""
    pool = StatePool(snapshots)
    for slot in [pool.take() for _ in range(snapshots)]:
        pool.keep(slot)
    return pool


def add_one(pool: StatePool) -> int | None:
    """A new snapshot, the slot of it; None where there is no room for one."""
    if not pool.make_room(0):
        return None
    slot = pool.take()
    pool.keep(slot)
    pool.check()
    return slot


def test_a_snapshot_that_was_of_use_outlasts_newer_ones_that_were_not() -> None:
    pool = pool_of(4)
    pool.touch(1)
    assert [add_one(pool) for _ in range(5)] == [2, 3, 4, 2, 3]
    assert [pool.take() for _ in range(4)] == [4, 2, 3, 1]


def test_where_all_are_of_use_the_oldest_gives_way() -> None:
    pool = pool_of(4)
    for slot in (1, 2, 3, 4, 1):
        pool.touch(slot)
    assert add_one(pool) == 2
    assert [pool.take() for _ in range(4)] == [2, 3, 4, 1]


def test_a_quarter_is_left_to_new_ones_snapshots_under_way_counted_in() -> None:
    pool = pool_of(8)
    for slot in range(1, 9):
        pool.touch(slot)
    under_way = 0
    while pool.make_room(under_way):
        pool.take()
        under_way += 1
    assert under_way == 2
    pool.check()


@pytest.mark.parametrize("snapshots", [1, 2, 4, 8])
def test_one_of_use_long_ago_does_not_stay_for_ever(snapshots: int) -> None:
    pool = pool_of(snapshots)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for slot in range(1, snapshots + 1):
        pool.touch(slot)
    for _ in range(4 * snapshots):
        add_one(pool)
    assert set(evicted) == set(range(1, snapshots + 1))


def test_what_one_conversation_went_past_is_as_new_ones_are() -> None:
    pool = pool_of(3)
    for slot in (1, 2, 2):
        pool.touch(slot)
    pool.outgrow(1)
    pool.outgrow(2)  # of which a second sequence begins
    pool.outgrow(3)  # taken anew since: nobody went on from this one
    assert [pool.take() for _ in range(3)] == [3, 1, 2]


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0))))
def test_the_books_balance_whatever_happens(slots: int, history: list[tuple[str, int]]) -> None:
    pool, held = StatePool(slots), list[int]()
    pool.on_evict = lambda slot: None
    for what, which in history:
        snapshots = sorted(pool.snapshots)
        if what == "take" and pool.available:
            held.append(pool.take())
        elif what == "room" and pool.make_room(len(held)):
            before = len(pool.snapshots)
            held.append(pool.take())
            assert len(pool.snapshots) == before, "room was made, and yet a snapshot went"
        elif what == "keep" and held:
            pool.keep(held.pop(which % len(held)))
        elif what in ("touch", "outgrow", "drop") and snapshots:
            getattr(pool, what)(snapshots[which % len(snapshots)])
        pool.check()
        assert pool.used == len(held)
        assert pool.available == slots - len(held)


class Front:
    """Keeps a scheduler busy, without a network: what prompts find does not depend on what is said."""

    def __init__(self, *, snapshots: int, at_once: int) -> None:
        self.at_once = at_once
        self.choice = random.Random(5)
        pages = PagePool(8000)
        self.scheduler = Scheduler(
            pages,
            PrefixCache(pages),
            StatePool(at_once + snapshots),
            max_num_seqs=at_once,
            penalty_slots=1,
            max_num_batched_tokens=2048,
            max_model_len=8192,
        )
        self.requests: list[Request] = []

    def words(self, count: int) -> list[int]:
        return [self.choice.randrange(100_000) for _ in range(count)]

    def add(self, prompt: list[int], tokens: int) -> Request:
        order = len(self.requests)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(AddRequest(str(order), prompt, sampling), order, frozenset(), None)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Finished]:
        plan = self.scheduler.schedule()
        return self.scheduler.update(plan, [Sampled(*self.words(1)) for chunk in plan if chunk.samples])

    def ask_all(self, prompts: list[tuple[list[int], int]]) -> None:
        """Prompts and how many tokens they are answered with; as many at once as can be."""
        running = 0
        for prompt, tokens in prompts:
            self.add(prompt, tokens)
            running += 1
            while running == self.at_once:
                running -= len(self.step())
        while self.scheduler.has_work:
            self.step()


@pytest.mark.parametrize("snapshots", [1, 2, 4, 8])
def test_few_slots_keep_the_beginning_that_all_prompts_share(snapshots: int) -> None:
    """The ends of prompts, that are never gone on from, come eight times as often as there is a slot for them."""
    front = Front(snapshots=snapshots, at_once=8)
    shared = front.words(300)
    front.ask_all([(shared + front.words(100), 6) for _ in range(128)])
    assert front.scheduler.prefix_hit_tokens >= 0.9 * 127 * 256


@pytest.mark.parametrize(("snapshots", "share"), [(1, 0.5), (4, 0.85)])
def test_a_shared_beginning_gives_way_to_the_one_that_comes_after_it(snapshots: int, share: float) -> None:
    front = Front(snapshots=snapshots, at_once=8)
    beginnings = [front.words(300) for _ in range(6)]
    prompts = [(beginning + front.words(100), 6 + turn % 40) for beginning in beginnings for turn in range(64)]
    front.ask_all(prompts)
    hits = Counter[int]()
    for order, request in enumerate(front.requests):
        hits[order // 64] += request.cached_tokens
    assert min(hits.values()) >= share * 63 * 256


def test_earlier_turns_of_conversations_do_not_take_the_room_of_the_newest() -> None:
    """Every turn is gone on from once, by the next one. If that were enough to stay, hits would be 0.54 of what there
    is to find, here 0.72 (2026-11-22)."""
    front = Front(snapshots=28, at_once=4)
    text: list[list[int]] = [[] for _ in range(8)]
    open_turns: dict[str, int] = {}
    ideal = 0
    for _ in range(320):
        one = front.choice.choice([each for each in range(len(text)) if each not in open_turns.values()])
        if len(text[one]) > 1000:
            text[one] = []  # another conversation
        ideal += len(text[one]) // PAGE_SIZE * PAGE_SIZE
        request = front.add(text[one] + front.words(front.choice.randint(20, 150)), front.choice.randint(30, 200))
        open_turns[request.id] = one
        while len(open_turns) == front.at_once:
            for end in front.step():
                text[open_turns.pop(end.request.id)] = end.request.token_ids.tolist()
    assert front.scheduler.prefix_hit_tokens >= 0.65 * ideal
