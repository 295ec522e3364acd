"""Several API server processes behind one port: to clients and dashboards they are one server."""

import http.client
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_harness import MODEL, RunningServer, chat_body, connections, scripted_server
from waiting import WAIT_S, wait_until

CHAT = "/v1/chat/completions"


def read_until(connection: socket.socket, marker: bytes, most: int = 65_536) -> bytes:
    """What comes up to `marker`, and what has come behind it. most: bytes of one read; 1 leaves all behind it."""
    data = b""
    while marker not in data:
        chunk = connection.recv(most)
        if not chunk:
            break
        data += chunk
    return data


def open_streams(server: RunningServer, count: int, **fields: Any) -> list[socket.socket]:
    """`count` running streams, spread over the API servers."""
    streams = [server.open(CHAT, chat_body("s", stream=True, **fields)) for _ in range(count)]
    for stream in streams:
        read_until(stream, b"data: ", most=1)
    return streams


def held(server: RunningServer) -> list[int]:
    """The connections of each API server. Wait for a number: that of a start, long closed, may still be among them."""
    return [connections(pid, server.port) for pid in server.api_server_pids()]


@pytest.mark.slow
def test_connections_are_distributed_evenly() -> None:
    with scripted_server(api_server_count=3) as server:
        kept = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S) for _ in range(30)]
        for connection in kept:
            connection.request("GET", "/live")
            assert connection.getresponse().read()
        wait_until(lambda: held(server) == [10, 10, 10], "ten connections at each API server")
        for connection in kept[:15]:
            connection.close()
        # New connections go to the API servers with the fewest.
        wait_until(lambda: sum(held(server)) == 15, "the closed connections to be gone")
        for connection in kept[:15]:
            connection.request("GET", "/live")
            assert connection.getresponse().read()
        wait_until(lambda: held(server) == [10, 10, 10], "ten connections at each API server")


@pytest.mark.slow
def test_api_server_without_file_descriptors_loses_only_connections() -> None:
    with scripted_server(api_server_count=2) as server:
        for stream in open_streams(server, 2, max_tokens=1):  # so the engine's own connections to each API server exist
            stream.close()
        cramped = server.api_server_pids()[0]
        before = resource.prlimit(cramped, resource.RLIMIT_NOFILE)
        resource.prlimit(
            cramped, resource.RLIMIT_NOFILE, (len(list(Path(f"/proc/{cramped}/fd").iterdir())) + 3, before[1])
        )
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        wait_until(lambda: "no file descriptor is left" in server.stderr, "a connection to be lost")
        for connection in crowd:
            connection.close()
        resource.prlimit(cramped, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: held(server) == [0, 0], "all to be gone")
        kept = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
        # What was lost counts as closed: later connections are distributed evenly.
        wait_until(lambda: held(server) == [5, 5], "five each")
        assert server.chat("x", max_tokens=1).status == 200
        assert "Traceback" not in server.stderr
        for connection in kept:
            connection.close()
        server.check_no_leak()


@pytest.mark.slow
def test_every_api_server_has_the_metrics_of_the_whole_server() -> None:
    with scripted_server("--step-s", "0.01", api_server_count=3) as server:
        streams = open_streams(server, 9, max_tokens=150)
        pages = [server.metrics() for _ in range(6)]  # each on a connection of its own, so from every API server
        assert {page["requests_in_flight"] for page in pages} == {9}
        assert {page["requests_in_flight_peak"] for page in pages} == {9}
        assert {page["api_servers"] for page in pages} == {3}
        assert len({server.request("GET", "/v1/models").body for _ in range(6)}) == 1
        for stream in streams:
            assert read_until(stream, b"[DONE]").count(b'"length"') == 1
        found = server.check_no_leak()
        assert found["generation_tokens_total"] == 9 * 150
        assert found["requests_finished_total"] == found["time_to_first_token_seconds_count"] == 9
        assert found["inter_token_latency_seconds_count"] == 9 * 149
        assert found["num_requests_running"] == 0


@pytest.mark.slow
def test_queue_limit_is_shared_by_all_api_servers() -> None:
    options = {"engine": {"max_num_seqs": 2}, "max_queue": 5, "request_timeout_s": 2.0}
    with (
        scripted_server("--silent-steps", "1000000", api_server_count=3, **options) as server,
        ThreadPoolExecutor(20) as pool,
    ):
        answers = [pool.submit(server.chat, "x") for _ in range(20)]
        wait_until(lambda: server.metrics()["requests_rejected_total"] == 13, "13 of 20 to be refused")
        assert server.metrics()["requests_in_flight"] == 7
        assert sorted(answer.result().status for answer in answers) == [429] * 13 + [504] * 7


