"""Where a request goes is written in fleet.yaml: no target, header, field or answer leads to another address."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvloop
from upstream_tools import CHAT, Upstream, answer, sends, served
from waiting import WAIT_S

ANSWER = answer(b'{"choices":[]}')


async def exchange(port: int, target: str, headers: dict[str, str], body: bytes) -> bytes:
    """Send a request as these bytes; returns the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"POST {target} HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode() + body)
    received = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    return received.partition(b"\r\n\r\n")[0]


def test_no_request_and_no_answer_leads_to_another_address() -> None:
    async def check() -> None:
        ours, trap = Upstream(sends(ANSWER)), Upstream(sends(ANSWER))
        await trap.start()
        evil, evil_host = trap.url, trap.url.removeprefix("http://")
        fields: dict[str, Any] = {"model": "m", "messages": []}
        plain = json.dumps(fields).encode()
        named = {
            **dict.fromkeys(("base_url", "api_base", "url", "upstream", "upstream_model", "endpoint", "host"), evil),
            "extra_body": {"base_url": evil},
            "metadata": {"url": evil},
        }
        header_names = (
            *("host", "x-forwarded-host", "x-forwarded-server", "x-original-url", "x-rewrite-url", "x-upstream"),
            *("x-host", "x-base-url", "location", "origin", "referer", "via"),
        )
        async with served(ours) as server:
            accepted = [
                *[(CHAT, {name: value}, plain) for name in header_names for value in (evil, evil_host)],
                (CHAT, {"forwarded": f"host={evil_host};proto=http", "proxy": evil}, plain),
                (CHAT, {}, json.dumps(fields | named).encode()),
                (f"{CHAT}?base_url={evil}&model={evil}", {}, plain),
            ]
            num_refused = 0
            for target, headers, body in accepted:
                # A host or an origin that is not this server's is refused, as a page of another site would be.
                expected = (b" 200 ", b" 403 ") if headers.keys() & {"host", "origin"} else (b" 200 ",)
                head = await exchange(server.port, target, headers, body)
                assert any(status in head for status in expected), (target, headers, head)
                num_refused += b" 403 " in head
            assert num_refused == 3, "a host, and two origins"
            assert len(ours.received) == len(accepted) - num_refused
            own_host = ours.url.removeprefix("http://")
            for received in ours.received:
                assert received.line == f"POST {CHAT} HTTP/1.1"
                assert received.headers["host"] == own_host
                assert evil_host not in repr(received.headers), "headers of clients stay here"
            # As a model, as the target of a proxy, and as a path.
            for target, body in [
                (CHAT, json.dumps(fields | {"model": evil}).encode()),
                (CHAT, json.dumps(fields | {"model": f"m@{evil_host}"}).encode()),
                (f"{CHAT}@{evil_host}/", plain),
                (f"//{evil_host}{CHAT}", plain),
                (f"/v1/../{evil}", plain),
            ]:
                assert b" 404 " in await exchange(server.port, target, {}, body), target
            head = await exchange(server.port, f"{evil}{CHAT}", {}, plain)
            assert head.split()[1] in (b"200", b"400", b"404")
            # What an upstream answers is passed on, and not followed.
            for status in ("302 Found", "307 Temporary Redirect", "308 Permanent Redirect"):
                redirect = f"HTTP/1.1 {status}\r\nLocation: {evil}{CHAT}\r\nContent-Length: 0\r\n\r\n"
                ours.behave = sends(redirect.encode())
                async with server.post() as response:
                    assert response.status in (int(status[:3]), 502)
            server.check_no_leak()
        assert (trap.connections, trap.received) == (0, [])
        await trap.stop()

    uvloop.run(asyncio.wait_for(check(), WAIT_S))
