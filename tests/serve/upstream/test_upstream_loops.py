"""Upstreams whose address leads back to the server itself, directly or over others."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from server_harness import RunningServer, configure, make_model, running, serve_command
from upstream_tools import Upstream, answer, sends
from waiting import wait_until

from meltcore.common.errors import RequestError
from meltcore.common.process import free_port
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.serve.http import hops
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.upstream.http_backend import UpstreamHealth
from meltcore.serve.upstream.http_replica import UpstreamReplica
from meltcore.settings.fleet_spec import ModelSection, TimeoutsSection

MESSAGES = [{"role": "user", "content": "hi"}]
BACK = "its address leads back to this server"


TIMEOUTS = TimeoutsSection(health_interval_s=0.1, start_s=300.0)


def upstream(**urls: str) -> dict[str, ModelSection]:
    return {name: ModelSection(url=url) for name, url in urls.items()}


def only_upstream(port: int, **urls: str) -> list[str]:
    """The command of a fleet whose models are all elsewhere."""
    config = configure(upstream(**urls), timeouts=TIMEOUTS, port=port, api_server_count=1)
    return serve_command(config, policy=RestartAfterPause(first_pause_s=0.1))


@contextmanager
def serving(folder: Path, name: str, port: int, *, fleet: bool = True, **urls: str) -> Iterator[RunningServer]:
    """A server of a scripted model named like it, and of models at `urls`, on all addresses of the machine."""
    own = ModelSection(checkpoint=str(make_model(folder / name)), load_format="dummy")
    models = {name: own} | upstream(**urls)
    config = configure(models, port=port, host="0.0.0.0", api_server_count=2, timeouts=TIMEOUTS)
    policy = RestartAfterPause(first_pause_s=0.1) if fleet else None
    with running(serve_command(config, policy=policy), folder / f"{name}.log") as server:
        yield server


def chat(server: RunningServer, model: str) -> Any:
    return server.post("/v1/chat/completions", {"model": model, "messages": MESSAGES, "max_tokens": 4})


def pipe(source: socket.socket, target: socket.socket, header: bytes) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data.replace(b"Via: ", header))
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def forwarded(port: int, *, header: bytes = b"Via: ") -> Iterator[int]:
    """A port of its own that leads to `port`, and gives the header `Via` another name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    there = socket.create_connection(("127.0.0.1", port))
                    for each in ((near, there), (there, near)):
                        threading.Thread(target=pipe, args=(*each, header), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])


@pytest.mark.slow
def test_model_whose_address_is_the_fleets_own_fails_at_the_start(tmp_path: Path) -> None:
    """Also with several forms of it; other models are served."""
    port, other = free_port(), free_port()
    without_via = forwarded(port, header=b"X-Dropped: ")
    with forwarded(port) as around, without_via as unseen, serving(tmp_path, "other", other):
        forms = [f"http://127.0.0.2:{port}/v1/", *(f"http://localhost:{each}" for each in (port, around, unseen))]
        loops = {f"loop{at}": url for at, url in enumerate(forms)}
        with serving(tmp_path, "first", port, **loops, other=f"http://127.0.0.1:{other}") as server:
            for name in loops:
                wait_until(lambda name=name: f"{name} could not be loaded: {BACK}" in server.stderr, "the refusal")
                refused = chat(server, name)
                assert (refused.status, BACK in refused.error["message"]) == (503, True)
            wait_until(lambda: chat(server, "other").status == 200, "the model with another address")
            wait_until(lambda: chat(server, "first").status == 200, "the model of its own")
            assert server.metrics()["requests_failed_total"] == 0


# threat: an upstream server: servers that name each other pass a request on once
@pytest.mark.slow
def test_request_that_comes_back_over_other_servers_gets_508_at_its_first_turn(tmp_path: Path) -> None:
    """Two servers that name each other: over the second, and over a chain of both through a forwarded port."""
    ports = free_port(), free_port()
    with forwarded(ports[0]) as around:
        to_b = serving(tmp_path, "a", ports[0], fleet=False, far=f"http://localhost:{ports[1]}")
        with to_b as first, serving(tmp_path, "b", ports[1], far=f"http://127.0.0.1:{around}") as second:
            for server in (first, second):

                def turn(server: RunningServer = server) -> Any:
                    """A 503 means that this one of two API servers has not seen the other server yet."""
                    before = first.metrics()["requests_accepted_total"], second.metrics()["requests_accepted_total"]
                    answer = chat(server, "far")
                    return (before, answer) if answer.status == 508 else None

                before, answer = wait_until(turn, "both to know each other")
                assert answer.error["code"] == "loop_detected"
                assert "the address of an upstream leads back to this server" in answer.error["message"]
                after = first.metrics()["requests_accepted_total"], second.metrics()["requests_accepted_total"]
                assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
            for server, own in ((first, "a"), (second, "b")):
                wait_until(lambda server=server, own=own: chat(server, own).status == 200, "the model of its own")
            assert first.metrics()["requests_in_flight"] == second.metrics()["requests_in_flight"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 2])
