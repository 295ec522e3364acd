"""The listening socket: probes of silent connections find peers that are gone, and no others."""

import asyncio
import resource
import select
import socket
import time
from contextlib import ExitStack

import pytest
from waiting import WAIT_S

from meltcore.serve.http import listener as listening
from meltcore.serve.http.listener import Acceptor, bind, raise_file_limit

TCP = socket.IPPROTO_TCP


async def accept(count: int, stack: ExitStack) -> tuple[list[socket.socket], list[socket.socket]]:
    """Clients and the server's ends of as many connections."""
    listener = bind("127.0.0.1", 0)
    accepted: list[socket.socket] = []
    all_accepted = asyncio.Event()

    def on_connection(connection: socket.socket) -> None:
        accepted.append(stack.enter_context(connection))
        if len(accepted) == count:
            all_accepted.set()

    acceptor = Acceptor(listener, on_connection, lambda error: pytest.fail(str(error)))
    clients = []
    for index in range(count):
        clients.append(stack.enter_context(socket.create_connection(listener.getsockname(), timeout=WAIT_S)))
        if index % 100 == 99:
            await asyncio.sleep(0)
    await asyncio.wait_for(all_accepted.wait(), WAIT_S)
    acceptor.close()
    return clients, accepted


def test_silent_connections_are_probed_several_times_and_not_together() -> None:
    with ExitStack() as stack:
        _, accepted = asyncio.run(accept(60, stack))
        first_s = [connection.getsockopt(TCP, socket.TCP_KEEPIDLE) for connection in accepted]
        assert len(set(first_s)) > 20
        limit_s = accepted[0].getsockopt(TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert limit_s == listening.UNACKNOWLEDGED_LIMIT_S
        for connection in accepted:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            interval_s = connection.getsockopt(TCP, socket.TCP_KEEPINTVL)
            assert connection.getsockopt(TCP, socket.TCP_KEEPIDLE) + 2 * interval_s < limit_s


@pytest.mark.slow
def test_thousands_of_silent_connections_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """All fall silent in the same moment. Probes of one moment, the last chance of each, would reset a quarter."""
    raise_file_limit()
    count = min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 200)
    monkeypatch.setattr(listening, "UNACKNOWLEDGED_LIMIT_S", 8)
    monkeypatch.setattr(listening, "FIRST_PROBES_S", range(2, 6))
    monkeypatch.setattr(listening, "PROBE_INTERVAL_S", 1)
    with ExitStack() as stack:
        clients, accepted = asyncio.run(accept(count, stack))
        poll = select.poll()
        for client in clients:
            client.sendall(b"x")
            poll.register(client, select.POLLIN)
        for connection in accepted:
            assert connection.recv(1) == b"x"
        time.sleep(12)
        assert len(poll.poll(0)) == 0  # a reset connection is readable
