"""Decides which tokens each step computes and allocates their memory.

A step has one token budget. Running sequences that decode come first, then prompts in progress, then waiting requests
in order of priority (priority, then arrival). When pages run out, the running request of the last priority is
preempted: it releases all pages and is recomputed later. It keeps its priority, and the first in priority never waits
for another, so every request finishes.

A request with penalties needs one of a few slots for its token counts while it runs. While no slot is free, such
requests wait, and requests without penalties start before them. A slot that becomes free is kept for the first of them,
and no request of a later priority starts before that request.

In a model with sliding windows a sequence releases the pages that no later query reads, when it is next scheduled. The
device runs steps in order, so a step in flight reads them before their next owner writes.

A sequence of a model with recurrent layers holds a slot for its state while it runs. Its prompt is cut where a snapshot
is to be taken (recurrent_states.py). Very long prompts are prefilled in small chunks while other sequences decode
(pacing.py). Of several answers to one prompt the first is the leader. The others, its followers, wait until the prefix
cache has the pages of its prompt.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

from meltcore.engine.core.chunk import Chunk, prompt_tokens
from meltcore.engine.core.kv_cache import FULL_ATTENTION, PAGE_SIZE, PageLayout, PagePool, PrefixCache, pages_for
from meltcore.engine.core.pacing import Pacer, StepContents
from meltcore.engine.core.recurrent_states import PrefixMatch, RecurrentStatePool, StateSnapshots
from meltcore.engine.core.request import Request, RequestStatus
from meltcore.protocol.generation import FinishReason

# A prompt of more than this many step budgets is prefilled in small chunks while others decode (pacing.py).
LONG_PROMPT_STEPS = 4

_Heap = list[tuple[tuple[int, int], Request]]


class Scheduler:
    """Schedules requests.

    `add` and `finish` take requests, `schedule` makes a step, `update` takes the tokens of a step.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache | None,
        states: RecurrentStatePool | None = None,
        layout: PageLayout = FULL_ATTENTION,
        *,
        max_num_seqs: int,
        penalty_slots: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        """Create an idle scheduler.

        If `cache` is None, the prefix cache is off. `states` is None for models without recurrent layers.
        """
        if pool.total < layout.max_pages(max_model_len, max_num_batched_tokens):
            raise ValueError(f"{pool.total} pages cannot hold one sequence of {max_model_len} tokens")
        if states is not None and states.total < max_num_seqs:
            raise ValueError(f"{states.total} recurrent-state slots cannot hold {max_num_seqs} sequences")
        self.pool = pool
        self.cache = cache
        self.layout = layout
        self._sliding = layout.sliding_groups
        self._column_pages = layout.column_pages
        self.states = states
        self.snapshots = None if states is None or cache is None else StateSnapshots(states, cache)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_prompt_tokens = max_num_batched_tokens  # of a step; fewer while the GPU is shared (pacing.py)
        self.max_model_len = max_model_len
        # Of the next step: drafts of a sequence, while no token is in flight, and tokens that decodes sample together.
        self.max_drafts, self.max_sampled_tokens = 0, max_num_seqs
        self.long_prompt = LONG_PROMPT_STEPS * max_num_batched_tokens  # tokens; a longer prompt is paced
        self.pacer: Pacer | None = None  # while there is a very long prompt
        self._long_prompt_ids: set[str] = set()
        self.running: list[Request] = []  # in order of priority
        # Heaps by priority: of requests without penalties, and with. Finished requests in them are skipped.
        self._waiting: tuple[_Heap, _Heap] = ([], [])
        self._followers: dict[Request, list[Request]] = {}  # by leader
        self.waiting_count = 0  # requests in the heaps, and followers, that have not finished
        self.free_rows = list(range(max_num_seqs, 0, -1))  # row 0 is for padding
        self._free_penalty_slots = list(range(penalty_slots))
        self.preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running) or self.waiting_count > 0

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if request.prompt_length > self.long_prompt:
            self._long_prompt_ids.add(request.id)
            self.pacer = self.pacer or Pacer(self.max_num_batched_tokens)
        leader, request.leader = request.leader, None
        if leader is None or self._can_follow(request, leader):
            self._push(request)
        else:
            request.status = RequestStatus.WAITING
            self.waiting_count += 1
            self._followers.setdefault(leader, []).append(request)

    def schedule(self) -> list[Chunk]:
        """Return the chunks of the next step. Decoding sequences come first, then prompts.

        Returns no chunks if none can run.
        """
        scheduled: list[Chunk] = []
        budget = min(self._schedule_decodes(scheduled, self.max_num_batched_tokens), self.max_prompt_tokens)
        if self.pacer is not None:
            self.pacer.begin(is_decoding=bool(scheduled))
        budget = self._schedule_prompts(scheduled, budget)
        self._admit(scheduled, budget)
        if self.snapshots is not None:
            self._take_snapshots(self.snapshots, scheduled)
        if self.pacer is not None:
            self.pacer.end(self._step_contents(scheduled).ordinary_tokens)
        for chunk in scheduled:
            chunk.request.num_computed_tokens += chunk.size
            chunk.request.in_flight += chunk.samples
        return scheduled

    def abandon(self, scheduled: list[Chunk]) -> None:
        """Release the resources of a step that could not be launched. The caller aborts its requests."""
        for chunk in scheduled:
            if chunk.snapshot:
                assert self.snapshots is not None
                self.snapshots.abandon(chunk.request, chunk.end, chunk.snapshot)

    def postpone(self, chunk: Chunk, num_dropped: int = 1) -> None:
        """Let a request compute its newest token again, as the tokens that were sampled after it are not used.

        Its keys and values are written again. Recurrent states would be updated twice, so requests of models that have
        them are never postponed. `num_dropped` is the number of tokens in flight that are not used.
        """
        request = chunk.request
        assert self.states is None, "a recurrent state is updated once per token"
        request.in_flight -= num_dropped
        if request.status is RequestStatus.RUNNING:  # else it was preempted, and computes all tokens again
            request.num_computed_tokens = chunk.end - 1 - len(chunk.drafts)
        request.last_token_on_device = request.is_counted = False

    def update(self, scheduled: list[Chunk], sampled: Sequence[list[int]]) -> None:
        """Append the sampled tokens of a step to their requests, and finish requests that end.

        `sampled` has a list for each chunk that samples: one token, and one more for each accepted draft. Tokens after
        a request's last one are deleted from its list. All are dropped if it finished while the step was in flight.
        """
        results = iter(sampled)
        for chunk in scheduled:
            request = chunk.request
            if chunk.samples:
                token_ids = next(results)
                request.in_flight -= 1
            if chunk.snapshot:
                self._keep_snapshot(chunk)
            if request.status is RequestStatus.FINISHED:
                continue
            reason: FinishReason | None = None
            if chunk.samples:
                for number, token_id in enumerate(token_ids, 1):
                    request.token_ids.append(token_id)
                    if (
                        reason := self._reason_to_end(request, token_id, is_newest=number == len(token_ids))
                    ) is not None:
                        del token_ids[number:]
                        break
                if chunk.drafts:  # what was computed for rejected ones is not used
                    request.num_computed_tokens = request.length - 1
            if self.cache is not None and request.num_computed_tokens >= (request.registered_columns + 1) * PAGE_SIZE:
                self.cache.register(request)
            if reason is not None:
                self.finish(request, reason)
        self._push_followers()

    def record_step_time(self, scheduled: list[Chunk], took_s: float) -> None:
        """Report the time of a step to the pacer, if the scheduler has a pacer."""
        if self.pacer is not None:
            self.pacer.record(took_s, self._step_contents(scheduled))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any status and release its memory.

        Its pages and its recurrent-state slot may be allocated again while a step in flight still writes to them. The
        device runs steps in order, so the next owner writes later.
        """
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting_count -= 1
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._push_followers()
        if self._long_prompt_ids:
            self._long_prompt_ids.discard(request.id)
            self.pacer = self.pacer if self._long_prompt_ids else None

    def check_idle(self) -> None:
        """Raise AssertionError if pages or states are held without work, which would be a leak."""
        assert not self._followers, "requests wait for a leader that has ended"
        assert self.pool.num_used == 0, f"{self.pool.num_used} pages are still referenced"
        self.pool.check()
        if self.states is not None:
            assert self.states.num_used == 0, f"{self.states.num_used} recurrent-state slots are still held"
            self.states.check()
        if self.cache is not None:
            self.cache.check()
        if self.snapshots is not None:
            self.snapshots.check()

    # --- the three passes of a step ---

    def _schedule_decodes(self, scheduled: list[Chunk], budget: int) -> int:
        """Schedule the next token of each running sequence. Return the budget that is left, in tokens.

        This loop is most of the host's time in a step of many sequences. So here and in `update`, whether a page is
        needed is checked before a function is called for it: most tokens need none.
        """
        running, spare_tokens = list(self.running), min(budget, self.max_sampled_tokens) - len(self.running)
        for index, request in enumerate(running):
            if budget == 0:
                break
            length, is_running = request.length, request.status is RequestStatus.RUNNING
            if not is_running or length != request.num_computed_tokens + 1 or not self._can_schedule(request):
                continue
            drafts = self._usable_drafts(request, spare_tokens, len(running) - index) if self.max_drafts else ()
            end = length + len(drafts)
            while end > request.capacity and not self.allocate_pages(request, end):
                # The last in priority is preempted: it comes last in this loop, so it is not scheduled yet.
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                scheduled.append(Chunk(request, length - 1, 1 + len(drafts), True, drafts=drafts))
                budget -= 1 + len(drafts)
                spare_tokens -= len(drafts)
        return budget

    def _usable_drafts(self, request: Request, spare_tokens: int, num_left: int) -> tuple[int, ...]:
        """Return the drafts that the next step checks. None lies after the last token that the request may have.

        Where pages are missing for a token of each of the `num_left` sequences, drafts get none.
        """
        if request.num_in_history != len(request.token_ids):
            return ()  # they were proposed before its newest token
        last = min(request.prompt_length + request.sampling.max_tokens, self.max_model_len) - request.length - 1
        if self.pool.num_available < self._column_pages * num_left:
            last = min(last, request.capacity - request.length)
        return request.drafts[: max(0, min(self.max_drafts, spare_tokens, last))]

    def _schedule_prompts(self, scheduled: list[Chunk], budget: int) -> int:
        if len(scheduled) == len(self.running):
            return budget
        scheduled_ids = {chunk.request.id for chunk in scheduled}
        for request in list(self.running):
            if budget == 0:
                break
            if (
                request.status is not RequestStatus.RUNNING
                or request.num_remaining <= 1
                or request.id in scheduled_ids
                or request.in_flight
            ):
                continue
            num_tokens = self._next_chunk_size(request, budget)
            if num_tokens == 0:
                continue
            while not self.allocate_pages(request, request.num_computed_tokens + num_tokens):
                victim = self._last_unscheduled(scheduled_ids)
                if victim is None or victim is request:
                    break
                self._preempt(victim)
            else:
                scheduled.append(self._make_chunk(request, num_tokens))
                scheduled_ids.add(request.id)
                budget -= num_tokens
        return budget

    def _admit(self, scheduled: list[Chunk], budget: int) -> None:
        """Start waiting requests as long as there are budget, rows and pages for all of their tokens."""
        while budget > 0 and self.free_rows and (request := self._next_waiting()) is not None:
            if request.id in self._long_prompt_ids and self.pacer is not None and self.pacer.tokens_left == 0:
                break
            if request.in_flight:
                break  # preempted with a token in flight: what to recompute is known after the next update
            match = self._match_prefix(request)
            missing_pages = self.layout.missing_pages(request.length, match.columns, self.max_num_batched_tokens)
            num_cached = sum(self.pool.is_cached(page) for page in match.pages)
            if missing_pages > self.pool.num_available - num_cached:
                break
            heapq.heappop(self._waiting[request.has_penalties])
            self.waiting_count -= 1
            self._start(request, match)
            num_tokens = self._next_chunk_size(request, budget)
            is_grown = self.allocate_pages(request, request.num_computed_tokens + num_tokens)
            assert is_grown, "pages were counted before admission"
            scheduled.append(self._make_chunk(request, num_tokens)._replace(restore=match.slot))
            budget -= num_tokens

    def _match_prefix(self, request: Request) -> PrefixMatch:
        """Return the cached prefix that a waiting request can be started from."""
        hits: Sequence[int] = ()
        if self.cache is not None and not request.skips_prefix_cache:
            hits = self.cache.hits(request)
        if self.snapshots is not None:
            return self.snapshots.find(request, hits, is_leader=request in self._followers)
        if self.cache is None or not hits:
            return PrefixMatch(0, [], 0, [])
        return PrefixMatch(hits[-1], self.cache.prefix_pages(request, hits[-1]), 0, [])

    def _take_snapshots(self, snapshots: StateSnapshots, scheduled: list[Chunk]) -> None:
        """Take a slot for each state that is to be kept after this step, while enough slots are left for all free rows.

        Running a sequence is more important than keeping the state of an earlier sequence.
        """
        assert self.states is not None
        for index, chunk in enumerate(scheduled):
            positions = chunk.request.snapshot_positions
            if positions and positions[0] == chunk.end:
                positions.pop(0)
                if self.states.num_available > len(self.free_rows) and snapshots.claim(chunk.request, chunk.end):
                    scheduled[index] = chunk._replace(snapshot=self.states.take())

    def _keep_snapshot(self, chunk: Chunk) -> None:
        """Keep the snapshot of a finished step. Its page is registered first if the request still runs."""
        assert self.snapshots is not None
        assert self.cache is not None
        if chunk.request.status is RequestStatus.RUNNING:
            self.cache.register(chunk.request)
        self.snapshots.attach(chunk.request, chunk.end, chunk.snapshot)

    def _step_contents(self, scheduled: list[Chunk]) -> StepContents:
        prompts = [chunk for chunk in scheduled if chunk.prompt_tokens]
        long_tokens = prompt_tokens(chunk for chunk in prompts if chunk.request.id in self._long_prompt_ids)
        return StepContents(len(scheduled) - len(prompts), long_tokens, prompt_tokens(prompts) - long_tokens)

    # --- single sequences ---

    def has_next(self, request: Request) -> bool:
        """Return whether a request may have a token after the first one that is in flight."""
        length = len(request.token_ids) + 1
        return length < self.max_model_len and length - request.prompt_length < request.sampling.max_tokens

    def _can_schedule(self, request: Request) -> bool:
        """Return whether a request can compute its next token now.

        It cannot if the token in flight is known to be the last, or must be read before the next token is sampled, or
        if its mask is late.
        """
        if not request.in_flight:
            return not request.is_held
        return request.token_mask is None and self.has_next(request)  # the host computes a mask from all tokens

    def _make_chunk(self, request: Request, num_tokens: int) -> Chunk:
        if self.pacer is not None and request.id in self._long_prompt_ids:
            self.pacer.tokens_left -= num_tokens
        return Chunk(request, request.num_computed_tokens, num_tokens, samples=num_tokens == request.num_remaining)

    def _next_chunk_size(self, request: Request, budget: int) -> int:
        """Return the number of prompt tokens that the next step computes."""
        end = request.snapshot_positions[0] if request.snapshot_positions else request.length
        if self.pacer is not None and request.id in self._long_prompt_ids:
            budget = min(budget, self.pacer.tokens_left)
        return min(end - request.num_computed_tokens, budget)

    def allocate_pages(self, request: Request, tokens: int) -> bool:
        """Allocate pages for the first `tokens` tokens of a request. Return False if too few are available.

        Pages that slid out of a window are released first.
        """
        if self._sliding:
            self._release_passed_pages(request)
        num_new_pages = pages_for(tokens) * self._column_pages - len(request.pages)
        if num_new_pages > self.pool.num_available:
            return False
        if num_new_pages > 0:
            request.pages += self.pool.allocate(num_new_pages)
        request.capacity = len(request.pages) // self._column_pages * PAGE_SIZE
        for group, first in zip(self._sliding, request.first_columns, strict=True):
            assert group.window is not None
            request.capacity = min(request.capacity, (first + 1) * PAGE_SIZE + group.window - 1)
        return True

    def _release_passed_pages(self, request: Request) -> None:
        """Release the pages that no later query reads.

        Pages are registered before they are released. The host knows the tokens of these pages, since only the newest
        token of a sequence may be unknown.
        """
        for index, group in enumerate(self._sliding):
            start, end = request.first_columns[index], group.first_column(request.num_computed_tokens)
            if start == end:
                continue
            if self.cache is not None:
                self.cache.register(request)
            for column in range(start, end):
                first = column * self._column_pages + group.first
                self.pool.release(request.pages[first : first + group.pages])
                request.pages[first : first + group.pages] = [0] * group.pages
            request.first_columns[index] = end

    def _start(self, request: Request, match: PrefixMatch) -> None:
        self.pool.add_references(filter(None, match.pages))
        request.pages = match.pages
        request.sent_pages = 0
        request.last_token_on_device, request.drafts, request.num_in_history = False, (), 0
        request.registered_columns = match.columns
        request.num_computed_tokens = match.columns * PAGE_SIZE
        request.first_columns = [group.first_column(request.num_computed_tokens) for group in self._sliding]
        if request.num_generated == 0:
            request.cached_tokens = request.num_computed_tokens
        self.prefix_queried_tokens += request.length
        self.prefix_hit_tokens += request.num_computed_tokens
        request.row = self.free_rows.pop()
        if request.has_penalties:
            request.penalty_slot, request.is_counted = self._free_penalty_slots.pop(), False
        if self.states is not None:
            if match.slot:
                self.states.touch(match.slot)
            request.recurrent_slot, request.snapshot_positions = self.states.take(), match.snapshot_positions
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=lambda running: running.priority)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        self.preemptions += 1
        self._push(request)

    def _release(self, request: Request) -> None:
        # The last pages first: cached pages are evicted oldest first, and a page is useless without those before it.
        self.pool.release(filter(None, reversed(request.pages)))
        request.pages = []
        request.capacity = 0
        request.registered_columns = 0
        self.free_rows.append(request.row)
        request.row = -1
        if request.has_penalties:
            self._free_penalty_slots.append(request.penalty_slot)
            request.penalty_slot = -1
        if self.states is not None:
            self.states.release(request.recurrent_slot)
            request.recurrent_slot = 0

    def _push(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        heapq.heappush(self._waiting[request.has_penalties], (request.priority, request))
        self.waiting_count += 1

    def _can_follow(self, request: Request, leader: Request) -> bool:
        """Return whether a request has nothing to wait for: the pages of its leader are cached, or will never be."""
        if self.cache is None or request.skips_prefix_cache or leader.status is RequestStatus.FINISHED:
            return True
        return leader.registered_columns >= (request.prompt_length - 1) // PAGE_SIZE

    def _push_followers(self) -> None:
        """Queue the followers that have nothing to wait for any more."""
        for leader, followers in list(self._followers.items()):
            if self._can_follow(followers[0], leader):
                del self._followers[leader]
                for request in followers:
                    if request.status is RequestStatus.WAITING:
                        self.waiting_count -= 1
                        self._push(request)

    def _next_waiting(self) -> Request | None:
        """Return the waiting request of highest priority for which all required slots are free."""
        heaps = self._waiting if self._free_penalty_slots else self._waiting[:1]
        for heap in heaps:
            while heap and heap[0][1].status is not RequestStatus.WAITING:
                heapq.heappop(heap)
        first = min((heap[0] for heap in heaps if heap), default=None)
        return None if first is None else first[1]

    def _last_unscheduled(self, scheduled_ids: set[str]) -> Request | None:
        return next((request for request in reversed(self.running) if request.id not in scheduled_ids), None)

    def _reason_to_end(self, request: Request, token_id: int, *, is_newest: bool) -> FinishReason | None:
        """Return why a request ends with `token_id`, which was just appended, or None. Grammars end at the newest."""
        num_generated = len(request.token_ids) - request.prompt_length
        if token_id in request.stop_ids and num_generated >= request.sampling.min_tokens:
            request.stop_token_id = token_id
            return "stop"
        if is_newest and request.constraint is not None and request.constraint.is_over:
            return "stop"
        if num_generated >= request.sampling.max_tokens or len(request.token_ids) >= self.max_model_len:
            return "length"
        return None