def test_fleets_that_name_only_each_other_do_not_wait_for_the_time_limit(tmp_path: Path, others: int) -> None:
    """Two in a circle, and three."""
    ports = [free_port() for _ in range(others + 1)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        servers = []
        for at, port in enumerate(ports):
            command = only_upstream(port, far=urls[(at + 1) % len(urls)])
            servers.append(stack.enter_context(running(command, tmp_path / f"{at}.log")))
        for server in servers:
            wait_until(lambda server=server: "far could not be loaded: it waits in a circle: " in server.stderr, "that")
        assert f"its model far waits for {urls[0]}, which waits for it" in servers[0].stderr


@pytest.mark.slow
def test_fleet_that_another_one_waits_for_may_wait_for_more_than_that(tmp_path: Path) -> None:
    """The first names the second, and that a server that starts late: no circle."""
    ports = free_port(), free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        servers = []
        for at, upstreams in enumerate(({"late": urls[1]}, {"late": urls[2]})):
            command = only_upstream(ports[at], **upstreams)
            servers.append(stack.enter_context(running(command, tmp_path / f"{at}.log")))
        wait_until(lambda: servers[1].request("GET", "/health").status == 503, "the second to wait")
        stack.enter_context(serving(tmp_path, "late", ports[2]))
        for server in servers:
            wait_until(lambda server=server: chat(server, "late").status == 200, "an answer over the others")
            assert "could not be loaded" not in server.stderr


def test_model_waits_in_a_circle_only_where_each_of_its_servers_does() -> None:
    def circle(*found: str | None) -> str | None:
        replicas: Any = [SimpleNamespace(circle=AsyncMock(return_value=each)) for each in found]
        return asyncio.run(UpstreamHealth("m", ServerStats().models[0], replicas).circle({}))

    assert circle("a, which waits for it", "b, which waits for it") == "a, which waits for it and b, which waits for it"
    assert circle("a, which waits for it", None) is None
    assert circle() is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_upstream_that_lists_its_models_under_our_name_is_not_used(*, is_whole: bool) -> None:
    """What a gateway answers that drops `Via`: as it came, or written anew; at the start, and once it serves."""
    fields = {"object": "list", "data": [], "server": hops.own_name()}

    async def check() -> None:
        upstream = Upstream(sends(b""))
        await upstream.start()
        replica = UpstreamReplica(0, upstream.url, 5.0, None)
        for lists, state in ((True, "starting"), (False, "up"), (True, "down"), (False, "up")):
            named = fields if is_whole else {"models": {"meta": fields}}
            upstream.health = answer(json.dumps(named if lists else {**fields, "server": "other"}, indent=1).encode())
            await replica.check_health()
            assert (replica.state, replica.leads_back, replica.problem(0.0)) == (state, lists, BACK if lists else None)
        await upstream.stop()

    asyncio.run(check())


@pytest.mark.parametrize(
    "via", [b"1.1 {own}", b"1.0 fred, 1.1 {own}, 1.1 meltcore-0123456789abcdef", b"1.1 {own} (Meltcore), HTTP/2 nginx"]
)
def test_own_name_is_found_wherever_it_stands_in_via(via: bytes) -> None:
    own = via.replace(b"{own}", hops.own_name().encode())
    with pytest.raises(RequestError) as error:
        hops.check_hops({"headers": [(b"host", b"x"), (b"via", b"1.1 first"), (b"via", own)]})
    assert (error.value.status, error.value.code) == (508, "loop_detected")
    others = {"headers": [(b"via", b"1.1 a, 1.1 meltcore-0123456789abcdef"), (b"x-via", own), (b"via", b"")]}
    hops.check_hops(others)
    assert hops.via_lines(others) == f"Via: 1.1 meltcore-0123456789abcdef, 1.1 {hops.own_name()}\r\n"
    assert hops.via_lines() == f"Via: 1.1 {hops.own_name()}\r\n"
