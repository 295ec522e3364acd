"""Pages of cache groups: how many a sequence holds, which prefixes are hits, and what a plan counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.common.errors import ConfigError
from meltcore.engine.core.batch import take_new_pages
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import (
    PAGE_SIZE,
    PageGroup,
    PageLayout,
    PagePool,
    PrefixCache,
    pages_for,
)
from meltcore.engine.core.request import Request
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.memory.memory_plan import MemoryPlan, ModelShape, plan_memory
from meltcore.models.decoders.kv_cache_specs import FullAttentionSpec, SlidingWindowSpec, group_layers
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

# Gemma-3-27B: every sixth of 62 layers is global.
GEMMA = group_layers(
    [FullAttentionSpec(16, 128) if layer % 6 == 5 else SlidingWindowSpec(16, 128, 1024) for layer in range(62)]
)
LAYER_BYTES = 2 * 16 * 128 * 2  # of one token in bf16
MIXED = PageLayout((PageGroup(0, 1, None), PageGroup(1, 2, 96), PageGroup(3, 1, 1)))


def request_of(tokens: list[int], order: int = 0, max_tokens: int = 10_000) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(AddRequest(str(order), tokens, sampling), order, frozenset(), None)


def scheduler_of(layout: PageLayout, pages: int, *, cache: bool = False, **limits: int) -> Scheduler:
    pool = PagePool(pages)
    settings = {"max_num_seqs": 4, "penalty_slots": 1, "max_num_batched_tokens": 2048, "max_model_len": 8192} | limits
    return Scheduler(pool, PrefixCache(pool, layout) if cache else None, None, layout, **settings)


def run_step(scheduler: Scheduler) -> list[Chunk]:
    plan = scheduler.schedule()
    scheduler.update(plan, [[7]] * sum(chunk.samples for chunk in plan))
    return plan


# --- memory of a sequence ---


@pytest.mark.parametrize("cache", [False, True])
def test_gemma_keeps_508_kb_per_token_in_the_window_and_82_kb_beyond(cache: bool) -> None:
    """At rest to within one page per group; while the prompt is prefilled, the window and a chunk."""
    layout, page_bytes = PageLayout.of(GEMMA), GEMMA.page_bytes(PAGE_SIZE, 2)
    assert (layout.column_pages, page_bytes) == (31, 2 * PAGE_SIZE * LAYER_BYTES)
    scheduler = scheduler_of(layout, layout.max_pages(8192, 2048), cache=cache)
    scheduler.add(request_of([5] * 300, max_tokens=2500))
    while scheduler.has_work:
        for chunk in scheduler.schedule():
            held = scheduler.pool.num_used * page_bytes
            expected = LAYER_BYTES * (10 * chunk.end + 52 * min(chunk.end, 1024))
            assert 0 <= held - expected <= PAGE_SIZE * LAYER_BYTES * 62
            scheduler.update([chunk], [[7]])
    assert LAYER_BYTES * 62 == 507_904
    assert LAYER_BYTES * 10 == 81_920
    assert scheduler.pool.num_used == 0


def test_prompt_in_chunks_keeps_its_window_and_one_chunk() -> None:
    layout = PageLayout.of(GEMMA)
    scheduler = scheduler_of(layout, layout.max_pages(8192, 512), max_num_batched_tokens=512)
    scheduler.add(request_of([5] * 8000))
    for _ in range(16):
        (chunk,) = scheduler.schedule()
        columns = chunk.end // PAGE_SIZE - max(0, chunk.start - 1023) // PAGE_SIZE
        assert scheduler.pool.num_used == 5 * pages_for(chunk.end) + 26 * (columns + (chunk.end % PAGE_SIZE > 0))
        scheduler.update([chunk], [[7]] * chunk.samples)
    run_step(scheduler)
    assert scheduler.pool.num_used == 5 * 126 + 26 * 17, "the chunk's pages are released with the first decode step"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 96, 128])
def test_decoding_sequence_holds_only_the_pages_of_its_window(window: int, overlap: bool) -> None:
    layout = PageLayout((PageGroup(0, 3, window),))
    scheduler = scheduler_of(layout, layout.max_pages(8192, 2048))
    scheduler.add(request_of([5] * 10, max_tokens=500))
    held, launched = set(), None
    while scheduler.has_work:
        plan = scheduler.schedule()
        for chunk in plan:
            first = max(0, chunk.start - window + 1) // PAGE_SIZE
            assert scheduler.pool.num_used == 3 * (pages_for(chunk.end) - first)
            held.add(scheduler.pool.num_used // 3)
        if (done := launched if overlap else plan) is not None:
            scheduler.update(done, [[7]] * sum(chunk.samples for chunk in done))
        launched = plan
    assert max(held) == pages_for(window - 1) + 1


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 900), st.randoms(use_true_random=False))
def test_most_columns_bound_every_way_to_cut_a_sequence(
    window: int, most: int, tokens: int, choice: random.Random
) -> None:
    """With a prefix-cache hit, too: `missing_pages` bounds what is allocated beyond it."""
    group = PageGroup(0, 1, window)
    hit = choice.randint(0, (tokens - 1) // PAGE_SIZE)
    start, held = hit * PAGE_SIZE, 0
    found = hit - max(0, start - window + 1) // PAGE_SIZE
    while start < tokens:
        end = min(tokens, start + choice.randint(1, most))
        held = max(held, pages_for(end) - max(0, start - window + 1) // PAGE_SIZE)
        start = end
    assert max(held, found) <= group.max_columns(tokens, most)
    assert held - found <= PageLayout((group,)).missing_pages(tokens, hit, most)


@pytest.mark.parametrize(("window", "chunk"), [(1, 1), (1, 64), (64, 64), (96, 2), (65, 300), (2, 1)])
def test_most_columns_are_needed_at_the_worst_alignment(window: int, chunk: int) -> None:
    needed = max(
        pages_for(start + chunk) - max(0, start - window + 1) // PAGE_SIZE for start in range(1000, 1000 + PAGE_SIZE)
    )
    assert PageGroup(0, 1, window).max_columns(5000, chunk) == needed


def test_scheduler_refuses_a_pool_in_which_one_sequence_cannot_finish() -> None:
    needed = MIXED.max_pages(1000, 300)
    limits = {"max_num_batched_tokens": 300, "max_model_len": 1000}
    with pytest.raises(ValueError, match=f"{needed - 1} pages cannot hold one sequence of 1000 tokens"):
        scheduler_of(MIXED, needed - 1, **limits)
    scheduler = scheduler_of(MIXED, needed, **limits)
    for order in range(3):
        scheduler.add(request_of([5] * 700, order, max_tokens=290))
    steps = 0
    while scheduler.has_work:
        run_step(scheduler)
        steps += 1
        assert steps < 5000
    assert scheduler.pool.num_used == 0


# --- prefix cache ---


def forget(cache: PrefixCache, pool: PagePool, page: int) -> None:
    """What an eviction of this page does."""
    pool.unregister(page)
    cache._forget(page)


@pytest.mark.slow
@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 64, 65, 66, 96, 128, 129, 1000]))
def test_hit_needs_full_attention_whole_and_the_last_window_of_sliding_groups(
    choice: random.Random, window: int
) -> None:
    layout = PageLayout((PageGroup(0, 2, None), PageGroup(2, 1, window), PageGroup(3, 2, 65)))
    pool = PagePool(40)
    cache = PrefixCache(pool, layout)
    columns = 8
    tokens = [choice.randrange(100) for _ in range(columns * PAGE_SIZE)]
    first = request_of(tokens)
    first.pages, first.num_computed_tokens = pool.allocate(columns * layout.column_pages), len(tokens)
    cache.register(first)
    pool.release(first.pages)
    known = [set(range(columns)) for _ in layout.groups]
    for _ in range(choice.choice([0, 1, 2, 5])):
        index, column = choice.randrange(3), choice.randrange(columns)
        if column in known[index]:
            known[index].remove(column)
            group = layout.groups[index]
            page = first.pages[column * layout.column_pages + group.first + choice.randrange(group.pages)]
            forget(cache, pool, page)
    pool.check()
    cache.check()
    expected = []
    for hit in range(1, columns + 1):
        needed = [
            {key // PAGE_SIZE for key in range(max(0, hit * PAGE_SIZE - w + 1), hit * PAGE_SIZE)} for w in (window, 65)
        ]
        if set(range(hit)) <= known[0] and needed[0] <= known[1] and needed[1] <= known[2]:
            expected.append(hit)
    second = request_of([*tokens, 1], 1)
    hits = cache.hits(second)
    assert list(hits) == expected
    for hit in hits:
        pages, width = cache.prefix_pages(second, hit), layout.column_pages
        for column in range(hit):
            for group in layout.groups:
                seen = group.window is None or column * PAGE_SIZE + PAGE_SIZE - 1 >= hit * PAGE_SIZE - group.window + 1
                part = slice(column * width + group.first, column * width + group.first + group.pages)
                assert pages[part] == (first.pages[part] if seen else [0] * group.pages)


def test_evicting_one_page_frees_its_whole_page_set() -> None:
    pool = PagePool(6)
    layout = PageLayout((PageGroup(0, 1, None), PageGroup(1, 2, 64)))
    cache = PrefixCache(pool, layout)
    first = request_of([3] * 128)
    first.pages, first.num_computed_tokens = pool.allocate(6), 128
    cache.register(first)
    pool.release(reversed(first.pages))
    (taken,) = pool.allocate(1)
    assert taken == first.pages[5]
    assert pool.registered_pages == set(first.pages[:4]), "the other page of the page set is forgotten"
    assert not pool.is_cached(first.pages[4])
    assert pool.allocate(1) == [first.pages[4]], "and it is free: nothing else is evicted for the next page"
    assert pool.registered_pages == set(first.pages[:4])
    cache.check()
    pool.check()


def test_pages_slide_out_registered() -> None:
    """A prompt's pages leave the window before its first step is read; a second prompt finds them all the same."""
    scheduler = scheduler_of(MIXED, 200, cache=True, max_num_batched_tokens=320)
    tokens = random.Random(3).choices(range(100), k=1000)
    scheduler.add(request_of(tokens, max_tokens=3))
    plans = [scheduler.schedule() for _ in range(2)]  # one step ahead
    while plans:
        plan = plans.pop(0)
        scheduler.update(plan, [[7]] * sum(chunk.samples for chunk in plan))
        if scheduler.has_work:
            plans.append(scheduler.schedule())
    for length in (1000, 640, 200, 66):
        request = request_of([*tokens[:length], 101], length, max_tokens=1)
        scheduler.add(request)
        run_step(scheduler)
        assert request.cached_tokens == length // PAGE_SIZE * PAGE_SIZE
        while scheduler.has_work:
            run_step(scheduler)
    assert scheduler.cache is not None
    scheduler.cache.check()
    scheduler.pool.check()


