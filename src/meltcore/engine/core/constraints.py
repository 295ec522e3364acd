"""Makes answers follow grammars: compiles them, advances them by sampled tokens, and fills the masks of next tokens.

Native threads do this work while the device computes the next forward pass. The mask of a sequence is a row of packed
bits in pinned memory, which the sampling kernel reads there. It is the row that the sequence has in the model runner.
So the engine reads the tokens of a step, and with them waits for its kernels, before masks of the next step are filled.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor

from meltcore.common.errors import MeltcoreError
from meltcore.engine.core.constraint import Constraint
from meltcore.engine.core.request import Request, RequestStatus
from meltcore.protocol.sampling_params import Grammar
from meltcore.text.grammar import GrammarCompiler

_COMPILE_THREADS, _MAX_MASK_THREADS = 2, 8
# After its forward pass a step waits this long for masks. Most take 5 to 200 us, masks of hard schemas up to 34 ms.
_GRACE_S, _POLL_S = 0.001, 0.0002
_CPU_GRACE_S = 0.01  # a forward pass takes longer there, and uses the cores of the threads
# A step waits longer if it would sample nothing else, or if the model cannot compute a token again.
_ALONE_S, _LIMIT_S = 0.1, 30.0
_IDLE_S = 0.01  # while no step can run


# By the reason why llguidance has stopped, what the client can do.
_ADVICE = {
    "ParserTooComplex": "its grammar allows too many alternatives in one place; simplify it",
    "LexerTooComplex": "a regular expression or a string of its grammar has too many states; simplify it",
    "NoExtensionBias": "its grammar allows no text here, as parts of it exclude each other; change one of them",
}


class Dropped(NamedTuple):
    """The requests of a step whose tokens are not used: their masks are late, or their grammars have failed."""

    late: list[Request]
    failed: list[Request]


class Constraints:
    """Compiles the grammars of an engine's requests, and fills their masks in native threads."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], allocate: Callable[[int], np.ndarray]) -> None:
        """Create the object without a thread, since the engine forks before `start`.

        If `make_compiler` raises an error, each request with a grammar gets this error. Once a grammar is compiled,
        `allocate` returns masks for a number of token ids, [rows, words] int32.
        """
        self._num_threads = max(1, min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._compile_pool = ThreadPoolExecutor(_COMPILE_THREADS, "grammar")
        self._mask_pool = ThreadPoolExecutor(self._num_threads, "mask")
        self._make_compiler, self._allocate = make_compiler, allocate
        self._masks: np.ndarray | None = None
        self._compiling: dict[Request, Future[Constraint]] = {}
        self._held: list[Request] = []  # until their masks are filled
        self._written: dict[int, Future[None]] = {}  # by row: the newest task that writes to it
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
        self._compiling[request] = self._compile_pool.submit(self._compile, grammar)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.num_open -= 1
        self._compiling.pop(request, None)

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
            if self._masks is None:
                self._masks = self._allocate(self._compiler.result().num_ids)
        running = [request for request in self._held if request.status is RequestStatus.RUNNING]
        self.fill(running)  # if their rows were not free before
        for request in self._held:
            request.is_held = request in running and not _constraint(request).is_ready(request.row)
        self._held = [request for request in running if request.is_held]
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

    def commit(self, tokens: Sequence[tuple[Request, int]]) -> None:
        """Advance grammars by the tokens that were sampled for their requests."""
        taken = [
            (request, constraint, token_id)
            for request, token_id in tokens
            if (constraint := request.constraint) is not None
            and request.status is not RequestStatus.FINISHED
            and constraint.takes(token_id)
        ]
        if not taken:
            return
        accepted = self._executor.consume_token_par([(constraint.matcher, token) for _, constraint, token in taken])
        for (request, constraint, _), is_accepted in zip(taken, accepted, strict=True):
            constraint.is_over = constraint.matcher.is_stopped()
            if not is_accepted:
                _fail(request, constraint)

    def fill(self, requests: Sequence[Request]) -> None:
        """Begin to fill the masks of running requests that have no mask for their next token."""
        missing = [
            (constraint, request.row)
            for request in requests
            if (constraint := request.constraint) is not None
            and constraint.needs_mask
            and constraint.mask_row != request.row
            # The matcher may be busy for a row that the request has left, and the row with a request that has left it.
            and all(task is None or task.done() for task in (constraint.filling, self._written.get(request.row)))
        ]
        if not missing:
            return
        if len(missing) == len(requests) == 1:  # nothing else waits for it, and another thread costs more than a mask
            [(constraint, row)] = missing
            constraint.mask_row, constraint.filling = row, Future()
            self._fill_group(missing)
            constraint.filling.set_result(None)
            self.num_masks += 1
            return
        size = -(-len(missing) // self._num_threads)
        for first in range(0, len(missing), size):
            group = missing[first : first + size]
            task = self._mask_pool.submit(self._fill_group, group)
            for constraint, row in group:
                constraint.mask_row, constraint.filling = row, task
                self._written[row] = task
        self.num_masks += len(missing)

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
            constraint, is_ready = _constraint(request), _constraint(request).is_ready(request.row)
            if is_ready and constraint.needs_mask and constraint.matcher.is_error():
                _fail(request, constraint)
            elif not is_ready and not may_be_late:
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

    def _compile(self, grammar: Grammar) -> Constraint:
        return Constraint(self._compiler.result().matcher(grammar.text), grammar)

    def _fill_group(self, group: list[tuple[Constraint, int]]) -> None:
        """Fill masks in the library's threads, without the GIL."""
        start_s = time.monotonic()
        masks = self._masks
        assert masks is not None
        num_rows, num_words = masks.shape
        self._executor.unsafe_compute_mask_ptr(
            [(constraint.matcher, row) for constraint, row in group], masks.ctypes.data, 4 * num_words, num_rows
        )
        for constraint, row in group:
            if constraint.optional_id is not None:
                word, bit = divmod(constraint.optional_id, 32)
                masks[row].view(np.uint32)[word] |= np.uint32(1 << bit)
        self.mask_s += time.monotonic() - start_s


def _constraint(request: Request) -> Constraint:
    assert request.constraint is not None
    return request.constraint


def _task(request: Request) -> Future[None] | None:
    return None if request.constraint is None else request.constraint.filling


def _fail(request: Request, constraint: Constraint) -> None:
    constraint.is_over = True
    error = constraint.matcher.get_error()
    whole = " ".join(error.split())[:500]
    print(f"meltcore: the grammar of request {request.id} has failed: {whole}", file=sys.stderr, flush=True)
    reason, _, _ = error.strip().partition("\n")  # what follows is the state of the parser, or a stack
    advice = _ADVICE.get(constraint.matcher.stop_reason(), "its grammar and its tokens do not agree")
    request.error = f"the answer cannot go on: {advice} (llguidance: {reason[:200]})"
    request.error_code = "grammar_failed"
