"""Open requests of a model without an HTTP server and without engines."""

from collections.abc import Callable
from typing import Any

from meltcore.common.tasks import tasks
from meltcore.protocol.generation import ToEngine
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.admission import Admission
from meltcore.serve.requests.request_queue import EQUAL_SHARES, RequestQueue
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.tasks.generation.generation_ticket import GenerationTicket
from meltcore.serve.tasks.generation.open_requests import OpenRequests
from meltcore.settings.fleet_spec import LimitsSection, ModelSection

ROOM = 1_000_000


def new_backend(
    kind: type[EngineBackend],
    config: ModelSection,
    server: ServerStats,
    stats: ModelStats,
    limit_s: float = 1.0,
    **limits: int,
) -> Any:
    """A backend of a model of the task whose backend `kind` is."""
    stats.task = next(task.name for task in tasks().values() if task.backend.endswith(f":{kind.__name__}"))
    return kind(config.model, config, server, stats, limits=LimitsSection(**limits), request_timeout_s=limit_s)


def open_backend(
    kind: type[EngineBackend],
    config: ModelSection,
    server: ServerStats,
    send: Callable[[ToEngine, int], object],
    text: Any,
    ready: Any,
) -> Any:
    """A backend of the server's first model that is loaded, with `text`, and serves with the engines' limits."""
    backend = new_backend(kind, config, server, server.models[0], 30.0)
    backend._send = send
    backend.open(text, ready, 0)
    backend.health.set("ready", "ready")
    return backend


def wide_queue(stats: ModelStats) -> RequestQueue:
    """A queue in which nothing waits."""
    admission = Admission(max_queue=ROOM, max_units=ROOM, max_num_seqs=ROOM)
    return RequestQueue(stats, admission, slots=ROOM, shares=EQUAL_SHARES)


def open_requests(stats: ModelStats, send: Callable[[ToEngine, int], object]) -> OpenRequests:
    """An empty table behind a queue in which nothing waits."""
    return OpenRequests(stats, send, wide_queue(stats), 600.0)  # type: ignore[arg-type]  # of fewer tasks


def start(requests: OpenRequests, ticket: GenerationTicket, priority: int = 0) -> None:
    """Let a request through the queue."""
    ticket.priority = priority
    requests.accept(ticket)
    requests.start(ticket)
