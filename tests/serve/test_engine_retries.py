"""A replica is killed while requests are open: those of which nothing was sent end in whole answers of another one."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_harness import MODEL, Answer, RunningServer, scripted_server
from waiting import wait_until

NUM_REQUESTS = 20


def complete(server: RunningServer, max_tokens: int, *, stream: bool = False) -> Answer:
    body = {"model": MODEL, "prompt": "ab", "max_tokens": max_tokens, "stream": stream}
    return server.post("/v1/completions", body)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_killed_replica_are_retried(stream: bool) -> None:
    """Whole answers have begun when the replica is killed; streams wait, as it was stopped before they came."""
    num_tokens = 10 if stream else 200
    with (
        scripted_server("--step-s", "0.01", replicas=2, api_server_count=2) as server,
        ThreadPoolExecutor(NUM_REQUESTS) as pool,
    ):
        victim = server.engine_pids()[0]
        if stream:
            os.kill(victim, signal.SIGSTOP)
        answers = [pool.submit(complete, server, num_tokens, stream=stream) for _ in range(NUM_REQUESTS)]
        server.wait_metric("requests_accepted_total", NUM_REQUESTS)
        if not stream:
            server.wait_metric("num_requests_running", NUM_REQUESTS)
        os.kill(victim, signal.SIGKILL)
        text = "ab" * (num_tokens // 2)
        for answer in (each.result() for each in answers):
            choices = [event["choices"][0] for event in (answer.events if stream else [answer.json])]
            assert (answer.status, "".join(choice["text"] for choice in choices)) == (200, text)
        found = server.check_no_leak()
        num_retried = found["requests_retried_total"]
        assert num_retried >= NUM_REQUESTS // 4
        assert (found["requests_finished_total"], found["requests_failed_total"]) == (NUM_REQUESTS, 0)
        wait_until(lambda: server.stderr.count("retries=1") == num_retried, "a field of their log lines")


@pytest.mark.slow
def test_request_without_another_replica_can_be_sent_again() -> None:
    with scripted_server("--step-s", "0.01", replicas=2) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server, 4000)
        server.wait_metric("num_requests_running", 1)
        first, second = server.engine_pids()
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: server.metrics()["replicas"] == 1, "the second replica to be out")
        os.kill(first, signal.SIGKILL)
        answer = waiting.result()
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "engine_dead", "1")