def test_new_pages_of_sub_groups_go_to_their_rows_of_the_stacked_table() -> None:
    request = request_of([5] * 10)
    request.row, request.pages = 3, [11, 12, 13, 14, 21, 22, 23, 24]
    chunk = Chunk(request, 0, 100, samples=False)
    new = take_new_pages([chunk], 4, 10)
    table = dict(zip(zip(new.rows, new.columns, strict=True), new.pages, strict=True))
    assert table == {(3 + 10 * sub, column): 10 * (column + 1) + sub + 1 for sub in range(4) for column in range(2)}
    request.pages += [0, 32, 33, 34]
    assert take_new_pages([chunk], 4, 10) == ([3, 13, 23, 33], [2, 2, 2, 2], [0, 32, 33, 34])
    assert take_new_pages([chunk], 4, 10) == ([], [], [])


# --- memory plan ---


def plan_of_gemma(memory_bytes: int, *, max_model_len: int = 131_072, max_num_batched_tokens: int = 8192) -> MemoryPlan:
    return plan_memory(
        ModelShape(54_000_000_000, 262_208, GEMMA, element_size=2, cache_element_size=2),
        memory_bytes=memory_bytes,
        max_model_len=max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=max_num_batched_tokens,
        may_run_fewer=True,
    )


def test_plan_counts_window_and_chunk_of_sliding_groups() -> None:
    """A sequence of 131,072 tokens takes 10.8 GB in global layers, and in local ones at most 1,024 + 8,192 tokens."""
    needed = 5 * 2048 + 26 * ((1024 + 8192 + 61) // 64 + 1)
    assert PageLayout.of(GEMMA).max_pages(131_072, 8192) == needed
    plan = plan_of_gemma(130 * 10**9)
    tables = 31 * 258 * 2048 * 8
    assert plan.page_bytes == 2 * 64 * LAYER_BYTES
    assert plan.pages == (130 * 10**9 - 54 * 10**9 - int(130 * 10**9 * 0.08) - tables) // plan.page_bytes
    rows = {row.name: row for row in plan.rows}
    assert rows["page tables"].size_bytes == tables
    assert rows["KV pages"].note.endswith("pages of 64 tokens in 2 of 62 layers")
    assert sum(row.size_bytes for row in plan.rows) <= 130 * 10**9


def test_pool_is_no_larger_than_all_sequences_need() -> None:
    plan = plan_of_gemma(400 * 10**9, max_model_len=256)
    assert plan.pages == 256 * 4 * 31


def test_refusal_names_the_longest_context_that_fits() -> None:
    memory = 70 * 10**9
    with pytest.raises(ConfigError, match=r"page tables \(.*--max-model-len \d+ or less") as refused:
        plan_of_gemma(memory)
    longest = int(str(refused.value).split("Set --max-model-len ")[1].split()[0])
    assert plan_of_gemma(memory, max_model_len=longest).pages >= PageLayout.of(GEMMA).max_pages(longest, 8192)
    smaller_chunks = plan_of_gemma(memory, max_model_len=longest, max_num_batched_tokens=1024)
    assert smaller_chunks.page_bytes == GEMMA.page_bytes(64, 2)


def test_sequences_that_run_together_share_the_chunk_of_a_step() -> None:
    """With the pages of `pages_together` all are admitted and none is preempted, whatever their chunks."""
    layout, seqs, length, chunk = PageLayout((PageGroup(0, 1, None), PageGroup(1, 5, 256))), 6, 2048, 512
    pages = layout.pages_together(seqs, length, chunk)
    assert pages < 0.8 * seqs * layout.max_pages(length, chunk)
    scheduler = scheduler_of(layout, pages, max_num_seqs=seqs, max_num_batched_tokens=chunk, max_model_len=length)
    for index in range(seqs):
        scheduler.add(request_of([1] * (length - 40 - 17 * index), index, max_tokens=32))
    most_running = 0
    while scheduler.has_work:
        scheduled = scheduler.schedule()
        assert scheduled
        most_running = max(most_running, len(scheduler.running))
        scheduler.update(scheduled, [[1]] * sum(each.samples for each in scheduled))
    assert (most_running, scheduler.preemptions) == (seqs, 0)
    assert scheduler.pool.num_used == 0
