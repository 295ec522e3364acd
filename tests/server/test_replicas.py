"""Several replicas behind one port: who gets what, and what the death of one costs."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from server_harness import MODEL, RunningServer, chat_body, running, scripted_server, wait_until

from meltcore.config import EngineConfig, ServerConfig
from meltcore.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    EngineStats,
    SequenceOutput,
    StepOutputs,
    ToEngine,
)
from meltcore.engine.sampling_params import SamplingParams
from meltcore.errors import ConfigError, RequestError
from meltcore.models.checkpoint import BUNDLED_MODEL
from meltcore.server.board import Board
from meltcore.server.counts import Counts, columns
from meltcore.server.generation import Generation
from meltcore.server.gpus import place_replicas, visible_gpus
from meltcore.server.health import STUCK_AFTER_S, Health
from meltcore.server.open_requests import OpenRequests
from meltcore.server.replica import Replica
from meltcore.server.stuck import StuckWatch
from meltcore.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TOKENIZER = Tokenizer.synthetic_bytes(300)


class Table:
    """The requests of one front of a server, and what it sends to which replica."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.sent: list[tuple[ToEngine, int]] = []
        self.requests = OpenRequests(counts, lambda message, replica: self.sent.append((message, replica)))

    def add(self, *prompt_tokens: int, max_tokens: int = 10) -> Generation:
        generation = Generation("id", arrived_s=0.0, streaming=True)
        for tokens in prompt_tokens:
            generation.add_choice([1] * tokens, SamplingParams(max_tokens=max_tokens), TOKENIZER)
        self.requests.add(generation, 0)
        return generation

    def given(self) -> list[int]:
        return [replica for message, replica in self.sent if isinstance(message, AddRequest)]


def ends(generation: Generation) -> StepOutputs:
    outputs = [SequenceOutput(choice.request_id, [65], "length") for choice in generation.choices]
    return StepOutputs(outputs, EngineStats(), 1.0)


def test_a_request_goes_to_the_replica_with_the_fewest_tokens_to_do() -> None:
    table = Table(Counts(replicas=3))
    long = table.add(1000)  # 1,010 tokens
    for tokens in (100, 40, 30, 30):  # each with 10 of answer
        table.add(tokens)
    assert table.given() == [0, 1, 2, 2, 2]
    table.requests.on_step(ends(long), 0)
    table.add(500)
    assert table.given()[-1] == 0
    # An answer that may be long weighs as much as a long prompt.
    table.add(1, max_tokens=5000)
    table.add(1)
    assert table.given()[-2:] == [1, 2]


def test_several_prompts_of_one_request_are_spread() -> None:
    table = Table(Counts(replicas=2))
    generation = table.add(10, 10, 10, 10)
    assert table.given() == [0, 1, 0, 1]
    table.requests.end(generation, RequestError("gone"), "aborted")
    ids = [choice.request_id for choice in generation.choices]
    aborts = [(message.request_ids, replica) for message, replica in table.sent if isinstance(message, AbortRequests)]
    assert aborts == [(ids[0::2], 0), (ids[1::2], 1)]
    assert [table.counts.open_tokens(replica) for replica in (0, 1)] == [0, 0]


def test_what_other_fronts_have_given_away_counts() -> None:
    board = Board(columns(2), 2)
    first, second = (Table(Counts(board, front, 2)) for front in (0, 1))
    first.add(1000)
    second.add(10)
    second.add(10)
    assert (first.given(), second.given()) == ([0], [1, 1])
    second.counts.forget_open(1)
    assert second.counts.open_requests(1) == 0


def test_a_dead_replica_gets_nothing_and_its_gauges_fall_while_its_counters_stay() -> None:
    table = Table(Counts(replicas=2))
    table.counts.note_step(EngineStats(running=3, waiting=2, steps_total=7, pages_total=10), 1.0, 0)
    table.counts.note_step(EngineStats(running=1, waiting=0, steps_total=5, pages_total=10), 1.0, 1)
    assert table.counts.engines() == EngineStats(running=4, waiting=2, steps_total=12, pages_total=20)
    kept, lost = table.add(10), table.add(10)
    table.counts.note_death(1)
    table.requests.end_all(RequestError("dead", status=500), "failed", replica=1)
    assert (kept.error, lost.error is None) == (None, False)
    table.add(500)
    table.add(500)
    assert table.given() == [0, 1, 0, 0]
    found = table.counts.engines()
    assert (found.running, found.waiting, found.steps_total) == (3, 2, 12)


def test_one_stuck_replica_is_a_problem_of_the_server() -> None:
    counts = Counts(replicas=2)
    health = Health(counts, stuck_after_s=0.02)
    health.set("ready", "ready")
    counts.give(0, 10)
    counts.give(1, 10)
    time.sleep(0.03)
    counts.note_step(EngineStats(), 1.0, 0)
    assert "no step of replica 1 has finished" in (health.problem() or "")
    counts.note_death(1)
    assert health.problem() is None