@pytest.mark.slow
def test_dead_api_server_fails_only_its_own_requests_and_is_restarted() -> None:
    with scripted_server("--step-s", "0.01", api_server_count=2) as server:
        streams = open_streams(server, 4, max_tokens=300)
        pids = server.api_server_pids()
        os.kill(pids[0], signal.SIGKILL)
        ends = [b"[DONE]" in read_until(stream, b"[DONE]") for stream in streams]
        assert sorted(ends) == [False, False, True, True]
        wait_until(lambda: len(set(server.api_server_pids()) - set(pids)) == 1, "another API server process")
        found = server.check_no_leak()
        assert (found["requests_finished_total"], found["requests_failed_total"]) == (2, 2)
        assert "has died: killed by signal 9; 2 open requests failed" in server.stderr
        (new,) = set(server.api_server_pids()) - set(pids)
        wait_until(lambda: _serves(server, new), "the new API server to serve")
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


@pytest.mark.slow
def test_killed_engine_ends_the_requests_of_all_api_servers() -> None:
    with scripted_server("--step-s", "0.01", api_server_count=2) as server:
        streams = open_streams(server, 6)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            assert b"engine_dead" in read_until(stream, b"0\r\n\r\n")
        assert [server.request("GET", "/health").status for _ in range(4)] == [503] * 4
        pids = server.api_server_pids()
        assert server.wait_exit() == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert "6 open requests failed" in server.stderr


@pytest.mark.slow
def test_sigterm_drains_all_api_servers() -> None:
    with scripted_server("--step-s", "0.02", api_server_count=2) as server:
        streams = open_streams(server, 4, max_tokens=60)
        server.signal()
        wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
        assert [server.chat("new").error["code"] for _ in range(4)] == ["not_ready"] * 4
        for stream in streams:
            assert b"[DONE]" in read_until(stream, b"0\r\n\r\n")
        pids = server.api_server_pids()
        assert server.wait_exit() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_requests_are_ended_after_the_drain_timeout() -> None:
    with scripted_server("--step-s", "0.02", drain_timeout_s=0.3, api_server_count=2) as server:
        streams = open_streams(server, 4)
        server.signal()
        for stream in streams:
            assert b"server_stopping" in read_until(stream, b"0\r\n\r\n")
        assert server.wait_exit() == 0


@pytest.mark.slow
@pytest.mark.parametrize("loading", [True, False])
def test_second_signal_ends_all_processes_now(loading: bool) -> None:
    with scripted_server("--load-s", "60" if loading else "0", wait=not loading, api_server_count=2) as server:
        wait_until(lambda: len(server.api_server_pids()) == 2 and server.engine_pids(), "all processes")
        pids = [server.engine_pid(), *server.api_server_pids()]
        stream = None if loading else open_streams(server, 1)[0]
        server.signal()
        if stream is not None:
            wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
            time.sleep(0.4)
            server.signal()
        assert server.wait_exit() == (0 if loading else 130)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes to be gone")


@pytest.mark.slow
def test_all_processes_exit_when_the_supervisor_is_killed() -> None:
    with scripted_server(api_server_count=3) as server:
        pids = [server.engine_pid(), *server.api_server_pids()]
        server.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes to be gone")


@pytest.mark.slow
def test_profile_can_be_started_and_stopped_at_different_api_servers(tmp_path: Any) -> None:
    with scripted_server(profile_dir=str(tmp_path), api_server_count=2) as server:
        kept = server.connect()  # is the first connection, so that the next two requests go to both API servers
        kept.connect()
        answers = [server.post(path, b"") for path in ("/start_profile", "/stop_profile", "/start_profile")]
        assert [answer.status for answer in answers] == [200] * 3
        kept.close()


@pytest.mark.slow
def test_profile_that_gets_no_answer_ends_with_the_server(tmp_path: Path) -> None:
    """Nsight Systems ends a server at the end of the range, while the engine may still be writing."""
    with scripted_server(profile_dir=str(tmp_path)) as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        asked = server.open("/stop_profile", {})
        time.sleep(0.3)
        server.signal()
        assert read_until(asked, b"never") == b"", "disconnected"
        asked.close()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr


@pytest.mark.slow
def test_delayed_api_server_sends_missed_tokens_in_few_events() -> None:
    """About 300 tokens pass while the API server is stopped; they come in few events, one of 40 tokens or more."""
    with scripted_server("--step-s", "0.002") as server:
        body = {"model": MODEL, "prompt": list(range(97, 117)), "stream": True, "max_tokens": 600}
        stream = server.open("/v1/completions", body)
        (api_server,) = server.api_server_pids()
        read_until(stream, b"data: ")
        os.kill(api_server, signal.SIGSTOP)
        time.sleep(2.0)  # a step takes several times as long on a busy machine
        os.kill(api_server, signal.SIGCONT)
        data = read_until(stream, b"[DONE]")
        longest = max(len(event) for event in data.split(b"\n\n"))
        assert longest > 200 + 40
        assert data.count(b"data: ") < 600 - 150
        assert server.check_no_leak()["generation_tokens_total"] == 600
