"""API servers and supervisors are killed under load: lost requests end, engines stay or end, clients come back."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from server_harness import RunningServer, configure, connections, make_model, running, serve_command
from waiting import WAIT_S, wait_until

from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.settings.fleet_spec import ModelSection

MODELS = ("first", "second")
TOKENS = 40  # 0.2 s of scripted steps
STEP_S = 0.005
CLIENTS = 16


@contextmanager
def two_models(folder: Path, port: int, name: str) -> Iterator[RunningServer]:
    """A fleet of two scripted models and two API servers on `port`."""
    models = {model: ModelSection(checkpoint=str(make_model(folder / model)), load_format="dummy") for model in MODELS}
    for model in MODELS:
        (folder / model / "engine.json").write_text(f'{{"step_s": {STEP_S}}}')
    config = configure(models, port=port, api_server_count=2)
    with running(serve_command(config, policy=RestartAfterPause(first_pause_s=0.05)), folder / name) as server:
        yield server


class Clients:
    """Threads that ask both models, streamed and not, until they are stopped."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        self.ends: Counter[str] = Counter()  # "whole", "lost", "refused" (no server), "503"
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(index,), daemon=True) for index in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"
        assert self.wrong == []

    def wait_whole(self, more: int) -> None:
        wanted = self.ends["whole"] + more
        wait_until(lambda: self.ends["whole"] >= wanted, f"{more} more whole answers")

    def _ask(self, index: int) -> None:
        body = {"model": MODELS[index % 2], "prompt": "ab", "max_tokens": TOKENS, "stream": index % 4 >= 2}
        with httpx.Client(timeout=WAIT_S) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(self.url, json=body)
                except httpx.ConnectError:
                    end = "refused"
                except httpx.TimeoutException as error:  # one whose server is gone ends with it
                    end = "never ended"
                    self.wrong.append(repr(error))
                except httpx.TransportError:
                    end = "lost"
                else:
                    end = self._judge(answer, streamed=bool(body["stream"]))
                with self._lock:
                    self.ends[end] += 1
                if end != "whole":
                    self._stop.wait(0.05)

    def _judge(self, answer: httpx.Response, *, streamed: bool) -> str:
        if answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1:
            return "503"
        last = "data: [DONE]\n\n" if streamed else f'"completion_tokens":{TOKENS},'
        tail = answer.text[-200:]
        if answer.status_code != 200 or last not in tail:
            self.wrong.append(f"{answer.status_code}: {tail}")
        return "whole"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def wait_ready(server: RunningServer) -> None:
    wait_until(lambda: server.request("GET", "/health").json.get("replicas") == "2 of 2", "both models")


def wait_both_serve(server: RunningServer, killed: int) -> None:
    """Until the one in place of `killed` has got connections, too: one that dies before it serves ends its server."""

    def serve() -> bool:
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))
        pids = server.api_server_pids()
        return killed not in pids and [connections(pid, server.port) > 0 for pid in pids] == [True] * 2

    with ExitStack() as stack:
        wait_until(serve, "another API server")


def num_running(server: RunningServer) -> float:
    """How many requests the first model's engine has, by a step of now: without one, the metric is an old step's."""
    assert server.post("/v1/completions", {"model": MODELS[0], "prompt": "ab", "max_tokens": 1}).status == 200
    return server.metrics()["num_requests_running"]


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_api_servers_killed_under_load_are_replaced_and_engines_stay(tmp_path: Path, port: int) -> None:
    with two_models(tmp_path, port, "stderr") as server:
        wait_ready(server)
        engines = server.engine_pids()
        server.check_no_leak()
        files = num_files(server.process.pid)
        with Clients(port) as clients:
            for _ in range(3):
                clients.wait_whole(CLIENTS)
                victim = server.api_server_pids()[0]
                os.kill(victim, signal.SIGKILL)
                wait_both_serve(server, victim)
            clients.wait_whole(3 * CLIENTS)
        long = {"model": MODELS[0], "prompt": "ab", "max_tokens": 4000}  # 20 s
        asking = [server.open("/v1/completions", long) for _ in range(4)]
        wait_until(lambda: num_running(server) >= 4, "the long requests")
        for _ in range(2):  # the new ones, too, before they serve
            victims = server.api_server_pids()
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            wait_until(
                lambda old=victims: len(server.api_server_pids()) == 2 and not {*old} & {*server.api_server_pids()},
                "other API servers",
            )
        for connection in asking:
            assert connection.recv(100) == b"", "no answer"
            connection.close()
        wait_until(lambda: num_running(server) == 0, "the engines to end requests without a client")
        assert server.engine_pids() == engines, "the engines serve the new API servers"
        assert 3 <= clients.ends["lost"] <= 3 * CLIENTS, clients.ends
        found = server.check_no_leak()
        assert found["requests_finished_total"] >= clients.ends["whole"]
        assert server.stderr.count("has died: killed by signal 9") == 7
        wait_until(lambda: num_files(server.process.pid) <= files, "no descriptor of the dead is kept")
        server.signal()
        assert server.wait_exit() == 0
        assert all(map(ended, engines))


@pytest.mark.slow
def test_supervisor_killed_under_load_and_started_again_serves_the_same_clients(tmp_path: Path, port: int) -> None:
    with Clients(port) as clients:
        for number in range(2):
            with two_models(tmp_path, port, f"stderr{number}") as server:
                wait_ready(server)
                clients.wait_whole(2 * CLIENTS)
                pids = [*server.engine_pids(), *server.api_server_pids()]
                assert len(pids) == 4
                server.process.kill()
                wait_until(lambda pids=pids: all(map(ended, pids)), "all processes to be gone")
                assert "Traceback" not in server.stderr
        with two_models(tmp_path, port, "last") as server:  # on the same port, in the same folders
            wait_ready(server)
            clients.wait_whole(2 * CLIENTS)
            last = [*server.engine_pids(), *server.api_server_pids()]
            assert server.request("GET", "/health").status == 200
            clients.__exit__()
            server.check_no_leak()
            server.signal()
            assert server.wait_exit() == 0
            assert all(map(ended, last))
    assert clients.ends["lost"] >= 2, "requests were open when it was killed"