# --- GPUs


def server_config(*, dp: int, tp: int, device: str = "auto") -> ServerConfig:
    return ServerConfig(engine=EngineConfig(model="m", tp=tp, device=device), dp=dp)


def test_replicas_get_neighbouring_gpus_of_those_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    found = place_replicas(server_config(dp=2, tp=2))
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in found] == ["4,5", "6,GPU-7"]
    assert {place.engine.device for place in found} == {"cuda"}  # never the CPU instead of a GPU that cannot be used
    alone = server_config(dp=1, tp=4, device="cuda:2")
    assert place_replicas(alone) == [(alone.engine, {})]  # it finds its GPUs by itself
    on_cpu = server_config(dp=2, tp=1, device="cpu")
    assert place_replicas(on_cpu) == [(on_cpu.engine, {})] * 2
    with pytest.raises(ConfigError, match=r"--dp 3 wants 6 GPUs \(2 a replica\); 4 are visible"):
        place_replicas(server_config(dp=3, tp=2))
    with pytest.raises(ConfigError, match="--dp must be at most 64; got 65"):
        place_replicas(server_config(dp=65, tp=1, device="cpu"))
    with pytest.raises(ConfigError, match="--device cuda:1 is one GPU"):
        place_replicas(server_config(dp=2, tp=1, device="cuda:1"))


def test_without_a_list_every_gpu_of_the_machine_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == []
    with pytest.raises(ConfigError, match="0 are visible"):
        place_replicas(server_config(dp=2, tp=1, device="cuda"))


# --- whole servers


def stream(server: RunningServer, **fields: Any) -> Any:
    """A stream that is in full flow."""
    connection = server.open(CHAT, chat_body("s", stream=True, **fields))
    data = b""
    while b"data: " not in data:
        data += connection.recv(65_536)
    return connection


def rest(connection: Any) -> bytes:
    data = b""
    while b"0\r\n\r\n" not in data:
        chunk = connection.recv(65_536)
        if not chunk:
            break
        data += chunk
    return data


def by_replica(server: RunningServer, name: str) -> list[float]:
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"meltcore:{name}{{")]


