"""The backend of a model on upstream servers. The bytes of requests and answers are passed on unchanged.

A request goes to the replica with the fewest open requests. Its body is changed only if the upstream knows the model by
another name. Answers are never changed. Addresses come only from the configuration, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from meltcore.common.errors import ConfigError, RequestError
from meltcore.serve.http.forms import find_field, is_multipart
from meltcore.serve.requests.admission import Admission
from meltcore.serve.requests.backend import LANGUAGE_PATHS, SERVING, Health
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.open_tickets import OpenTickets, Outcome, RequestTimeLimit
from meltcore.serve.requests.protocol import JsonRequest
from meltcore.serve.requests.request_queue import (
    EXPECTED_OUTPUT_TOKENS,
    OUTPUT_TOKENS_WEIGHT,
    RequestQueue,
)
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.requests.ticket import Ticket
from meltcore.serve.upstream.http_attempt import (
    IDLE_TIMEOUT_S,
    STATUS_BY_FAILURE,
    Attempt,
    ForwardOutcome,
    UpstreamChild,
    UpstreamTicket,
)
from meltcore.serve.upstream.http_connection import FailureKind, UpstreamError
from meltcore.serve.upstream.http_replica import UpstreamReplica
from meltcore.settings.fleet_spec import LimitsSection, ModelSection, TimeoutsSection

MAX_CONNECTIONS = 16_384  # of each API server process to one replica; more requests get status 429
RETRIES = 1  # on other replicas, of a request whose answer has not begun
WAKE_CHECK_S = 0.02  # of requests that have waited for sleeping servers
WAKING_CHECK_S = 0.1  # of the health of a server that is being started for them
SWEEP_S = 1.0  # between two looks at the time limits, or a fifth of the shortest limit
# Before the first byte for the client. After a time limit the upstream may still be computing: to repeat the request
# would double the load of servers that are too slow already.
_RETRIED_FAILURES: tuple[FailureKind, ...] = ("connect", "connect_timeout", "closed")
# Of a request that waits nothing is tokenized here. Four bytes are a token of English text.
BYTES_PER_TOKEN = 4
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class UpstreamHealth(Health):
    """Says whether an upstream model can be served: a replica answers, and its circuit breaker is not open."""

    def __init__(self, name: str, stats: ModelStats, replicas: list[UpstreamReplica]) -> None:
        super().__init__(stats, model=name)
        self._replicas = replicas

    def problem(self) -> str | None:
        """Return the reason why the model cannot be served now, or None if it can be served."""
        if self.status not in SERVING:
            return self.reason
        if self._stats.is_asleep:
            return None
        now_s = asyncio.get_running_loop().time()
        live_replicas = self._stats.live_replicas()
        reasons = [
            replica.problem(now_s) if replica.index in live_replicas else "it is being started"
            for replica in self._replicas
        ]
        if None in reasons:
            return None
        return f"no server of {self._model} can be used: " + "; ".join(
            f"replica {index}: {reason}" if len(reasons) > 1 else f"{reason}" for index, reason in enumerate(reasons)
        )

    async def circle(self, scope: Scope) -> str | None:
        """Query the health of all servers on behalf of a server that waits for this one.

        Returns a text about the circle if every server waits for it too. Returns None if not, or if a server has
        answered before.
        """
        if self.status not in ("loading", "failed"):
            return None
        found = await asyncio.gather(*(replica.circle(scope) for replica in self._replicas))
        circles = [circle for circle in found if circle is not None]
        return " and ".join(circles) if circles and len(circles) == len(found) else None


class _OpenTickets(OpenTickets[UpstreamChild]):
    """Holds forwarded requests. An attempt chooses the replica of a request, because replicas may fail to answer."""

    def start(self, ticket: Ticket[UpstreamChild]) -> None:
        """Let the coroutine of the request continue.

        Until the answer is known, the cost of the request is the cost of its prompt.
        """
        ticket.cost = ticket.units
        ticket.begin()


class HttpBackend:
    """Connects one API server process to the servers of one upstream model."""

    def __init__(
        self,
        name: str,
        config: ModelSection,
        urls: Sequence[str],
        stats: ModelStats,
        *,
        limits: LimitsSection,
        timeouts: TimeoutsSection,
    ) -> None:
        """Create the backend of a model whose replicas are at `urls`.

        Raises ConfigError if the model's API key is missing.
        """
        key = upstream_api_key(name, config)
        self.config = config
        self.names = (name, *config.aliases)
        self.paths = config.upstream_paths
        self.stats = stats
        self.replicas = [UpstreamReplica(index, url, timeouts.connect_s, key) for index, url in enumerate(urls)]
        self._timeouts = timeouts
        for replica in self.replicas:
            stats.set_answers(replica.index, False)
        self.health: Health = UpstreamHealth(self.names[0], stats, self.replicas)
        slots, limits = config.max_num_seqs or MAX_CONNECTIONS, limits.of(config)
        stats.task = config.task
        queue = RequestQueue(
            stats,
            Admission(max_queue=limits.max_queue, max_units=limits.max_queue_tokens, max_num_seqs=slots),
            slots=slots,
            shares=limits.class_shares,
        )
        self.tickets = _OpenTickets(stats, lambda _message, _replica: None, queue, timeouts.request_s)
        self._time_limit: RequestTimeLimit[UpstreamTicket] = RequestTimeLimit(
            timeouts.request_s, UpstreamTicket.pass_limit
        )
        self._output_tokens = EXPECTED_OUTPUT_TOKENS  # of an answer, on average
        self._rotation = 0
        self._has_several_replicas = len(self.replicas) > 1
        self._created = int(time.time())
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: list[asyncio.Task[None]] = []  # of the replicas' health

    # --- life cycle

    def start(self) -> None:
        """Start the tasks that watch the replicas and the time limits."""
        self._tasks = [asyncio.create_task(self._watch_limits())]
        self.check_health()

    def check_health(self) -> None:
        """Query the health of each replica now, and at intervals from then on."""
        for watch in self._watches:
            watch.cancel()
        self._watches = [asyncio.create_task(self._watch_health(replica)) for replica in self.replicas]

    def close(self) -> None:
        """Stop watching, and close the idle connections."""
        for task in (*self._tasks, *self._watches):
            task.cancel()
        for replica in self.replicas:
            replica.close()

    def end_all(self, error: RequestError, outcome: Outcome, replica: int | None = None) -> None:
        """End the open requests with an error: all of them, or the requests of `replica` only."""
        self.tickets.end_all(error, outcome, replica)

    async def _watch_health(self, replica: UpstreamReplica) -> None:
        while True:
            await replica.check_health()
            self.stats.set_answers(replica.index, replica.state == "up")
            # Until the first answer more often: a server that starts is used as soon as it can be.
            interval_s = self._timeouts.health_interval_s
            if replica.state != "up":
                interval_s = min(WAKING_CHECK_S if self.health.status == "waking" else 1.0, interval_s)
            await asyncio.sleep(interval_s)

    async def _watch_limits(self) -> None:
        first_byte_s, loop = self._timeouts.first_byte_s, asyncio.get_running_loop()
        shortest_s = min(first_byte_s, IDLE_TIMEOUT_S)
        while True:
            await asyncio.sleep(min(SWEEP_S, shortest_s / 5))
            now_s = loop.time()
            for child in list(self.tickets):
                child.ticket.check(now_s, first_byte_s)
            for replica in self.replicas:
                replica.drop_idle(now_s)

    # --- requests

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""
        problem = self.health.problem()
        if problem is not None:
            raise self.health.not_ready(problem)

    async def forward(self, exchange: Exchange, body: bytes, request: JsonRequest) -> ForwardOutcome:
        """Send the body of a request to an upstream, and the answer to the client. Return the outcome.

        If RequestError is raised, nothing was sent to the client.
        """
        self.check_ready()
        client = exchange.scope["meltcore.connection"]
        ticket = UpstreamTicket(exchange.arrived_s, client)
        tokens = 0.0 if is_multipart(exchange.body_type) else len(body) / BYTES_PER_TOKEN
        body = self._renamed(body, exchange.body_type, request.model)
        priority = request.priority if isinstance(request.priority, int) else 0
        cost = tokens + self._output_tokens
        self.tickets.admit(ticket, self.config.priority, units=tokens, cost=cost, priority=priority)
        self._time_limit.watch(ticket)
        client.set_disconnect_callback(ticket.disconnect)
        ended: Outcome = "failed"
        try:
            outcome = await self._serve(exchange, ticket, body, is_streamed=bool(request.stream))
            ended = "finished" if outcome.error is None else "aborted" if outcome.status == 499 else "failed"
            self._count_tokens(ticket, outcome)
            return outcome
        except RequestError as error:
            ended = "aborted" if error.status in (429, 499, 503) else "failed"
            raise
        finally:
            client.set_disconnect_callback(None)
            self._time_limit.forget(ticket)
            if ended == "finished":
                self.stats.histograms["e2e_request_latency_seconds"].observe(time.monotonic() - exchange.arrived_s)
            self.tickets.close(ticket.child, ended)
            ticket.children.clear()  # they refer to it: a cycle would stay until the next collection

    def _count_tokens(self, ticket: UpstreamTicket, outcome: ForwardOutcome) -> None:
        """Add the tokens of an answer to the statistics, if their number is known."""
        if outcome.replica is None:  # its client has left the queue
            return
        prompt_tokens, output_tokens = outcome.prompt_tokens, outcome.completion_tokens
        ticket.cost = ticket.cost if prompt_tokens is None else prompt_tokens
        self.stats.add("prompt_tokens", prompt_tokens or 0)
        if output_tokens is not None:
            ticket.cost += output_tokens
            self.stats.add("generation_tokens", output_tokens)
            self._output_tokens += (output_tokens - self._output_tokens) * OUTPUT_TOKENS_WEIGHT
        ticket.exchange.charge(round(ticket.cost))

    async def _serve(
        self, exchange: Exchange, ticket: UpstreamTicket, body: bytes, *, is_streamed: bool
    ) -> ForwardOutcome:
        """Wait for the request's turn, then send it on."""
        if ticket.is_queued:
            await ticket.wait_turn()
            if ticket.is_client_gone and ticket.is_queued:
                return ForwardOutcome(499, None, "client_closed")
            if ticket.is_queued or ticket.error is not None:  # its end came before its turn
                raise ticket.error or self.tickets.overdue(ticket)
            await self._wait_usable(ticket)
        return await self._try_replicas(exchange, ticket, body, is_streamed=is_streamed)

    async def _wait_usable(self, ticket: UpstreamTicket) -> None:
        """Wait until this process sees that a server answers, at most for `timeouts.connect_s`.

        The supervisor may have seen it earlier, when it started the server.
        """
        deadline_s = asyncio.get_running_loop().time() + self._timeouts.connect_s
        while not self._usable(set()) and asyncio.get_running_loop().time() < deadline_s:
            if ticket.is_client_gone or ticket.error is not None or self.health.status not in SERVING:
                return
            await asyncio.sleep(WAKE_CHECK_S)

    async def _try_replicas(
        self, exchange: Exchange, ticket: UpstreamTicket, body: bytes, *, is_streamed: bool
    ) -> ForwardOutcome:
        tried: set[int] = set()
        while True:
            replica = self._choose(tried)
            tried.add(replica.index)
            may_retry = len(tried) <= min(RETRIES, len(self.replicas) - 1) and bool(self._usable(tried))
            self.tickets.place(ticket.child, replica.index)
            replica.num_open += 1
            replica.breaker.begin()
            attempt = Attempt(
                exchange,
                ticket,
                replica,
                is_streamed=is_streamed,
                stats=self.stats,
                server=f"the server of {self.names[0]}"
                + (f" (replica {replica.index})" if self._has_several_replicas else ""),
                limit_s=self.tickets.limit_s,
            )
            try:
                outcome = await attempt.run(body, may_retry=may_retry)
            except UpstreamError as error:
                if error.kind == "aborted":
                    return self._ended(ticket, replica)
                if not (may_retry and error.kind in _RETRIED_FAILURES):
                    status, code = STATUS_BY_FAILURE[error.kind]
                    raise RequestError(attempt.describe(error), status=status, code=code) from error
            else:
                if outcome is not None:
                    return outcome
            finally:
                attempt.close()
                replica.num_open -= 1
                self.tickets.leave(ticket.child)

    def _ended(self, ticket: UpstreamTicket, replica: UpstreamReplica) -> ForwardOutcome:
        """Return the outcome of a request that was ended before its answer began, because its client has disconnected.

        Raises the error (RequestError) that ended the request otherwise.
        """
        if ticket.error is not None and not ticket.is_client_gone:
            raise ticket.error
        return ForwardOutcome(499, replica.index, "client_closed")

    def _choose(self, tried: set[int]) -> UpstreamReplica:
        """Return the replica whose number of open requests, over all API servers, is lowest.

        Raises RequestError: 429 if every replica has MAX_CONNECTIONS open requests, and 503 if none accepts requests.
        """
        usable = self._usable(tried)
        available = [each for each in usable if each.num_open < MAX_CONNECTIONS]
        if not available:
            if usable:
                raise RequestError(
                    f"the queue is full: each server of {self.names[0]} has {MAX_CONNECTIONS} open requests",
                    status=429,
                    code="queue_full",
                )
            raise self.health.not_ready(self.health.problem() or f"every server of {self.names[0]} refused")
        if len(available) == 1:
            return available[0]
        self._rotation += 1
        rotation, num_replicas = self._rotation, len(self.replicas)
        return min(
            available, key=lambda each: (self.stats.open_requests(each.index), (each.index - rotation) % num_replicas)
        )

    def _usable(self, tried: set[int]) -> list[UpstreamReplica]:
        """Return the replicas that accept requests, without those in `tried`.

        Replicas that the supervisor starts or drains do not accept requests.
        """
        now_s, live_replicas = asyncio.get_running_loop().time(), self.stats.live_replicas()
        return [
            each
            for each in self.replicas
            if each.index in live_replicas and each.index not in tried and each.problem(now_s) is None
        ]

    def _renamed(self, body: bytes, content_type: str, model: str | None) -> bytes:
        """Return the body with the model name that the upstream uses. The bytes of all other values stay the same."""
        name = self.config.upstream_model or self.names[0]
        if name == model:
            return body
        if is_multipart(content_type):
            place = find_field(body, content_type, "model")
            return body if place is None else body[: place.start] + name.encode() + body[place.stop :]
        fields = _decode_fields(body)
        fields["model"] = msgspec.Raw(msgspec.json.encode(name))
        return msgspec.json.encode(fields)

    # --- the other routes

    @property
    def chats(self) -> bool:
        """Whether the upstream server accepts chats."""
        return LANGUAGE_PATHS[0] in self.paths

    @property
    def purpose(self) -> str:
        """A text that completes "the model NAME ..." in errors: the model's function, and where it is served."""
        return f"serves {', '.join(self.paths)} only"

    def model_card(self, name: str) -> dict[str, Any]:
        """Return OpenAI's model card. This server knows little about an upstream model."""
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "foreign"}
        card["task"] = self.config.task
        card |= {"replicas": len(self.replicas), "priority": self.config.priority, "paths": list(self.paths)}
        return card | ({"max_model_len": self.config.max_model_len} if self.config.max_model_len else {})


def upstream_api_key(name: str, config: ModelSection) -> str | None:
    """Return the API key for the upstreams. Raises ConfigError if the environment variable is missing."""
    if config.upstream_key_env is None:
        return None
    key = os.environ.get(config.upstream_key_env, "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"{name}: the environment variable {config.upstream_key_env} (upstream_key_env) must hold the "
            "upstream's key in printable ASCII"
        )
    return key
