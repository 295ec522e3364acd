"""Several front processes behind one port: to a client and to a dashboard they are one server."""

import http.client
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_harness import MODEL, RunningServer, chat_body, scripted_server, wait_until

CHAT = "/v1/chat/completions"


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    data = b""
    while marker not in data:
        chunk = connection.recv(65_536)
        if not chunk:
            break
        data += chunk
    return data


def open_streams(server: RunningServer, count: int, **fields: Any) -> list[socket.socket]:
    """`count` streams in full flow, spread over the fronts."""
    streams = [server.open(CHAT, chat_body("s", stream=True, **fields)) for _ in range(count)]
    for stream in streams:
        read_until(stream, b"data: ")
    return streams


def connections(pid: int, port: int) -> int:
    """How many connections to `port` the process holds."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" and row[9] in inodes for row in rows)


def test_connections_are_spread_evenly() -> None:
    with scripted_server(fronts=3) as server:
        kept = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(30)]
        for connection in kept:
            connection.request("GET", "/live")
            assert connection.getresponse().read()
        held = [connections(pid, server.port) for pid in server.front_pids()]
        assert held == [10, 10, 10]
        for connection in kept[:15]:
            connection.close()
        # Places that come free are filled again, by whoever has most of them.
        wait_until(
            lambda: sum(connections(pid, server.port) for pid in server.front_pids()) == 15,
            "the closed connections to be gone",
        )
        for connection in kept[:15]:
            connection.request("GET", "/live")
            assert connection.getresponse().read()
        # Waited for: on a busy machine a 31st connection, none of these, has been seen here once.
        wait_until(
            lambda: [connections(pid, server.port) for pid in server.front_pids()] == [10, 10, 10],
            "ten connections at each front",
        )


def test_a_front_without_file_descriptors_loses_connections_and_nothing_else() -> None:
    with scripted_server(fronts=2) as server:
        for stream in open_streams(server, 2, max_tokens=1):  # so the engine's own connections to each front are there
            stream.close()
        cramped = server.front_pids()[0]
        before = resource.prlimit(cramped, resource.RLIMIT_NOFILE)
        resource.prlimit(cramped, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{cramped}/fd")) + 3, before[1]))
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        wait_until(lambda: "no file descriptor is left" in server.stderr, "a connection to be lost")
        for connection in crowd:
            connection.close()
        resource.prlimit(cramped, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: [connections(pid, server.port) for pid in server.front_pids()] == [0, 0], "all to be gone")
        kept = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
        # What was lost counts as closed: the others' places are filled evenly.
        wait_until(lambda: [connections(pid, server.port) for pid in server.front_pids()] == [5, 5], "five each")
        assert server.chat("x", max_tokens=1).status == 200
        assert "Traceback" not in server.stderr
        for connection in kept:
            connection.close()
        server.check_no_leak()


def test_every_front_answers_with_the_whole_servers_numbers() -> None:
    with scripted_server("--step-s", "0.01", fronts=3) as server:
        streams = open_streams(server, 9, max_tokens=150)
        pages = [server.metrics() for _ in range(6)]  # each on a connection of its own, so from every front
        assert {page["requests_in_flight"] for page in pages} == {9}
        assert {page["requests_in_flight_peak"] for page in pages} == {9}
        assert {page["front_processes"] for page in pages} == {3}
        assert len({server.request("GET", "/v1/models").body for _ in range(6)}) == 1
        for stream in streams:
            assert read_until(stream, b"[DONE]").count(b'"length"') == 1
        found = server.check_no_leak()
        assert found["generation_tokens_total"] == 9 * 150
        assert found["requests_finished_total"] == found["time_to_first_token_seconds_count"] == 9
        assert found["inter_token_latency_seconds_count"] == 9 * 149
        assert found["num_requests_running"] == 0


def test_the_queue_limit_is_of_all_fronts_together() -> None:
    options = {"engine": {"max_num_seqs": 2}, "max_queue": 5, "request_timeout_s": 2.0}
    with scripted_server("--silent-steps", "1000000", fronts=3, **options) as server, ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(server.chat, "x") for _ in range(20)]
        wait_until(lambda: server.metrics()["requests_rejected_total"] == 13, "13 of 20 to be refused")
        assert server.metrics()["requests_in_flight"] == 7
        assert sorted(answer.result().status for answer in answers) == [429] * 13 + [504] * 7


def test_a_dead_front_takes_only_its_own_requests_and_is_replaced() -> None:
    with scripted_server("--step-s", "0.01", fronts=2) as server:
        streams = open_streams(server, 4, max_tokens=300)
        fronts = server.front_pids()
        os.kill(fronts[0], signal.SIGKILL)
        ends = [b"[DONE]" in read_until(stream, b"[DONE]") for stream in streams]
        assert sorted(ends) == [False, False, True, True]
        wait_until(lambda: len(set(server.front_pids()) - set(fronts)) == 1, "another front process")
        found = server.check_no_leak()
        assert (found["requests_finished_total"], found["requests_failed_total"]) == (2, 2)
        assert "has died: killed by signal 9; 2 open requests failed" in server.stderr
        (new,) = set(server.front_pids()) - set(fronts)
        wait_until(lambda: _serves(server, new), "the new front to serve")
        assert server.request("GET", "/health").status == 200
        assert server.check_no_leak()["requests_failed_total"] == 2


def _serves(server: RunningServer, pid: int) -> bool:
    """Whether of two new connections at least one is at `pid`."""
    streams = open_streams(server, 2, max_tokens=20)
    found = connections(pid, server.port)
    for stream in streams:
        assert b"[DONE]" in read_until(stream, b"[DONE]")
        stream.close()
    return found > 0


def test_a_killed_engine_ends_the_requests_of_every_front() -> None:
    with scripted_server("--step-s", "0.01", fronts=2) as server:
        streams = open_streams(server, 6)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            assert b"engine_dead" in read_until(stream, b"0\r\n\r\n")
        assert [server.request("GET", "/health").status for _ in range(4)] == [503] * 4
        fronts = server.front_pids()
        assert server.wait_exit() == 1
        assert not any(os.path.exists(f"/proc/{pid}") for pid in fronts)
        assert "6 open requests failed" in server.stderr


def test_sigterm_drains_every_front() -> None:
    with scripted_server("--step-s", "0.02", fronts=2) as server:
        streams = open_streams(server, 4, max_tokens=60)
        server.signal()
        wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
        assert [server.chat("new").error["code"] for _ in range(4)] == ["not_ready"] * 4
        for stream in streams:
            assert b"[DONE]" in read_until(stream, b"0\r\n\r\n")
        fronts = server.front_pids()
        assert server.wait_exit(6) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in fronts)


def test_what_does_not_drain_in_time_is_ended_on_every_front() -> None:
    with scripted_server("--step-s", "0.02", drain_timeout_s=0.3, fronts=2) as server:
        streams = open_streams(server, 4)
        server.signal()
        for stream in streams:
            assert b"server_stopping" in read_until(stream, b"0\r\n\r\n")
        assert server.wait_exit(6) == 0


@pytest.mark.parametrize("loading", [True, False])
def test_a_second_signal_ends_every_process_now(loading: bool) -> None:
    with scripted_server("--load-s", "60" if loading else "0", wait=not loading, fronts=2) as server:
        wait_until(lambda: len(server.front_pids()) == 2, "the fronts")
        pids = [server.engine_pid(), *server.front_pids()]
        stream = None if loading else open_streams(server, 1)[0]
        server.signal()
        time.sleep(0.4)
        if stream is not None:
            server.signal()
        assert server.wait_exit(6) == (0 if loading else 130)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all processes to be gone", 3)


def test_every_process_leaves_when_the_server_is_killed() -> None:
    with scripted_server(fronts=3) as server:
        pids = [server.engine_pid(), *server.front_pids()]
        server.process.kill()
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all processes to be gone", 5)


def test_a_profile_may_be_started_and_stopped_at_different_fronts(tmp_path: Any) -> None:
    with scripted_server(profile_dir=str(tmp_path), fronts=2) as server:
        kept = server.connect()  # holds the first place, so that the next two requests go to both fronts
        kept.connect()
        answers = [server.post(path, b"") for path in ("/start_profile", "/stop_profile", "/start_profile")]
        assert [answer.status for answer in answers] == [200] * 3
        kept.close()


def test_a_front_that_was_held_up_sends_what_it_missed_in_few_events() -> None:
    """200 tokens of 2 ms pass while the front stands still; they come as one event, not as 200 in a row."""
    with scripted_server("--step-s", "0.002") as server:
        body = {"model": MODEL, "prompt": list(range(97, 117)), "stream": True, "max_tokens": 600}
        stream = server.open("/v1/completions", body)
        read_until(stream, b"data: ")
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(server.process.pid, signal.SIGCONT)
        data = read_until(stream, b"[DONE]")
        longest = max(len(event) for event in data.split(b"\n\n"))
        assert longest > 200 + 100
        assert data.count(b"data: ") < 600 - 150
        assert server.check_no_leak()["generation_tokens_total"] == 600