@pytest.mark.parametrize("fronts", [1, 2])
def test_the_death_of_a_replica_fails_its_requests_alone_and_the_others_go_on(fronts: int) -> None:
    with scripted_server("--step-s", "0.01", dp=2, fronts=fronts) as server:
        assert server.request("GET", "/health").json == {"status": "ready", "replicas": "2 of 2"}
        streams = [stream(server, max_tokens=200) for _ in range(6)]
        assert by_replica(server, "replica_requests") == [3, 3]
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        found = [rest(connection) for connection in streams]
        assert sum(b"[DONE]" in data for data in found) == 3
        assert sum(b"the replica that worked on this has died" in data for data in found) == 3
        assert server.request("GET", "/health").json == {"status": "degraded", "replicas": "1 of 2"}
        assert {server.chat("new", max_tokens=3).status for _ in range(4)} == {200}
        page = server.check_no_leak()
        assert (page["requests_finished_total"], page["requests_failed_total"], page["replicas"]) == (7, 3, 1)
        assert by_replica(server, "replica_tokens") == [0]
        assert "replica 0 has died: killed by signal 9; 3 open requests failed; 1 of 2" in server.stderr
        # With the last one goes the server.
        last = stream(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert b"the engine has died" in rest(last)
        assert server.request("GET", "/health").status == 503
        assert server.wait_exit() == 1


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_stopped_replica_fails_its_requests_within_seconds_and_the_others_go_on(fronts: int) -> None:
    with scripted_server("--step-s", "0.01", dp=2, fronts=fronts) as server:
        streams = [stream(server, max_tokens=300) for _ in range(4)]
        stopped = server.engine_pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            found = [rest(connection) for connection in streams]
            assert sum(b"[DONE]" in data for data in found) == 2
            assert sum(b"the replica that worked on this has died" in data for data in found) == 2
            assert server.request("GET", "/health").json == {"status": "degraded", "replicas": "1 of 2"}
            assert {server.chat("new", max_tokens=3).status for _ in range(3)} == {200}
            assert "replica 0 has died: its process is stopped by a signal (killed by signal 9)" in server.stderr
            server.check_no_leak()
        finally:
            if os.path.exists(f"/proc/{stopped}"):
                os.kill(stopped, signal.SIGKILL)


def test_an_engine_stopped_while_it_loads_ends_the_start() -> None:
    with scripted_server("--load-s", "3600", wait=False) as server:
        wait_until(lambda: "scripted" in server.request("GET", "/health").error["message"], "loading")
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert server.wait_exit() == 2
        assert server.stderr.strip().splitlines()[-1] == "meltcore serve: its process is stopped by a signal"


class Idler:
    """A replica that does what the test says, and nothing by itself."""

    def __init__(self, device: str) -> None:
        self.loaded = EngineReady(device, "bfloat16", 64, 8, 300, 64, 64, "dummy", [], 0.0)
        self.stopped = False
        self.failed: list[str] = []

    def is_stopped(self) -> bool:
        return self.stopped

    def fail(self, why: str) -> None:
        self.failed.append(why)


def test_a_replica_without_steps_is_given_up_on_a_gpu_alone_and_only_while_somebody_waits() -> None:
    counts = Counts(replicas=3)
    idlers = [Idler("NVIDIA H200"), Idler("2 x CPU"), Idler("NVIDIA H200")]
    watch = StuckWatch(cast(list[Replica], idlers), counts)
    now_s = time.monotonic()
    for replica in (0, 1):  # the last one has nothing to do
        counts.give(replica, 10)
    for late_s in (1.0, STUCK_AFTER_S - 5, STUCK_AFTER_S + 5, STUCK_AFTER_S + 6):
        watch.look(now_s + late_s)
        assert not any(idler.failed for idler in idlers), "seen for a moment is not enough"
    watch.look(now_s + STUCK_AFTER_S + 20)
    watch.look(now_s + STUCK_AFTER_S + 30)
    assert [len(idler.failed) for idler in idlers] == [1, 0, 0]
    assert "no step has finished for 140 s" in idlers[0].failed[0]


def test_a_replica_that_may_be_writing_a_profile_is_not_given_up() -> None:
    counts = Counts(replicas=1)
    idler = Idler("NVIDIA H200")
    watch = StuckWatch(cast(list[Replica], [idler]), counts, profiles=True)
    now_s = time.monotonic()
    counts.give(0, 10)
    for late_s in (STUCK_AFTER_S + 1, STUCK_AFTER_S + 20):
        watch.look(now_s + late_s)
    assert not idler.failed


def test_a_replica_that_is_stopped_for_a_moment_or_has_nothing_to_do_is_left_alone() -> None:
    counts = Counts(replicas=1)
    idler = Idler("CPU")
    watch = StuckWatch(cast(list[Replica], [idler]), counts)
    now_s = time.monotonic()
    idler.stopped = True
    for late_s in (0.0, 20.0):
        watch.look(now_s + late_s)
    counts.give(0, 10)
    watch.look(now_s + 21)
    watch.look(now_s + 24)
    idler.stopped = False
    watch.look(now_s + 25)
    idler.stopped = True
    watch.look(now_s + 29)
    assert not idler.failed
    watch.look(now_s + 35)
    assert idler.failed == ["its process is stopped by a signal"]


def test_a_replica_that_cannot_load_keeps_the_server_from_starting() -> None:
    with scripted_server("--fail", "no room on this GPU", "--fail-of", "1", dp=2, wait=False) as server:
        assert server.wait_exit() == 2
        assert "replica 1: no room on this GPU" in server.stderr


def test_sigterm_drains_every_replica_and_ends_them_all() -> None:
    with scripted_server("--step-s", "0.02", dp=2) as server:
        streams = [stream(server, max_tokens=40) for _ in range(4)]
        pids = server.engine_pids()
        server.signal()
        assert all(b"[DONE]" in rest(connection) for connection in streams)
        assert server.wait_exit(6) == 0
        assert "Traceback" not in server.stderr
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the engines to be gone", 3)


def test_a_dead_front_frees_its_requests_in_every_replica() -> None:
    with scripted_server("--step-s", "0.01", dp=2, fronts=2) as server:
        streams = [stream(server, max_tokens=300) for _ in range(4)]
        os.kill(server.front_pids()[0], signal.SIGKILL)
        assert sorted(b"[DONE]" in rest(connection) for connection in streams) == [False, False, True, True]
        page = server.check_no_leak()
        assert (page["requests_finished_total"], page["requests_failed_total"]) == (2, 2)
        assert by_replica(server, "replica_requests") == [0, 0]


@pytest.mark.slow
def test_two_real_replicas_answer_alike_and_one_alone_goes_on(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "meltcore.cli.main", "serve", BUNDLED_MODEL, "--port", "0", "--device", "cpu"]
    with running([*serve, "--dp", "2", "--served-model-name", MODEL], tmp_path / "stderr") as server:
        server.wait_healthy(90)
        answers = [server.chat("What is 7 * 8?").json["choices"][0]["message"]["content"] for _ in range(4)]
        assert len(set(answers)) == 1
        assert "56" in answers[0]
        streams = [stream(server, max_tokens=400, ignore_eos=True) for _ in range(4)]
        assert by_replica(server, "replica_requests") == [2, 2]
        os.kill(server.engine_pids()[1], signal.SIGKILL)
        assert sorted(b"[DONE]" in rest(connection) for connection in streams) == [False, False, True, True]
        assert server.chat("What is 7 * 8?").json["choices"][0]["message"]["content"] == answers[0]
        server.check_no_leak()
