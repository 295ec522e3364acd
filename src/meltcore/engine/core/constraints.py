"""Makes answers follow grammars: compiles them, advances them by sampled tokens, and fills the masks of next tokens.

Native threads do this work while the device computes the next forward pass. The mask of a sequence is a row of packed
bits in pinned memory, which the sampling kernel reads there. It is the row that the sequence has in the model runner.
So the engine reads the tokens of a step, and with them waits for its kernels, before masks of the next step are filled.

Either the host waits for the masks of a step (`wait`) before it launches the sampling, or the device waits for them
(`launched`), so that the host can go on. A device that has waited long enough samples without the mask. When the host
reads the token, the mask says whether it is allowed (`commit`): the noise of sampling depends on seed and position, so
an allowed token is the one that the mask would have given.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor

from meltcore.common.errors import MeltcoreError
from meltcore.engine.core.constraint import Constraint, MaskTable
from meltcore.engine.core.request import Request, RequestStatus
from meltcore.protocol.sampling_params import Grammar
from meltcore.text.grammar import GrammarCompiler

_COMPILE_THREADS, _MAX_MASK_THREADS = 2, 16
_GROUPS = 4  # of masks that are filled together; a slow mask makes its group late
_SLOW_S = 0.005  # a group that takes longer has a slow mask
_FEW_TOKENS = 64  # up to this many the engine's thread takes faster than it wakes other threads
# After its forward pass a step waits this long for masks. Most take 5 to 200 us, masks of hard schemas up to 34 ms.
_GRACE_S, _POLL_S = 0.001, 0.0002
_CPU_GRACE_S = 0.01  # a forward pass takes longer there, and uses the cores of the threads
# Threads of masks need the GIL to begin and to end. Python would take it from the busy engine's thread after 5 ms only.
_SWITCH_S = 0.00002
# A step waits longer if it would sample nothing else, or if the model cannot compute a token again.
_ALONE_S, _LIMIT_S = 0.1, 30.0
_IDLE_S = 0.01  # while no step can run


# By the reason why llguidance has stopped, what the client can do.
_ADVICE = {
    "ParserTooComplex": "its grammar allows too many alternatives in one place; simplify it",
    "LexerTooComplex": "a regular expression or a string of its grammar has too many states; simplify it",
    "NoExtensionBias": "its grammar allows no text here, as parts of it exclude each other; change one of them",
}


_Sampled = tuple[Request, Constraint, int]  # with the token id


class Dropped(NamedTuple):
    """The requests of a step whose tokens are not used: their masks are late, or their grammars have failed."""

    late: list[Request]
    failed: list[Request]


class Constraints:
    """Compiles the grammars of an engine's requests, and fills their masks in native threads."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], allocate: Callable[[int], MaskTable]) -> None:
        """Create the object without a thread, since the engine forks before `start`.

        If `make_compiler` raises an error, each request with a grammar gets this error. Once a grammar is compiled,
        `allocate` returns masks for a number of token ids.
        """
        self._num_threads = max(1, min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._compile_pool = ThreadPoolExecutor(_COMPILE_THREADS, "grammar")
        self._mask_pool = ThreadPoolExecutor(_GROUPS, "mask")
        self._make_compiler, self._allocate = make_compiler, allocate
        self.does_device_wait = False  # for masks, instead of the host
        self._table: MaskTable | None = None
        self._compiling: dict[Request, Future[Constraint]] = {}
        self._held: list[Request] = []  # until their masks are filled
        # Of rows, what threads and the engine write: the ticket of the mask in the row, negative if it could not be
        # filled, the ticket for which the device waits, and whether a thread writes the mask. Under the lock the device
        # is released from its wait.
        self._lock = Lock()
        self._tickets: dict[int, int] = {}
        self._waited: dict[int, int] = {}
        self._busy_rows: set[int] = set()
        # The requests, rows and tickets for which the device waits in the step that was launched last.
        self._waiting: tuple[list[Request], list[int], list[int]] = [], [], []
        self.num_open = 0  # requests with grammars
        self.mask_s, self.num_masks, self.num_late = 0.0, 0, 0

    def start(self) -> None:
        """Begin to make the compiler in a thread."""
        self._executor: LLExecutor = LLExecutor(self._num_threads)
        self._compiler: Future[GrammarCompiler] = self._compile_pool.submit(self._make_compiler)

    @property
    def num_compiling(self) -> int:
        """The number of requests that wait for their grammars."""
        return len(self._compiling)

    def stats(self) -> dict[str, Any]:
        """Return the fields of EngineStats about masks."""
        return {"masks_total": self.num_masks, "mask_s_total": self.mask_s, "late_masks_total": self.num_late}

    def add(self, request: Request, grammar: Grammar) -> None:
        """Begin to compile the grammar of a request."""
        self.num_open += 1
        request.status = RequestStatus.COMPILING
        self._compiling[request] = self._compile_pool.submit(self._compile, grammar, request.arrival)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended. Its grammar is not compiled, unless a thread has begun."""
        self.num_open -= 1
        compiled = self._compiling.pop(request, None)
        if compiled is not None:
            compiled.cancel()

    def take_compiled(self) -> list[Request]:
        """Return the requests whose grammars are compiled or refused. A refused request has its `error` set.

        Held requests are released if their masks are filled, or if they were preempted.
        """
        taken = [request for request, compiled in self._compiling.items() if compiled.done()]
        for request in taken:
            try:
                request.constraint = self._compiling.pop(request).result()
            except MeltcoreError as error:
                request.error = str(error)
                continue
            if self._table is None:
                self._table = self._allocate(self._compiler.result().num_ids)
                sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        running = [request for request in self._held if request.status is RequestStatus.RUNNING]
        self.fill(running)  # if their rows were not free before
        for request in self._held:
            request.is_held = request.status is RequestStatus.RUNNING and not self._is_ready(request)
        self._held = [request for request in running if request.is_held]
        for request in running:
            if not request.is_held and self.does_device_wait:
                self._release(request, _constraint(request).num_taken + 1)
            elif request.is_held and _has_failed(request):
                self._held.remove(request)
                taken.append(request)
        return taken

    def hold(self, request: Request) -> None:
        """Leave a request out of steps until its mask is filled."""
        request.is_held = True
        self._held.append(request)

    def wait_idle(self) -> None:
        """Wait a moment for threads if no step can run, because the loop of the process would otherwise spin."""
        tasks: list[Future[Any]] = [
            *self._compiling.values(),
            *(task for request in self._held if (task := _task(request)) is not None),
        ]
        wait_for(tasks, _IDLE_S, FIRST_COMPLETED)

    def commit(self, tokens: Sequence[tuple[Request, list[int]]]) -> Dropped:
        """Advance grammars by the tokens that were sampled for their requests. Tokens after the end are deleted.

        Return the requests whose tokens cannot be used. The device has sampled late ones without masks, and they are
        not allowed, or their masks are not filled yet.
        """
        sampled = [
            (request, constraint, token_ids[0])
            for request, token_ids in tokens
            if (constraint := request.constraint) is not None and request.status is not RequestStatus.FINISHED
        ]
        dropped = Dropped(*self._late_and_failed(sampled)) if self.does_device_wait else Dropped([], [])
        self.num_late += len(dropped.late)
        unused = frozenset([*dropped.late, *dropped.failed])
        taken = [each for each in sampled if each[0] not in unused and each[1].takes(each[2])]
        if taken:
            dropped.failed.extend(self._consume(taken))
        for request, token_ids in tokens:
            constraint = request.constraint
            if constraint is not None and request not in unused:
                self._take_accepted(request, constraint, token_ids, dropped)
        return dropped

    def _take_accepted(self, request: Request, constraint: Constraint, token_ids: list[int], dropped: Dropped) -> None:
        """Advance a grammar by the tokens after the first one, which drafts were accepted for."""
        for index, token_id in enumerate(token_ids[1:], 1):
            if constraint.is_over or request.status is RequestStatus.FINISHED:
                del token_ids[index:]
                break
            if constraint.takes(token_id):
                dropped.failed.extend(self._consume([(request, constraint, token_id)]))
        is_new = request.num_in_history == len(request.token_ids) + len(token_ids)
        request.drafts = constraint.drafts = constraint.checkable(request.drafts) if is_new else ()

    def _late_and_failed(self, sampled: list[_Sampled]) -> tuple[list[Request], list[Request]]:
        """Return the requests whose tokens the device has sampled without masks, and which cannot be used."""
        masked = [each for each in sampled if each[1].needs_mask]
        failed = [each[0] for each in masked if each[1].failure is not None and _has_failed(each[0])]
        if not masked or self._have_masks(masked):
            return [], failed
        assert self._table is not None
        late = []
        for each in masked:
            number = each[1].num_taken + 1
            outcome = self._table.outcomes[number % 2, each[1].rows[number % 2]]
            if outcome != each[1].ticket(number) and not self._is_allowed(*each):
                late.append(each[0])
        return [request for request in late if request not in failed], failed

    def _have_masks(self, masked: list[_Sampled]) -> bool:
        """Return whether the device has sampled all these tokens with their masks, as in most steps."""
        assert self._table is not None
        requests, rows, tickets = self._waiting
        if requests != [request for request, _, _ in masked]:
            return False
        expected = np.array(tickets)
        return bool((self._table.outcomes[expected % 2, rows] == expected).all())

    def _is_allowed(self, request: Request, constraint: Constraint, token_id: int) -> bool:
        """Return whether a token that was sampled without its mask may be used. The mask may be filled by now."""
        number, masks = constraint.num_taken + 1, self._masks
        row = constraint.rows[number % 2]
        if self._tickets.get(row) != constraint.ticket(number) or request.sampling.is_filtered:
            return False  # the mask is late, or a filter depends on it
        word, bit = divmod(token_id, 32)
        return word < masks.shape[1] and bool(masks[row, word] >> bit & 1)  # the device waits, so without drafts

    @property
    def _masks(self) -> np.ndarray:
        assert self._table is not None
        return self._table.masks

    def _consume(self, taken: list[_Sampled]) -> list[Request]:
        """Advance grammars. Return the requests whose grammars have failed."""
        if len(taken) <= _FEW_TOKENS:
            accepted = [constraint.matcher.consume_token(token) for _, constraint, token in taken]
        else:
            accepted = self._executor.consume_token_par([(each.matcher, token) for _, each, token in taken])
        failed = []
        for (request, constraint, _), is_accepted in zip(taken, accepted, strict=True):
            constraint.is_over = constraint.matcher.is_stopped()  # also by an error
            if not is_accepted or (constraint.is_over and constraint.matcher.is_error()):
                _fail(request, constraint)
                failed.append(request)
        return failed

    def _is_ready(self, request: Request) -> bool:
        """Return whether the next token of a running request can be sampled."""
        constraint = _constraint(request)
        if not constraint.needs_mask:
            return True
        return self._tickets.get(request.row) == constraint.ticket(constraint.num_taken + 1)

    def fill(self, requests: Sequence[Request]) -> None:
        """Begin to fill the masks of running requests that have no mask for their next token."""
        missing = [
            (constraint, request.row)
            for request in requests
            if (constraint := request.constraint) is not None and constraint.needs_mask
        ]
        self._begin(missing, is_alone=len(requests) == 1 and not self.does_device_wait)

    def _begin(self, missing: list[tuple[Constraint, int]], *, is_alone: bool) -> None:
        """Begin to fill masks that are not filled. The engine's own thread fills the mask of a lone request."""
        missing = [
            (constraint, row)
            for constraint, row in missing
            # The matcher may be busy for a row that the request has left, and the row with a request that has left it.
            # A thread that has ended has noted its ticket before.
            if not (constraint.is_filling or constraint.failure or row in self._busy_rows)
            and self._tickets.get(row) != constraint.ticket(constraint.num_taken + 1)
        ]
        if not missing:
            return
        rows = [row for _, row in missing]
        self._tickets.update(dict.fromkeys(rows, 0))
        self._busy_rows.update(rows)
        for constraint, _ in missing:
            constraint.is_filling = True
        self.num_masks += len(missing)
        if is_alone:
            # Nothing else waits for it, and another thread costs more than a mask.
            missing[0][0].filling = Future()
            self._fill(missing)
            missing[0][0].filling.set_result(None)
            return
        fast = [each for each in missing if not each[0].is_slow]
        slow = [each for each in missing if each[0].is_slow]
        for group in (fast, *(slow[first::_GROUPS] for first in range(_GROUPS))):
            if group:
                task = self._mask_pool.submit(self._fill, group)
                for constraint, _ in group:
                    constraint.filling = task

    @property
    def device_limits_s(self) -> tuple[float, float] | None:
        """How long the device waits for masks while it can sample no sequence of a step, and then for the others.

        It is None if the host waits, or if no request has a grammar.
        """
        return (_ALONE_S, _GRACE_S) if self.does_device_wait and self.num_open else None

    def launched(self, requests: Sequence[Request]) -> None:
        """Begin to fill the masks for which the device waits in the step that was launched for these requests.

        The tokens of the step before must have been read.
        """
        self._waiting = waiting, rows, tickets = [], [], []
        for request in requests:
            constraint = request.constraint
            if constraint is None:
                continue
            number, row = request.num_generated, request.row
            constraint.rows[number % 2] = row
            ticket = constraint.ticket(number)
            # The token is not used if the one before it was refused.
            if number != constraint.num_taken + 1 or not constraint.needs_mask or self._tickets.get(row) == ticket:
                self._release(request, number)
            else:
                waiting.append(request)
                rows.append(row)
                tickets.append(ticket)
        self._waited.update(zip(rows, tickets, strict=True))
        constraints = [_constraint(request) for request in waiting]
        self._begin(list(zip(constraints, rows, strict=True)), is_alone=len(requests) == 1)
        for request, constraint in zip(waiting, constraints, strict=True):
            if not constraint.is_filling:  # its mask is just filled, or its row is busy and it comes later
                self._release(request, request.num_generated)

    def _release(self, request: Request, number: int) -> None:
        """Let the device sample a token now, with the mask if that is filled."""
        constraint = _constraint(request)
        assert self._table is not None
        ticket = constraint.ticket(number)
        with self._lock:
            self._waited[request.row] = 0
            has_mask = constraint.needs_mask and self._tickets.get(request.row) == ticket
            self._table.filled[request.row] = ticket if has_mask else -ticket

    def wait(
        self, requests: Sequence[Request], is_device_done: Callable[[], bool] | None, *, may_be_late: bool
    ) -> Dropped:
        """Wait for the masks of `requests`, which are all requests that a step samples. Return the dropped requests.

        If masks are late, the step continues without their rows, if it has other rows and `may_be_late` is True.
        `is_device_done` is None on a CPU, where the forward pass is over.
        """
        constrained = [request for request in requests if request.constraint is not None]
        tasks = {task for request in constrained if (task := _task(request)) is not None and not task.done()}
        while tasks and is_device_done is not None and not is_device_done():
            tasks = wait_for(tasks, _POLL_S).not_done
        if tasks:
            is_alone = sum(_task(request) in tasks for request in constrained) == len(requests)
            grace_s = _CPU_GRACE_S if is_device_done is None else _GRACE_S
            wait_for(tasks, _LIMIT_S if not may_be_late else _ALONE_S if is_alone else grace_s)
        dropped = Dropped([], [])
        for request in constrained:
            is_ready = self._is_ready(request)
            if not _has_failed(request) and not is_ready and not may_be_late:
                request.error = f"the mask of a token took more than {_LIMIT_S:g} s"
            if request.error is not None:
                dropped.failed.append(request)
            elif not is_ready:
                dropped.late.append(request)
        self.num_late += len(dropped.late)
        return dropped

    def close(self) -> None:
        """End the threads after their current tasks."""
        self._compile_pool.shutdown(wait=False, cancel_futures=True)
        self._mask_pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar, arrival: int) -> Constraint:
        return Constraint(self._compiler.result().matcher(grammar.text), grammar, arrival)

    def _fill(self, group: list[tuple[Constraint, int]]) -> None:
        """Fill masks in a thread, and let the device sample the rows for which it waits."""
        try:
            self._fill_group(group)
        except BaseException as error:  # a panic of Rust is no Exception
            for each in group if len(group) > 1 else ():
                self._fill([each])
            if len(group) > 1:
                return
            group[0][0].failure = f"{type(error).__name__}: {error}"
        assert self._table is not None
        filled, waited, tickets = self._table.filled, self._waited, dict[int, int]()
        for constraint, row in group:
            if constraint.failure is None and constraint.matcher.is_error():
                constraint.failure = constraint.matcher.get_error()
            tickets[row] = constraint.ticket(constraint.num_taken + 1) * (1 if constraint.failure is None else -1)
        with self._lock:
            self._tickets.update(tickets)
            for row, ticket in tickets.items():
                if waited.get(row) == abs(ticket):
                    filled[row] = ticket
            for constraint, _ in group:
                constraint.is_filling = False
            self._busy_rows.difference_update(tickets)

    def _fill_group(self, group: list[tuple[Constraint, int]]) -> None:
        """Fill masks in the library's threads, without the GIL."""
        assert self._table is not None
        start_s, masks, per_row = time.monotonic(), self._masks, self._table.masks_per_row
        num_rows, num_words = masks.shape
        target = masks.ctypes.data, 4 * num_words, num_rows
        if any(constraint.drafts for constraint, _ in group):
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                [(constraint.matcher, per_row * row, list(constraint.drafts)) for constraint, row in group], *target
            )
        elif len(group) == 1:
            [(constraint, row)] = group
            constraint.matcher.unsafe_compute_mask_ptr(target[0] + target[1] * per_row * row, target[1])
        else:
            self._executor.unsafe_compute_mask_ptr(
                [(constraint.matcher, per_row * row) for constraint, row in group], *target
            )
        for constraint, row in group:
            if constraint.optional_id is not None:
                word, bit = divmod(constraint.optional_id, 32)
                masks[per_row * row].view(np.uint32)[word] |= np.uint32(1 << bit)
        took_s = time.monotonic() - start_s
        self.mask_s += took_s
        for constraint, _ in group:
            constraint.is_slow = took_s > _SLOW_S


def _constraint(request: Request) -> Constraint:
    assert request.constraint is not None
    return request.constraint


def _task(request: Request) -> Future[None] | None:
    return None if request.constraint is None else request.constraint.filling


def _has_failed(request: Request) -> bool:
    """Return whether no mask could be filled for a request, which then has its error."""
    constraint = _constraint(request)
    if constraint.failure is not None and request.error is None:
        _fail(request, constraint)
    return constraint.failure is not None


def _fail(request: Request, constraint: Constraint) -> None:
    constraint.is_over = True
    error = constraint.failure or constraint.matcher.get_error()
    whole = " ".join(error.split())[:500]
    print(f"meltcore: the grammar of request {request.id} has failed: {whole}", file=sys.stderr, flush=True)
    reason, _, _ = error.strip().partition("\n")  # what follows is the state of the parser, or a stack
    stop_reason = "" if constraint.is_filling else constraint.matcher.stop_reason()  # a thread may use the matcher
    advice = _ADVICE.get(stop_reason, "its grammar and its tokens do not agree")
    request.error = f"the answer cannot go on: {advice} (llguidance: {reason[:200]})"
    request.error_code = "grammar_failed"
