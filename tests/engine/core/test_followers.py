"""Several answers to one prompt: the first computes it, and the others start from its pages."""

from __future__ import annotations

import pytest

from meltcore.engine.core.kv_cache import FULL_ATTENTION, PAGE_SIZE, PageGroup, PageLayout, PagePool, PrefixCache
from meltcore.engine.core.recurrent_states import RecurrentStatePool
from meltcore.engine.core.request import Request, RequestStatus
from meltcore.engine.core.scheduler import Scheduler
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams

ANSWERS = 6
SLIDING = PageLayout((PageGroup(0, 1, None), PageGroup(1, 2, 96)))


def make_scheduler(layout: PageLayout = FULL_ATTENTION, *, states: int = 0, cache: bool = True) -> Scheduler:
    pool = PagePool(200)
    return Scheduler(
        pool,
        PrefixCache(pool, layout) if cache else None,
        RecurrentStatePool(states) if states else None,
        layout,
        max_num_seqs=ANSWERS + 1,
        penalty_slots=1,
        max_num_batched_tokens=150,
        max_model_len=600,
    )


def add_answers(scheduler: Scheduler, length: int, *, sends_once: bool = True, **sampling: int) -> list[Request]:
    params = SamplingParams(max_tokens=5, ignore_eos=True, **sampling)
    requests: list[Request] = []
    for order in range(ANSWERS):
        prompt = [] if requests and sends_once else [5] * length
        message = AddRequest(str(order), prompt, params, leader_id="0" if requests else None)
        requests.append(Request(message, order, frozenset(), None, requests[0] if requests else None))
        scheduler.add(requests[-1])
    return requests


def run(scheduler: Scheduler) -> int:
    """Run all requests. Returns the number of prompt tokens that were computed."""
    computed = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan, "there is work, and nothing was scheduled"
        computed += sum(max(0, min(chunk.end, chunk.request.prompt_length) - chunk.start) for chunk in plan)
        scheduler.update(plan, [[7]] * sum(chunk.samples for chunk in plan))
    scheduler.check_idle()
    return computed


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 192, 450])
@pytest.mark.parametrize(
    ("layout", "states"),
    [(FULL_ATTENTION, 0), (SLIDING, 0), (FULL_ATTENTION, 2 * ANSWERS)],
    ids=["full", "sliding", "recurrent"],
)
def test_no_full_page_of_a_prompt_is_computed_twice(length: int, layout: PageLayout, states: int) -> None:
    scheduler = make_scheduler(layout, states=states)
    requests = add_answers(scheduler, length)
    shared = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert run(scheduler) == length + (ANSWERS - 1) * (length - shared)
    assert [request.cached_tokens for request in requests] == [0, *[shared] * (ANSWERS - 1)]
    assert all(len(request.output_ids) == 5 for request in requests)


def test_prompt_is_computed_per_answer_without_a_prefix_cache() -> None:
    scheduler = make_scheduler(cache=False)
    add_answers(scheduler, 100)
    assert run(scheduler) == 100 * ANSWERS
    scheduler = make_scheduler()
    add_answers(scheduler, 100, prompt_logprobs=0)  # needs the logits of all tokens
    assert run(scheduler) == 100 * ANSWERS


def test_others_run_while_followers_wait_and_ended_ones_never_start() -> None:
    scheduler = make_scheduler()
    requests = add_answers(scheduler, 400)
    other = Request(AddRequest("other", [9] * 10, SamplingParams(max_tokens=5)), 99, frozenset(), None)
    scheduler.add(other)
    scheduler.finish(requests[1], "abort")
    for _ in range(2):
        scheduler.update(scheduler.schedule(), [])
    plan = scheduler.schedule()
    assert [chunk.request.id for chunk in plan] == ["0", "other"]
    assert (requests[2].status, scheduler.waiting_count) == (RequestStatus.WAITING, ANSWERS - 2)
    scheduler.update(plan, [[7], [7]])
    run(scheduler)
    assert (requests[1].finish_reason, requests[1].cached_tokens) == ("abort", 0)
    assert {request.finish_reason for request in [*requests[2:], other]} == {"length"}


@pytest.mark.parametrize("steps", [0, 1])
def test_followers_of_an_aborted_leader_run(steps: int) -> None:
    scheduler = make_scheduler()
    requests = add_answers(scheduler, 450, sends_once=steps == 0)
    for _ in range(steps):
        scheduler.update(scheduler.schedule(), [])
    scheduler.finish(requests[0], "abort")
    run(scheduler)
    assert [request.finish_reason for request in requests] == ["abort", *["length"] * (ANSWERS - 1)]
