"""A server's queue, deadlines, keys and log lines, over HTTP."""

from __future__ import annotations

import hashlib

import pytest
from server_harness import chat_body, scripted_server
from waiting import wait_until

from meltcore.serve.requests.request_queue import max_requests_at_engine
from meltcore.settings.fleet_spec import KeySection

CHAT = "/v1/chat/completions"


@pytest.mark.slow
def test_a_request_that_waits_past_its_deadline_leaves_the_queue() -> None:
    """The engine has all that it is sent; what waits ends with 504, or when its client leaves, and frees its place."""
    room = max_requests_at_engine(1)
    with scripted_server("--silent-steps", "100000", engine={"max_num_seqs": 1}, max_queue=room) as server:
        running = [server.open(CHAT, chat_body()) for _ in range(room)]
        server.wait_metric("requests_in_flight", room)
        late = server.post(CHAT, chat_body(), {"X-Request-Timeout": "0.3", "X-Priority-Class": "interactive"})
        assert (late.status, "0.3 s (X-Request-Timeout)" in late.error["message"]) == (504, True)
        waiting = server.open(CHAT, chat_body(priority=1))
        server.wait_metric("queue_requests", 1)
        full = server.post(CHAT, chat_body())
        assert (full.status, full.error["code"], int(full.headers["retry-after"]) >= 1) == (429, "queue_full", True)
        waiting.close()
        wait_until(lambda: server.metrics()["queue_requests"] == 0, "an empty queue")
        metrics = server.request("GET", "/metrics").body.decode()
        labels = 'model_name="scripted",priority_class="interactive",reason="deadline",task="generation"'
        assert f"meltcore:queue_refused_total{{{labels}}} 1.0" in metrics
        for connection in running:
            connection.close()
        assert server.check_no_leak()["requests_aborted_total"] == room + 2
        wait_until(lambda: server.stderr.count("event=request") == room + 3, "the log lines")
        (line,) = [line for line in server.stderr.splitlines() if "status=504" in line]
        assert "task=generation class=interactive" in line
        (refused,) = [line for line in server.stderr.splitlines() if "status=429" in line]
        assert "model=scripted" in refused, refused
        assert "task=generation class=standard queue_wait_s=0.0" in refused, "it had no class before"
        waited_s, whole_s = (float(line.split(f"{name}=")[1].split()[0]) for name in ("queue_wait_s", "total_s"))
        assert 0 < waited_s <= whole_s
        assert any("class=batch" in line for line in server.stderr.splitlines())


@pytest.mark.slow
def test_batch_waits_for_interactive_requests() -> None:
    with scripted_server("--step-s", "0.01", engine={"max_num_seqs": 1}) as server:
        connections = [server.open(CHAT, chat_body(max_tokens=20)) for _ in range(max_requests_at_engine(1))]
        for priority in (1, 1, -1):
            connections.append(server.open(CHAT, chat_body(max_tokens=4, priority=priority)))
            server.wait_metric("requests_accepted_total", len(connections))
        server.wait_metric("requests_finished_total", len(connections))
        wait_until(lambda: server.stderr.count("event=request") == len(connections), "the log lines")
        classes = [line.split("class=")[1].split()[0] for line in server.stderr.splitlines() if "class=" in line]
        assert classes == ["standard"] * max_requests_at_engine(1) + ["interactive", "batch", "batch"]
        for connection in connections:
            connection.close()
        server.check_no_leak()


@pytest.mark.slow
def test_keys_have_names_classes_and_rates() -> None:
    key = KeySection(
        name="team",
        sha256=hashlib.sha256(b"a-secret").hexdigest(),
        priority="standard",
        requests_per_minute=2,
    )
    with scripted_server(keys=(key,), api_server_count=2) as server:
        assert server.post(CHAT, chat_body()).status == 401
        headers = {"X-API-Key": "a-secret", "X-Priority-Class": "interactive", "X-Request-ID": "mine"}
        answers = [server.post(CHAT, chat_body(max_tokens=4), headers) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert answers[2].error["code"] == "rate_limit_exceeded"
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].headers["x-request-id"] == "mine"
        assert server.request("GET", "/v1/models", headers=headers).status == 200
        described, page = (server.request("GET", path) for path in ("/openapi.json", "/docs"))  # without a key
        schemas = described.json["components"]["schemas"]
        for path in ("/v1/chat/completions", "/v1/translate"):
            content = described.json["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            name = content["schema"]["$ref"].rpartition("/")[2]
            assert "model" in schemas[name]["properties"]
        assert "openapi.json" in page.body.decode()
        wait_until(lambda: server.stderr.count("event=request") == 4, "the log lines")
        assert server.stderr.count("key=team task=generation class=standard") == 2
        assert "a-secret" not in server.stderr
