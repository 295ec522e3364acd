"""Which tokens each step computes, and which pages they go to.

One token budget a step. Running sequences that decode come first, then prompts in progress, then waiting ones in order
of rank (priority, then arrival). Where pages run out, the running sequence of the highest rank gives all of its pages
back and is recomputed later: it keeps its rank, and the sequence of the lowest rank is never made to wait for another,
so every sequence finishes.

Sequences with penalties need one of a few slots for their token counts while they run. While none is free, they wait
and others start before them; once one is free, it is kept for the first of them, and nobody of a higher rank starts
before it.

Where layers are recurrent, a sequence has a slot for its state while it runs, and prompts are cut where a snapshot is
to be taken (state_snapshots.py). Very long prompts are cut small while others decode (pacing.py).
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import NamedTuple

from meltcore.engine.messages import FinishReason
from meltcore.engine.pacing import Contents, Pacer
from meltcore.engine.page_pool import PAGE_SIZE, PagePool
from meltcore.engine.prefix_cache import PrefixCache
from meltcore.engine.request import Request, Sampled, State
from meltcore.engine.state_pool import StatePool
from meltcore.engine.state_snapshots import Beginning, StateSnapshots

# Prompts of more than so many step budgets are read in small pieces while other sequences decode (see pacing.py).
LONG_PROMPT_STEPS = 4

_Heap = list[tuple[tuple[int, int], Request]]


class Chunk(NamedTuple):
    """Tokens [start, start + size) of one sequence in one step; it samples where they end at the last token.

    restore: the snapshot to copy into the sequence's state slot before the step; snapshot: the slot to copy its state
    to after it; 0 where there is none.
    """

    request: Request
    start: int
    size: int
    samples: bool
    restore: int = 0
    snapshot: int = 0

    @property
    def end(self) -> int:
        return self.start + self.size


class Finished(NamedTuple):
    request: Request
    reason: FinishReason
    stop_token_id: int | None = None


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache | None,
        states: StatePool | None = None,
        *,
        max_num_seqs: int,
        penalty_slots: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        if pool.total < pages_for(max_model_len):
            raise ValueError(f"{pool.total} pages cannot hold one sequence of {max_model_len} tokens")
        if states is not None and states.total < max_num_seqs:
            raise ValueError(f"{states.total} state slots cannot hold {max_num_seqs} sequences")
        self.pool = pool
        self.cache = cache
        self.states = states
        self.snapshots = None if states is None or cache is None else StateSnapshots(states, cache)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.long_prompt = LONG_PROMPT_STEPS * max_num_batched_tokens  # tokens; read slowly where it is longer
        self.pacer: Pacer | None = None  # while there is a sequence with a very long prompt
        self._long: set[str] = set()
        self.running: list[Request] = []  # in order of rank
        # Heaps by rank, of sequences without penalties and with; what ended in one is skipped.
        self._waiting: tuple[_Heap, _Heap] = ([], [])
        self._waiting_count = 0
        self._free_rows = list(range(max_num_seqs, 0, -1))  # row 0 is for padding
        self._free_penalty_slots = list(range(penalty_slots))
        self.preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self._waiting_count > 0

    def add(self, request: Request) -> None:
        if request.prompt_length > self.long_prompt:
            self._long.add(request.id)
            self.pacer = self.pacer or Pacer(self.max_num_batched_tokens)
        self._push(request)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks: decoding sequences first, then prompts. Empty where nothing can run now."""
        plan: list[Chunk] = []
        budget = self._schedule_decodes(plan, self.max_num_batched_tokens)
        if self.pacer is not None:
            self.pacer.plan(decoding=bool(plan))
        budget = self._schedule_prompts(plan, budget)
        self._admit(plan, budget)
        if self.snapshots is not None:
            self._take_snapshots(self.snapshots, plan)
        if self.pacer is not None:
            self.pacer.planned(self._contents(plan).others)
        for chunk in plan:
            chunk.request.computed += chunk.size
            chunk.request.in_flight += chunk.samples
        return plan

    def abandon(self, plan: list[Chunk]) -> None:
        """A step could not be launched: let go what only its end would have. Its sequences are to be aborted."""
        for chunk in plan:
            if chunk.snapshot:
                assert self.snapshots is not None
                self.snapshots.abandon(chunk.request, chunk.end, chunk.snapshot)

    def update(self, plan: list[Chunk], sampled: list[Sampled]) -> list[Finished]:
        """Take in what a step chose: one entry for each chunk that samples, in order. Returns what ended by it.

        A sequence that ended while the step was under way, by an earlier step's token or an abort, ignores its own.
        """
        finished = []
        results = iter(sampled)
        for chunk in plan:
            request = chunk.request
            result = next(results) if chunk.samples else None
            if result is not None:
                request.in_flight -= 1
            if chunk.snapshot:
                self._keep_snapshot(chunk)
            if request.state is State.FINISHED:
                continue
            if result is not None:
                request.token_ids.append(result.token_id)
            if self.cache is not None and request.computed >= (request.registered_pages + 1) * PAGE_SIZE:
                self.cache.register(request)
            end = self._end_of(request) if result is not None else None
            if end is not None:
                self.finish(request, end.reason)
                finished.append(end)
        return finished

    def note_time(self, plan: list[Chunk], took_s: float) -> None:
        """How long the step of this plan took; only asked for while there is a `pacer`."""
        if self.pacer is not None:
            self.pacer.note(took_s, self._contents(plan))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a sequence in any state and give back what it holds.

        Its pages and its state slot may be handed out at once, even with a step in flight that still writes to them:
        the device runs steps in order, so the next holder's writes come later.
        """
        if request.state is State.FINISHED:
            return
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._give_back(request)
        else:
            self._waiting_count -= 1
        request.state = State.FINISHED
        request.finish_reason = reason
        if self._long:
            self._long.discard(request.id)
            self.pacer = self.pacer if self._long else None

    # --- the three passes of a step ---

    def _schedule_decodes(self, plan: list[Chunk], budget: int) -> int:
        """Here and in `update`, what most tokens do not need, a page, is asked before a function is called for it: this
        loop is most of the host's time in a step of many sequences."""
        for request in list(self.running):
            if budget == 0:
                break
            length = request.length
            if request.state is not State.RUNNING or length != request.computed + 1 or not self._may_run(request):
                continue
            while length > len(request.pages) * PAGE_SIZE and not self._grow(request, length):
                # The highest rank gives way: it comes last in this loop, so it is not in the plan yet.
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if request.state is State.RUNNING:
                plan.append(Chunk(request, request.computed, 1, samples=True))
                budget -= 1
        return budget

    def _schedule_prompts(self, plan: list[Chunk], budget: int) -> int:
        planned = {chunk.request.id for chunk in plan}
        for request in list(self.running):
            if budget == 0:
                break
            if request.state is not State.RUNNING or request.remaining <= 1 or request.id in planned:
                continue
            if request.in_flight:
                continue
            count = self._count(request, budget)
            if count == 0:
                continue
            while not self._grow(request, request.computed + count):
                victim = self._last_not_in(planned)
                if victim is None or victim is request:
                    break
                self._preempt(victim)
            else:
                plan.append(self._chunk(request, count))
                planned.add(request.id)
                budget -= count
        return budget

    def _admit(self, plan: list[Chunk], budget: int) -> None:
        """Start waiting sequences while the budget, the rows and the pages for their whole text last."""
        while budget > 0 and self._free_rows and (request := self._next_waiting()) is not None:
            if request.id in self._long and self.pacer is not None and self.pacer.left == 0:
                break
            if request.in_flight:
                break  # preempted with a token under way: what to recompute is known after the next update
            found = Beginning(self.cache.match(request) if self.cache is not None else [], 0, [])
            if self.snapshots is not None:
                found = self.snapshots.find(request, found.pages)
            retained = sum(self.pool.is_retained(page) for page in found.pages)
            if pages_for(request.length) - len(found.pages) > self.pool.available - retained:
                break
            heapq.heappop(self._waiting[request.penalised])
            self._waiting_count -= 1
            self._start(request, found)
            count = self._count(request, budget)
            grown = self._grow(request, request.computed + count)
            assert grown, "pages were counted before admission"
            plan.append(self._chunk(request, count)._replace(restore=found.slot))
            budget -= count

    def _take_snapshots(self, snapshots: StateSnapshots, plan: list[Chunk]) -> None:
        """Give a slot to the states to keep after this step. They come last, and leave one for every free row: to run
        a sequence is worth more than to have run one."""
        assert self.states is not None
        for index, chunk in enumerate(plan):
            stops = chunk.request.stops
            if stops and stops[0] == chunk.end:
                stops.pop(0)
                if self.states.available > len(self._free_rows) and snapshots.claim(chunk.request, chunk.end):
                    plan[index] = chunk._replace(snapshot=self.states.take())

    def _keep_snapshot(self, chunk: Chunk) -> None:
        """The step that took it is over. Where its sequence is still running, the page it belongs to is known first."""
        assert self.snapshots is not None
        assert self.cache is not None
        if chunk.request.state is State.RUNNING:
            self.cache.register(chunk.request)
        self.snapshots.attach(chunk.request, chunk.end, chunk.snapshot)

    def _contents(self, plan: list[Chunk]) -> Contents:
        prompts = [chunk for chunk in plan if chunk.size > 1]
        piece = sum(chunk.size for chunk in prompts if chunk.request.id in self._long)
        return Contents(len(plan) - len(prompts), piece, sum(chunk.size for chunk in prompts) - piece)

    # --- single sequences ---

    def _may_run(self, request: Request) -> bool:
        """False where the token under way is known to be the last, or has to be read before the next is chosen."""
        if not request.in_flight:
            return True
        ends_with_it = request.generated >= request.sampling.max_tokens or request.length >= self.max_model_len
        return not (ends_with_it or request.needs_host)

    def _chunk(self, request: Request, count: int) -> Chunk:
        if self.pacer is not None and request.id in self._long:
            self.pacer.left -= count
        return Chunk(request, request.computed, count, samples=count == request.remaining)

    def _count(self, request: Request, budget: int) -> int:
        """Tokens of a prompt to compute next."""
        until = request.stops[0] if request.stops else request.length
        if self.pacer is not None and request.id in self._long:
            budget = min(budget, self.pacer.left)
        return min(until - request.computed, budget)

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give the sequence pages for its first `tokens` tokens; False, and nothing taken, where they are not there."""
        count = pages_for(tokens) - len(request.pages)
        if count > self.pool.available:
            return False
        if count > 0:
            request.pages += self.pool.allocate(count)
        return True

    def _start(self, request: Request, found: Beginning) -> None:
        hits = found.pages
        self.pool.share(hits)
        request.pages = list(hits)
        request.sent_pages = 0
        request.on_device = False
        request.registered_pages = len(hits)
        request.computed = len(hits) * PAGE_SIZE
        if request.generated == 0:
            request.cached_tokens = request.computed
        self.prefix_queried_tokens += request.length
        self.prefix_hit_tokens += request.computed
        request.row = self._free_rows.pop()
        if request.penalised:
            request.penalty_slot, request.counted = self._free_penalty_slots.pop(), False
        if self.states is not None:
            if found.slot:
                self.states.touch(found.slot)
            request.state_slot, request.stops = self.states.take(), found.stops
        request.state = State.RUNNING
        insort(self.running, request, key=lambda running: running.rank)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.computed = 0
        self.preemptions += 1
        self._push(request)

    def _give_back(self, request: Request) -> None:
        # The tail first: retained pages are evicted oldest first, and a page is useless without those before it.
        self.pool.release(reversed(request.pages))
        request.pages = []
        request.registered_pages = 0
        self._free_rows.append(request.row)
        request.row = -1
        if request.penalised:
            self._free_penalty_slots.append(request.penalty_slot)
            request.penalty_slot = -1
        if self.states is not None:
            self.states.release(request.state_slot)
            request.state_slot = 0

    def _push(self, request: Request) -> None:
        request.state = State.WAITING
        heapq.heappush(self._waiting[request.penalised], (request.rank, request))
        self._waiting_count += 1

    def _next_waiting(self) -> Request | None:
        """The first in rank of those that could have all slots they need."""
        heaps = self._waiting if self._free_penalty_slots else self._waiting[:1]
        for heap in heaps:
            while heap and heap[0][1].state is not State.WAITING:
                heapq.heappop(heap)
        first = min((heap[0] for heap in heaps if heap), default=None)
        return None if first is None else first[1]

    def _last_not_in(self, planned: set[str]) -> Request | None:
        return next((request for request in reversed(self.running) if request.id not in planned), None)

    def _end_of(self, request: Request) -> Finished | None:
        """Whether the token just read is the last."""
        token_id = request.token_ids[-1]
        produced = len(request.token_ids) - request.prompt_length
        if token_id in request.stop_ids and produced >= request.sampling.min_tokens:
            return Finished(request, "stop", token_id)
        if produced >= request.sampling.max_tokens or len(request.token_ids) >= self.max_model_len:
            return Finished(request, "length")
        return None
