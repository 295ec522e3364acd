"""Faults of clients and the engine, and time limits: only affected requests fail, and nothing leaks."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from server_harness import MODEL, RunningServer, chat_body, make_model, scripted_server, serve_command, server_config
from waiting import WAIT_S, wait_until

from meltcore.settings.fleet_spec import ModelSection

CHAT = "/v1/chat/completions"


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    """Read until `marker` has come or the server has closed; returns all that came."""
    data = b""
    while marker not in data:
        chunk = connection.recv(65_536)
        if not chunk:
            break
        data += chunk
    return data


def reset(connection: socket.socket) -> None:
    """Close with a reset, as a killed client's machine would."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.slow
def test_client_disconnect_before_the_first_token_frees_its_request() -> None:
    """Streamed or not, and after a long body, whose reading was paused."""
    bodies = [chat_body(stream=True), chat_body(stream=False), chat_body("x" * 2_500_000)]
    with scripted_server("--silent-steps", "100000", engine={"max_model_len": 2**24}) as server:
        for aborted, body in enumerate(bodies, 1):
            connection = server.open(CHAT, body)
            server.wait_metric("requests_in_flight", 1)
            connection.close()
            assert server.check_no_leak()["requests_aborted_total"] == aborted


@pytest.mark.slow
def test_request_ends_with_its_client(tmp_path: Path) -> None:
    """From the client's close to the abort in the engine, long before the request's own end."""
    log = tmp_path / "aborts"
    log.touch()
    ways = [(leave, stream) for leave in (socket.socket.close, reset) for stream in (True, False)]
    with scripted_server("--step-s", "0.01", "--abort-log", str(log)) as server:
        for leave, stream in ways:
            num_before = log.read_text().count("\n")
            connection = server.open(CHAT, chat_body(stream=stream))
            server.wait_metric("num_requests_running", 1)
            leave(connection)
            wait_until(lambda before=num_before: log.read_text().count("\n") > before, "the abort")
            wait_until(lambda: server.metrics()["num_requests_running"] == 0, "the end in the metrics")
        assert server.check_no_leak()["requests_aborted_total"] == len(ways)


@pytest.mark.slow
def test_client_disconnect_after_a_pipelined_request_frees_its_request() -> None:
    with scripted_server("--step-s", "0.05", engine={"max_model_len": 2**24}) as server:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 10_000}
        connection = server.open("/v1/completions", body)
        server.wait_metric("requests_in_flight", 1)
        data = json.dumps(body).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        assert server.chat("x", max_tokens=1).status == 200  # the second request has arrived by then
        connection.close()
        found = server.check_no_leak()
        assert (found["requests_accepted_total"], found["requests_aborted_total"]) == (2, 1)


@pytest.mark.slow
def test_client_disconnects_during_tokenization_free_their_requests() -> None:
    with scripted_server("--silent-steps", "100000", engine={"max_model_len": 2**24}) as server:
        for wait_ms in range(20):
            connection = server.open(CHAT, chat_body("x" * 60_000))
            time.sleep(wait_ms / 1000)
            connection.close()
        found = server.check_no_leak()
        assert found["requests_accepted_total"] == found["requests_aborted_total"] > 0


@pytest.mark.slow
def test_client_disconnect_while_streaming_aborts_only_its_request() -> None:
    ways = [(leave, stream) for leave in (socket.socket.close, reset) for stream in (True, False)]
    with scripted_server("--step-s", "0.01") as server:
        for ended, (leave, stream) in enumerate(ways, 1):
            before = server.metrics()["generation_tokens_total"]
            staying = server.open(CHAT, chat_body("stay", stream=True, max_tokens=100))
            leaving = server.open(CHAT, chat_body("leave", stream=stream))
            server.wait_metric("generation_tokens_total", before + 6)
            leave(leaving)
            assert read_until(staying, b"[DONE]").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            found = server.check_no_leak()
            assert (found["requests_finished_total"], found["requests_aborted_total"]) == (ended, ended)


