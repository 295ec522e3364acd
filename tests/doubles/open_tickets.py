"""Open requests of a model without an HTTP server and without engines."""

from collections.abc import Callable

from meltcore.protocol.generation import ToEngine
from meltcore.serve.requests.admission import Admission
from meltcore.serve.requests.fair_queue import Waiting
from meltcore.serve.requests.generation import Generation
from meltcore.serve.requests.request_queue import EQUAL_SHARES, RequestQueue
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.tasks.generation.open_requests import OpenRequests

ROOM = 1_000_000


def open_requests(stats: ModelStats, send: Callable[[ToEngine, int], object]) -> OpenRequests:
    """An empty table behind a queue in which nothing waits."""
    admission = Admission(max_queue=ROOM, max_units=ROOM, max_num_seqs=ROOM)
    queue = RequestQueue("generation", stats, admission, slots=ROOM, shares=EQUAL_SHARES)
    return OpenRequests(stats, send, queue, 600.0)  # type: ignore[arg-type]  # of fewer tasks


def start(requests: OpenRequests, generation: Generation, priority: int = 0) -> None:
    """Let a request through the queue."""
    generation.waiting = Waiting("standard", lambda: None)
    generation.priority = priority
    requests.accept(generation)
    requests.start(generation)
