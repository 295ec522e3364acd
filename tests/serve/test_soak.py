"""Mixed load with clients that leave at random: afterwards nothing is left, and the counters balance."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from server_harness import RunningServer, chat_body, scripted_server
from soak import verdict

CLIENTS = 40
REQUESTS_EACH = 15


async def client(port: int, seed: int) -> int:
    """Unstreamed answers, streams, invalid requests, and disconnects. Returns the number of invalid requests."""
    rng = random.Random(seed)
    bad = 0
    for _ in range(REQUESTS_EACH):
        body = chat_body("x" * rng.randint(1, 50), stream=rng.random() < 0.7, max_tokens=rng.randint(1, 60))
        kind = rng.choice(["whole", "whole", "leave", "leave", "bad"])
        if kind == "bad":
            body["temperature"] = -1
            bad += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        if kind == "leave":
            await asyncio.sleep(rng.random() * 0.1)
            writer.transport.abort()
            continue
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400" if kind == "bad" else b"HTTP/1.1 200")
        assert kind == "bad" or not body["stream"] or b"[DONE]" in answer
        writer.close()
    return bad


def open_files(server: RunningServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.slow
def test_mixed_load_with_client_disconnects_leaks_nothing() -> None:
    async def everyone(port: int) -> int:
        return sum(await asyncio.gather(*(client(port, seed) for seed in range(CLIENTS))))

    with scripted_server("--step-s", "0.003", engine={"max_num_seqs": 16}) as server:
        server.chat("warm", max_tokens=1)
        files = open_files(server)
        bad = asyncio.run(everyone(server.port))
        found = server.check_no_leak()
        assert found["requests_failed_total"] == 0
        assert found["requests_aborted_total"] > 0
        # A client that left before its request was read was never accepted; all others are accounted for.
        assert found["requests_accepted_total"] <= 1 + CLIENTS * REQUESTS_EACH - bad
        assert found["requests_finished_total"] >= CLIENTS
        assert open_files(server) <= files + 1  # the connection that reads this


def soak_lines(left: float = 0.0, ended: str = "200", **last: float) -> list[dict[str, Any]]:
    """A log of two hours whose last hour differs by `last`."""
    roles = [
        f"{role}_{unit}" for role in ("supervisor", "api", "engine") for unit in ("bytes", "descriptors", "threads")
    ]
    sample = dict.fromkeys(roles, 100) | {"event": "sample", "load": 0.6}
    lines = [sample | {"s": 10 * index, "ended": {"200": 5}} for index in range(360)]
    lines += [sample | last | {"s": 3600 + 10 * index, "ended": {ended: 5}} for index in range(360)]
    # Connections of clients come and go.
    for line in lines:
        line["clients"] = line["s"] // 100
        line["api_descriptors"] += line["clients"]
    return [{"event": "start"}, *lines, {"event": "end", "left": left}]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (soak_lines(), "PASS"),
        (soak_lines(api_bytes=101.9), "PASS"),
        (soak_lines(api_bytes=102.1), "FAIL"),
        (soak_lines(supervisor_bytes=102.1), "FAIL"),
        (soak_lines(api_descriptors=102), "PASS"),
        (soak_lines(api_descriptors=103), "FAIL"),
        (soak_lines(supervisor_threads=103), "FAIL"),
        (soak_lines(left=1.0), "FAIL"),
        (soak_lines(ended="lost: no answer"), "FAIL"),
        (soak_lines(ended="503"), "PASS"),
        (soak_lines(engine_bytes=102.1), "FAIL"),
        (soak_lines(engine_descriptors=103), "FAIL"),
        (soak_lines() + soak_lines() + soak_lines(), "PASS"),
        (soak_lines() + soak_lines(engine_bytes=102.1) + soak_lines(), "FAIL"),
        (soak_lines() + soak_lines(api_threads=103) + soak_lines(), "FAIL"),
        (soak_lines()[:12], "UNKNOWN"),
    ],
)
def test_soak_fails_for_what_grows_stays_or_is_lost(lines: list[dict[str, Any]], expected: str) -> None:
    assert verdict(lines)["verdict"] == expected