@pytest.mark.slow
def test_client_disconnects_around_the_last_step_leak_nothing() -> None:
    with scripted_server("--step-s", "0.005") as server:
        for tokens in range(1, 25):
            connection = server.open(CHAT, chat_body("x", stream=True, max_tokens=tokens))
            time.sleep(0.06)
            connection.close()
        found = server.check_no_leak()
        assert found["requests_accepted_total"] == 24
        assert found["requests_failed_total"] == 0


@pytest.mark.slow
def test_half_sent_request_is_dropped_without_a_log_line() -> None:
    with scripted_server() as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{")
        connection.close()
        assert server.chat("x", max_tokens=1).status == 200
        assert server.check_no_leak()["requests_accepted_total"] == 1


@pytest.mark.slow
def test_slow_reader_is_disconnected_and_others_continue() -> None:
    options = ("--tokens-per-step", "1000", "--step-s", "0.001")
    with scripted_server(*options, engine={"max_model_len": 2**24}) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps({"model": MODEL, "prompt": [300, 301, 302], "stream": True, "max_tokens": 16_000_000})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        slow.sendall(head.encode() + body.encode())
        wait_until(lambda: server.metrics()["requests_aborted_total"] == 1, "the slow reader to be aborted")
        assert server.chat("fast", max_tokens=2000).json["usage"]["completion_tokens"] == 2000
        found = server.check_no_leak()
        assert (found["requests_finished_total"], found["requests_aborted_total"]) == (1, 1)
        slow.close()


@pytest.mark.slow
def test_full_queue_is_429_and_running_requests_continue() -> None:
    with scripted_server("--step-s", "0.02", engine={"max_num_seqs": 1}, max_queue=1) as server:
        with ThreadPoolExecutor(2) as pool:
            fitting = [pool.submit(server.chat, "x", max_tokens=30) for _ in range(2)]
            server.wait_metric("requests_in_flight", 2)
            refused = server.chat("x", max_tokens=1)
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.error["type"] == "rate_limit_error"
            assert [answer.result().status for answer in fitting] == [200, 200]
        found = server.check_no_leak()
        assert (found["requests_accepted_total"], found["requests_rejected_total"]) == (2, 1)


@pytest.mark.slow
def test_queue_full_by_tokens_is_429_but_one_long_prompt_enters() -> None:
    with scripted_server("--silent-steps", "100000", max_queue_tokens=50) as server:
        first = server.open(CHAT, chat_body("x" * 80))
        server.wait_metric("requests_in_flight", 1)
        assert server.chat("y").status == 429
        first.close()
        server.check_no_leak()


@pytest.mark.slow
def test_request_past_its_time_limit_is_ended_with_504() -> None:
    with scripted_server("--silent-steps", "100000", request_timeout_s=0.3) as server:
        for ended, stream in enumerate((True, False), 1):
            answer = server.chat("x", stream=stream)
            assert answer.status == 504
            assert "0.3 s" in answer.error["message"]
            assert server.check_no_leak()["requests_aborted_total"] == ended


@pytest.mark.slow
def test_stream_past_its_time_limit_gets_an_error_event() -> None:
    with scripted_server("--step-s", "0.02", request_timeout_s=0.4) as server:
        data = read_until(server.open(CHAT, chat_body(stream=True)), b"0\r\n\r\n")
        assert b"event: error\ndata: " in data
        assert b"request_timeout" in data
        assert b"[DONE]" not in data
        server.check_no_leak()


@pytest.mark.slow
def test_request_refused_by_the_engine_is_500_and_others_continue() -> None:
    with scripted_server("--step-s", "0.005") as server:
        staying = server.open(CHAT, chat_body("stay", stream=True, max_tokens=60))
        refused = server.post("/v1/completions", {"model": MODEL, "prompt": [[97], [0]]})
        assert (refused.status, refused.error["message"]) == (500, "scripted failure")
        assert b"[DONE]" in read_until(staying, b"[DONE]")
        found = server.check_no_leak()
        assert found["requests_finished_total"] == 1


def start_requests(server: RunningServer, pool: ThreadPoolExecutor) -> tuple[list[socket.socket], list[Any]]:
    """Five running streams and five pending unstreamed answers."""
    streams = [server.open(CHAT, chat_body("s", stream=True)) for _ in range(5)]
    whole = [pool.submit(server.chat, "w") for _ in range(5)]
    server.wait_metric("requests_in_flight", 10)
    for stream in streams:
        read_until(stream, b"data: ")
    return streams, whole


@pytest.mark.slow
def test_killed_engine_ends_every_request_and_the_server() -> None:
    with scripted_server("--step-s", "0.01") as server, ThreadPoolExecutor(5) as pool:
        streams, whole = start_requests(server, pool)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            data = read_until(stream, b"0\r\n\r\n")
            assert b"event: error\ndata: " in data
            assert b"engine_dead" in data
        for answer in whole:
            assert (answer.result().status, answer.result().error["code"]) == (503, "engine_dead")
        assert server.request("GET", "/health").status == 503
        assert server.chat("late").status == 503
        found = server.metrics()
        assert (found["requests_in_flight"], found["requests_failed_total"]) == (0, 10)
        assert server.wait_exit() == 1
        assert "killed by signal 9" in server.stderr


@pytest.mark.slow
def test_sigterm_when_idle_exits_immediately() -> None:
    with scripted_server() as server:
        engine = server.engine_pid()
        server.signal()
        assert server.wait_exit() == 0
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_sigterm_drains_open_requests_and_refuses_new_ones() -> None:
    with scripted_server("--step-s", "0.02") as server:
        stream = server.open(CHAT, chat_body("s", stream=True, max_tokens=150))
        read_until(stream, b"data: ")
        server.signal()
        wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
        refused = server.chat("new")
        assert (refused.status, refused.error["code"]) == (503, "not_ready")
        assert b"[DONE]" in read_until(stream, b"0\r\n\r\n")
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_requests_past_the_drain_timeout_end_with_an_error() -> None:
    with scripted_server("--step-s", "0.02", drain_timeout_s=0.3) as server, ThreadPoolExecutor(5) as pool:
        streams, whole = start_requests(server, pool)
        server.signal()
        for stream in streams:
            assert b"server_stopping" in read_until(stream, b"0\r\n\r\n")
        assert [answer.result().status for answer in whole] == [503] * 5
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_half_sent_request_does_not_delay_or_log_at_shutdown() -> None:
    with scripted_server() as server:
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{")
        assert server.chat("x", max_tokens=1).status == 200
        server.signal()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr
        half.close()


@pytest.mark.slow
def test_second_signal_exits_now() -> None:
    with scripted_server("--step-s", "0.02") as server:
        engine = server.engine_pid()
        stream = server.open(CHAT, chat_body("s", stream=True))
        read_until(stream, b"data: ")
        server.signal()
        wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
        time.sleep(0.3)
        server.signal()
        assert server.wait_exit() == 130
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine to be gone")


@pytest.mark.slow
def test_signal_sent_twice_in_quick_succession_drains() -> None:
    """As `timeout` does: it signals its child, then the group that the child is in."""
    with scripted_server("--step-s", "0.01") as server:
        stream = server.open(CHAT, chat_body("s", stream=True, max_tokens=60))
        read_until(stream, b"data: ")
        server.signal(signal.SIGINT)
        server.signal(signal.SIGTERM)
        assert b"[DONE]" in read_until(stream, b"0\r\n\r\n")
        assert server.wait_exit() == 0


@contextmanager
def on_sighup(action: signal.Handlers) -> Iterator[None]:
    """The SIGHUP handler that started servers inherit; these tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_sighup_drains_and_a_second_one_does_not_force_the_exit(times: int) -> None:
    """The kernel sends it to a server whose terminal is gone, and the shell does too."""
    with on_sighup(signal.SIG_DFL), scripted_server("--step-s", "0.02") as server:
        stream = server.open(CHAT, chat_body("s", stream=True, max_tokens=150))
        read_until(stream, b"data: ")
        server.signal(signal.SIGHUP)
        wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
        if times == 2:
            time.sleep(0.3)
            server.signal(signal.SIGHUP)
        assert b"[DONE]" in read_until(stream, b"0\r\n\r\n")
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_sighup_stays_ignored_under_nohup() -> None:
    with on_sighup(signal.SIG_IGN), scripted_server() as server:
        server.signal(signal.SIGHUP)
        time.sleep(0.3)
        assert server.chat("x", max_tokens=3).status == 200
        assert server.request("GET", "/health").status == 200
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_server_continues_when_its_output_is_not_read() -> None:
    """As under `| head -1`, or a program that wants nothing but the port."""
    with scripted_server("--load-s", "1", wait=False) as server:
        assert server.process.stdout is not None
        server.process.stdout.close()
        server.wait_healthy()
        assert server.chat("x", max_tokens=3).status == 200
        server.signal()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr


@pytest.mark.slow
def test_server_continues_without_its_terminal(tmp_path: Path) -> None:
    """The server prints while loading, for requests and at its exit."""
    ours, theirs = os.openpty()
    model = ModelSection(checkpoint=str(make_model(tmp_path / "model")), load_format="dummy")
    command = serve_command(server_config(model), "--load-s", "1")
    with on_sighup(signal.SIG_DFL):
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        with os.fdopen(ours, errors="replace") as terminal:
            address = urlsplit(terminal.readline().split()[-1]).netloc
        wait_until(lambda: status(address) == 200, "ready")
        process.send_signal(signal.SIGHUP)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def status(address: str) -> int:
    """The status code of /health, 200 or not."""
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow
def test_sockets_of_a_killed_server_are_removed_by_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="m") as name:
        monkeypatch.setenv("TMPDIR", name)
        with scripted_server() as server:
            (left,) = Path(name).glob("meltcore-server-*")
            server.process.kill()
            server.process.wait()
        assert left.exists()
        with scripted_server() as server:
            (own,) = Path(name).glob("meltcore-server-*")
            assert own != left
            server.signal()
            assert server.wait_exit() == 0
            assert not own.exists()


@pytest.mark.slow
def test_port_answers_503_while_loading() -> None:
    with scripted_server("--load-s", "4", wait=False) as server:
        wait_until(lambda: "scripted" in server.request("GET", "/health").error["message"], "the stage to be reported")
        assert server.request("GET", "/live").status == 200
        answer = server.chat("early")
        assert answer.status == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 5, "no start before tells how long it takes"
        server.wait_healthy()
        assert server.chat("x", max_tokens=1).status == 200


def error_lines(server: RunningServer) -> list[str]:
    """All of stderr except the progress of loading, so that a traceback is seen."""
    return [line for line in server.stderr.splitlines() if not line.startswith("meltcore: loading: ")]


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_while_loading_exits_immediately(signals: int) -> None:
    with scripted_server("--load-s", "60", wait=False) as server:
        wait_until(lambda: "scripted" in server.request("GET", "/health").error["message"], "loading")
        for _ in range(signals):
            server.signal()
        assert server.wait_exit() in ((0,) if signals == 1 else (0, 130))
        assert error_lines(server) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [(("--fail", "model.safetensors: shard 2 is cut short"), "shard 2 is cut short"), (("--die-loading",), "status 3")],
)
def test_failed_start_prints_one_line(option: tuple[str, ...], said: str) -> None:
    with scripted_server(*option, wait=False) as server:
        assert server.wait_exit() == 2
        (line,) = error_lines(server)
        assert line.startswith("meltcore serve: ")
        assert said in line


@pytest.mark.slow
def test_bad_tokenizer_during_loading_prints_one_line(tmp_path: Path) -> None:
    """The API servers find it while the engine loads, whose start is cancelled."""
    model = make_model(tmp_path / "model")
    (model / "tokenizer.json").write_text('{"model": ')
    with scripted_server("--load-s", "60", wait=False, engine={"checkpoint": str(model)}) as server:
        assert server.wait_exit() == 2
        (line,) = error_lines(server)
        assert line.startswith("meltcore serve: ")
        assert "tokenizer.json" in line


def test_missing_folder_fails_immediately() -> None:
    with scripted_server(wait=False, engine={"checkpoint": "./nowhere"}) as server:
        assert server.wait_exit() == 2
        assert "./nowhere: no such folder" in server.stderr


def test_port_in_use_fails_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with scripted_server("--load-s", "60", wait=False, port=port) as server:
            assert server.wait_exit() == 2
            assert f"port {port}: Address already in use" in server.stderr


@pytest.mark.slow
def test_engine_exits_when_the_supervisor_is_killed() -> None:
    with scripted_server() as server:
        engine = server.engine_pid()
        server.process.kill()
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine to be gone")


@pytest.mark.slow
def test_two_clients_with_the_same_request_id_both_get_their_answers() -> None:
    with scripted_server("--step-s", "0.01") as server, ThreadPoolExecutor(4) as pool:
        headers = {"x-request-id": "same"}
        texts = [f"client {n}" for n in range(4)]
        bodies = [chat_body(text, max_tokens=len(text), stream=False) for text in texts]
        answers = [pool.submit(server.post, CHAT, body, headers) for body in bodies]
        assert [answer.result().json["choices"][0]["message"]["content"] for answer in answers] == texts
        assert server.check_no_leak()["requests_finished_total"] == 4


@pytest.mark.slow
def test_tokenizing_or_detokenizing_long_text_does_not_delay_streams() -> None:
    engine = {"max_model_len": 10**6}  # twice its tokens are counted
    cases: list[tuple[str, Any, str, object]] = [
        ("/tokenize", {"prompt": "word " * 400_000}, "count", 2_000_000),
        ("/detokenize", {"tokens": [1] * 2_500_000}, "prompt", "\x01" * 2_500_000),
    ]
    with scripted_server("--step-s", "0.01", engine=engine) as server, ThreadPoolExecutor(1) as pool:
        for path, body, field, answer in cases:
            stream = server.open(CHAT, chat_body("s", stream=True, max_tokens=100))
            read_until(stream, b"data: ")
            (api_server,) = server.api_server_pids()
            long = pool.submit(server.post, path, body)
            longest_cpu_s = longest_turn_cpu_s(stream, api_server)
            assert long.result().json[field] == answer
            assert longest_cpu_s < 0.25
            server.check_no_leak()


@pytest.mark.slow
def test_large_logprobs_response_does_not_delay_streams() -> None:
    options = ("--step-s", "0.02", "--tokens-per-step", "1000")
    with scripted_server(*options, engine={"max_model_len": 10**6}) as server, ThreadPoolExecutor(1) as pool:
        stream = server.open(CHAT, chat_body("s", stream=True, max_tokens=200_000))
        read_until(stream, b"data: ")
        (api_server,) = server.api_server_pids()
        whole = pool.submit(server.chat, "a", max_tokens=90_000, logprobs=True, top_logprobs=20)
        longest_cpu_s = longest_turn_cpu_s(stream, api_server)
        # Encoding these logprobs takes 0.7 s of CPU. On the event loop, all of it falls between two events of the
        # stream; encoded in another thread, 0.015 s of the event loop's CPU does.
        assert longest_cpu_s < 0.25
        assert len(whole.result().json["choices"][0]["logprobs"]["content"]) == 90_000
        server.check_no_leak()


def longest_turn_cpu_s(stream: socket.socket, pid: int) -> float:
    """The most CPU time of a process's main thread between two events of a stream, up to its end."""
    longest_s, last_s = 0.0, main_thread_cpu_s(pid)
    data = b""
    while b"[DONE]" not in data:
        data = data[-20:] + stream.recv(4096)
        now_s = main_thread_cpu_s(pid)
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


def main_thread_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
