"""Upstream models in our queue: bounds, classes, deadlines, tokens, the log line."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
import uvloop
from upstream_tools import CHAT, DONE, EVENT, Received, Served, Upstream, answer, sends, served, stream
from waiting import WAIT_S, until

from meltcore.serve.upstream.http_attempt import read_usage
from meltcore.settings.fleet_spec import KeySection

WHOLE = b'{"choices":[{"message":{"content":"\\"usage\\":{}"}}],"usage":{"prompt_tokens":11,"completion_tokens":7}}'


class Gate:
    """An upstream that answers each request once it is let through."""

    def __init__(self) -> None:
        self.upstream = Upstream(self._behave)
        self.open = asyncio.Semaphore(0)

    async def _behave(self, _upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
        await self.open.acquire()
        writer.write(answer(WHOLE))

    def names(self) -> list[str]:
        """Who the requests were from, in the order in which they came here."""
        return [received.json["user"] for received in self.upstream.received]


def ask(server: Served, user: str, **headers: str) -> asyncio.Task[Any]:
    async def answered() -> tuple[int, dict[str, str], bytes]:
        fields = {"model": "m", "user": user, "messages": [{"role": "user", "content": "hi" * 40}]}
        async with server.session.post(server.url + CHAT, json=fields, headers=headers) as response:
            return response.status, dict(response.headers), await response.read()

    return asyncio.create_task(answered())


def in_flight(server: Served) -> float:
    return server.stats.models[0].total("in_flight")


async def ask_in_order(server: Served, *requests: tuple[str, dict[str, str]]) -> list[asyncio.Task[Any]]:
    tasks = []
    for user, headers in requests:
        before = in_flight(server)
        tasks.append(ask(server, user, **headers))
        await until(lambda before=before: in_flight(server) > before)
    return tasks


def test_requests_beyond_the_room_wait_by_class_and_the_queue_is_bounded() -> None:
    async def check() -> None:
        gate = Gate()
        async with served(gate.upstream, max_num_seqs=1, max_queue=5) as server:
            first = await ask_in_order(server, ("a", {}), ("b", {}))  # a slot, and the one that follows
            await until(lambda: len(gate.upstream.received) == 2)
            waiting = await ask_in_order(
                server,
                ("batch", {"X-Priority-Class": "batch"}),
                ("standard", {}),
                ("interactive", {"X-Priority-Class": "interactive"}),
            )
            stats = server.stats.models[0]
            assert [stats.total(f"queue_requests/{each}") for each in ("interactive", "standard", "batch")] == [1, 1, 1]
            assert stats.total("queue_units/standard") > 80 / 4, "prompt tokens, estimated"
            more = await ask_in_order(server, ("late", {}))
            status, headers, body = await ask(server, "refused")
            assert (status, b"queue is full: 6 requests would wait, the limit is 5" in body) == (429, True)
            assert int(headers["Retry-After"]) >= 1
            assert len(gate.upstream.received) == 2, "what waits is not sent"
            gate.open.release()
            await until(lambda: len(gate.upstream.received) == 3)
            for _ in range(5):
                gate.open.release()
            answers = await asyncio.wait_for(asyncio.gather(*first, *waiting, *more), WAIT_S)
            assert [status for status, _, _ in answers] == [200] * 6
            assert gate.names()[2] == "interactive", "the class that is due first"
            assert sorted(gate.names()) == ["a", "b", "batch", "interactive", "late", "standard"]
            assert stats.total("queue_requests") == stats.total("queue_units/batch") == 0
            assert stats.total("rejected_queue_full") == 1
            server.check_no_leak()

    uvloop.run(check())


def test_tokens_that_wait_are_bounded() -> None:
    async def check() -> None:
        gate = Gate()
        async with served(gate.upstream, max_num_seqs=1, max_queue_tokens=60) as server:
            tasks = await ask_in_order(server, ("a", {}), ("b", {}), ("c", {}))
            status, _, body = await ask(server, "d")
            assert (status, b"prompt tokens would wait, the limit is 60" in body) == (429, True)
            for _ in range(3):
                gate.open.release()
            assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3

    uvloop.run(check())


def test_a_request_that_ends_while_it_waits_never_reaches_the_upstream() -> None:
    """Its client leaves, its time is over, or the server ends it: each leaves the queue."""

    async def check() -> None:
        gate = Gate()
        async with served(gate.upstream, max_num_seqs=1) as server:
            running = await ask_in_order(server, ("a", {}), ("b", {}))
            gone, late = await ask_in_order(server, ("gone", {}), ("late", {"X-Request-Timeout": "0.2"}))
            gone.cancel()
            status, _, body = await asyncio.wait_for(late, WAIT_S)
            assert (status, b"longer than 0.2 s (X-Request-Timeout)" in body) == (504, True)
            stats = server.stats.models[0]
            await until(lambda: in_flight(server) == 2)
            assert stats.total("queue_requests") == stats.total("queue_units/standard") == 0
            assert stats.total("refused_deadline/standard") == 1
            for _ in range(2):
                gate.open.release()
            assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * 2
            assert gate.names() == ["a", "b"]
            server.check_no_leak()

    uvloop.run(check())


def test_tokens_come_from_usage_or_from_events() -> None:
    """They are counted in metrics and in the log line, and against the key's limit."""

    async def check() -> None:
        upstream = Upstream(sends(answer(WHOLE)))
        key = KeySection(name="k", sha256=hashlib.sha256(b"secret").hexdigest(), tokens_per_minute=30)
        async with served(upstream, api_keys=(key,)) as server:
            server.session.headers["Authorization"] = "Bearer secret"
            assert (await server.ask())[0] == 200
            usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'
            upstream.behave = sends(stream(EVENT, usage, DONE, b""))
            assert (await server.ask(stream=True))[0] == 200
            upstream.behave = sends(stream(EVENT, EVENT, EVENT * 2, EVENT, DONE, b""))
            assert (await server.ask(stream=True))[0] == 200
            whole, streamed, counted = await server.log_lines(3)
            assert (whole["prompt_tokens"], whole["completion_tokens"]) == (11, 7)
            assert (streamed["prompt_tokens"], streamed["completion_tokens"]) == (5, 3)
            assert (counted["prompt_tokens"], counted["completion_tokens"]) == (None, 3), "six events, three without"
            expected = {"key": "k", "model": "m", "class": "standard", "task": "generation", "queue_wait_s": 0.0}
            assert (expected | {"status": 200}).items() <= whole.items()
            assert len(whole["request_id"]) == 32
            stats = server.stats.models[0]
            assert (stats.total("prompt_tokens"), stats.total("generation_tokens")) == (16, 13)
            assert (await server.ask())[0] == 429, "26 tokens and a prompt without a count are over 30"

    uvloop.run(check())


# threat: an upstream server: an answer nested without end is no fault of this server
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (WHOLE, (11, 7)),
        (b'{"usage": {"input_tokens":2, "output_tokens":1}, "content":"\\"usage\\":{\\"input_tokens\\":9}"}', (2, 1)),
        (b'{"usage":null}', (None, None)),
        (b'{"usage":{"prompt_tokens":"3","completion_tokens":-1}}', (None, None)),
        (b'{"usage":{"prompt_tok', (None, None)),
        (b'data: {"usage":{"prompt_tokens":1}}\n\ndata: {"usage":null}\n\n', (1, None)),
        (b'{"usage":{"prompt_tokens":' + b"[" * 3000, (None, None)),  # deeper than Python reads
        (b'{"usage":{"a":' + b'{"a":' * 600, (None, None)),
        (b"", (None, None)),
    ],
)
def test_usage_is_read_where_it_stands(data: bytes, expected: tuple[int | None, int | None]) -> None:
    assert read_usage(data) == expected
