"""Several replicas behind one port: load balancing, and the death of one."""

import os
import signal
import sys
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from exchanges import new_exchange
from open_tickets import open_requests, start
from server_harness import MODEL, RunningServer, chat_body, configure, running, scripted_server
from waiting import wait_until

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError, RequestError
from meltcore.fleet.plan.first_fit import Place
from meltcore.fleet.plan.placement import (
    PlacedFleet,
    cpu_environment,
    engine_config,
    gpu_ranks,
    shared_engine,
    visible_gpus,
)
from meltcore.fleet.processes.engine_process import EngineProcess
from meltcore.fleet.processes.stuck_watch import StuckWatch, engine_problem
from meltcore.fleet.run.engines import place_replicas
from meltcore.fleet.run.replica import Replica
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL
from meltcore.protocol.generation import AddRequest, EngineStats, GenerationReady, SequenceOutput, StepOutputs, ToEngine
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests
from meltcore.protocol.step_marks import StepMarks
from meltcore.protocol.step_sums import NUM_SUMS, STEP_KINDS, StepKind
from meltcore.serve.requests.backend import STUCK_AFTER_S, Health
from meltcore.serve.requests.exchange import set_exchange
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket
from meltcore.serve.tasks.generation.open_requests import REQUEST_TOKENS
from meltcore.settings.config import SharingSection
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TOKENIZER = Tokenizer.synthetic_bytes(300)


class Table:
    """The requests of one API server, and what it sends to which replica."""

    def __init__(self, stats: ModelStats) -> None:
        set_exchange(new_exchange())
        self.stats = stats
        self.sent: list[tuple[ToEngine, int]] = []
        self.requests = open_requests(stats, lambda message, replica: self.sent.append((message, replica)))

    def add(self, *prompt_tokens: int, max_tokens: int = 10) -> GenerationTicket:
        ticket = GenerationTicket(arrived_s=0.0, streaming=True)
        for tokens in prompt_tokens:
            Choice(ticket, [1] * tokens, SamplingParams(max_tokens=max_tokens), TOKENIZER)
        start(self.requests, ticket)
        return ticket

    def given(self) -> list[int]:
        return [replica for message, replica in self.sent if isinstance(message, AddRequest)]


def model_stats(replicas: int) -> ModelStats:
    return ServerStats((replicas,)).models[0]


def ends(ticket: GenerationTicket) -> StepOutputs:
    outputs = [SequenceOutput(choice.request_id, [65], "length") for choice in ticket.choices]
    return StepOutputs(outputs, EngineStats(), 1.0)


def test_request_goes_to_the_replica_with_the_fewest_open_tokens() -> None:
    table = Table(model_stats(3))
    long = table.add(3 * REQUEST_TOKENS)  # it weighs as much as four short ones
    for tokens in (100, 40, 90, 20, 10):
        table.add(tokens)
    assert table.given() == [0, 1, 2, 2, 1, 1]
    table.requests.on_step(ends(long), 0)
    table.add(500)
    assert table.given()[-1] == 0


def test_answer_without_a_limit_counts_as_one_of_the_usual_length() -> None:
    table = Table(model_stats(2))
    table.requests.usual_output_tokens = 500.0
    unlimited = table.add(10, max_tokens=4000)  # what the model allows
    limited = [table.add(10, max_tokens=240) for _ in range(4)]
    assert table.given() == [0, 1, 1, 0, 1]
    table.requests.usual_output_tokens = 100.0  # what is counted is taken back, not what would be counted now
    for ticket in (unlimited, *limited):
        table.requests.end(ticket, RequestError("gone"), "aborted")
    assert [table.stats.open_tokens(replica) for replica in (0, 1)] == [0, 0]


def test_prompts_of_one_request_are_distributed() -> None:
    table = Table(model_stats(2))
    ticket = table.add(10, 10, 10, 10)
    assert table.given() == [0, 1, 0, 1]
    table.requests.end(ticket, RequestError("gone"), "aborted")
    ids = [choice.request_id for choice in ticket.choices]
    aborts = [(message.request_ids, replica) for message, replica in table.sent if isinstance(message, AbortRequests)]
    assert aborts == [(ids[0::2], 0), (ids[1::2], 1)]
    assert [table.stats.open_tokens(replica) for replica in (0, 1)] == [0, 0]


def test_requests_of_other_api_servers_count() -> None:
    one = ServerStats((2,), num_processes=2)
    other = ServerStats((2,), num_processes=2, process_index=1, fds=one.fds)
    first, second = (Table(server.models[0]) for server in (one, other))
    first.add(1000)
    second.add(10)
    second.add(10)
    assert (first.given(), second.given()) == ([0], [1, 1])
    second.stats.fail_process_requests(1)
    assert second.stats.open_requests(1) == 0


def sums(steps: int) -> bytes:
    """The sums of an engine whose steps all had one row."""
    first = STEP_KINDS.index(StepKind("decode", 1)) * 4
    return array("d", [0.0] * first + [steps, 0.5 * steps, steps, 0.0] + [0.0] * (NUM_SUMS - first - 4)).tobytes()


def test_dead_replica_gets_no_requests_and_keeps_its_counters() -> None:
    table = Table(model_stats(2))
    table.stats.record_step(
        EngineStats(running=3, waiting=2, prompt_tokens_total=7, step_sums=sums(7), num_pages=10), 1.0, 0
    )
    table.stats.record_step(
        EngineStats(running=1, waiting=0, prompt_tokens_total=5, step_sums=sums(5), num_pages=10), 1.0, 1
    )
    both = EngineStats(running=4, waiting=2, prompt_tokens_total=12, step_sums=sums(12), num_pages=20)
    assert table.stats.engines() == both
    kept, lost = table.add(10), table.add(10)
    table.stats.mark_replica_dead(1)
    table.requests.end_all(RequestError("dead", status=500), "failed", replica=1)
    assert (kept.error, lost.error is None) == (None, False)
    table.add(500)
    table.add(500)
    assert table.given() == [0, 1, 0, 0]
    found = table.stats.engines()
    assert (found.running, found.waiting, found.prompt_tokens_total) == (3, 2, 12)
    assert found.step_sums == sums(12)


def test_sleeping_replica_runs_nothing_whatever_its_last_message_says() -> None:
    """Its last step may have run a request that was aborted since. While it falls asleep, open requests still run."""
    stats = model_stats(1)
    stats.assign(0, 10)
    stats.record_step(EngineStats(running=1, step_sums=sums(7)), 1.0, 0)
    stats.mark_replica_asleep(0)
    assert stats.engines() == EngineStats(running=1, step_sums=sums(7))
    stats.unassign(0, 10)
    assert stats.engines() == EngineStats(step_sums=sums(7))


def test_one_stuck_replica_makes_the_server_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    stats = model_stats(2)
    health = Health(stats, stuck_after_s=2.0)
    health.set("ready", "ready")
    stats.assign(0, 10)
    stats.assign(1, 10)
    now_s[0] += 3
    stats.record_step(EngineStats(), 1.0, 0)
    assert "no step of replica 1 has finished" in (health.problem() or "")
    stats.mark_replica_dead(1)
    assert health.problem() is None


# --- GPUs and cores


def section(replicas: int = 1, tensor_parallel_size: int = 1, device: Any = "auto", **fields: Any) -> ModelSection:
    return ModelSection(
        checkpoint="m", replicas=replicas, tensor_parallel_size=tensor_parallel_size, device=device, **fields
    )


def placed(model: ModelSection) -> list[Replica]:
    """The replicas of the only model of a server."""
    return place_replicas(configure({"m": model}), "m")


def threads(*models: ModelSection) -> list[str | None]:
    """The OMP_NUM_THREADS of the first engine of each model of a server."""
    fleet = configure({str(index): model for index, model in enumerate(models)})
    first = [place_replicas(fleet, name)[0] for name in fleet.spec.models]
    found = [{} if replica.gpu_names else cpu_environment(fleet.spec, replica.model) for replica in first]
    return [environment.get("OMP_NUM_THREADS") for environment in found]


def test_replicas_get_neighboring_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    found = placed(section(2, 2))
    assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in found] == ["4,5", "6,GPU-7"]
    assert [sorted(replica.gpu_names) for replica in found] == [["4", "5"], ["6", "GPU-7"]]
    assert {replica.engine.device for replica in found} == {"cuda"}  # never the CPU instead of a GPU
    for alone in (section(1, 4, "cuda"), section(2, device="cpu")):  # they find their GPUs by themselves, or need none
        found = placed(alone)
        assert [(each.index, each.model) for each in found] == [(index, "m") for index in range(alone.replicas)]
        for each in found:
            assert (each.engine, each.environment, each.node, each.gpus) == (engine_config(alone), {}, "", ())
    (third,) = placed(section(device=(2,)))
    assert (third.environment["CUDA_VISIBLE_DEVICES"], third.engine.device) == ("6", "cuda")
    with pytest.raises(ConfigError, match=r"models\.m\.replicas: got 3, which needs 6 GPUs \(2 each\); 4 are visible"):
        placed(section(3, 2))


def test_flags_name_the_gpus_of_one_replica(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PlacedFleet] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("meltcore.fleet.supervisor.serve", lambda fleet: seen.append(fleet) or 0)
    assert main(["serve", "meltcore/sums", "--device", "cuda:2", "-tp", "2"]) == 0
    assert seen[0].spec.models["meltcore/sums"].device == (2, 3)
    assert main(["serve", "meltcore/sums", "--device", "cuda:1", "-dp", "2"]) == 2
    assert "--device cuda:1 is one GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "meltcore/sums", "-dp", "65"])
    assert "argument -dp/--data-parallel-size: '65' is not a whole number of at least 1 and at most 64" in " ".join(
        capsys.readouterr().err.split()
    )


def test_engines_on_the_cpu_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    alone, pair = (section(replicas, device="cpu") for replicas in (1, 2))
    on_gpu, asleep = section(), [section(device="cpu", residency="sleepable")] * 5
    assert threads(alone) == ["16"]
    assert threads(alone, on_gpu) == ["16", None]
    assert threads(alone, alone) == ["8", "8"]
    assert threads(alone, pair, alone) == ["4", "4", "4"]
    assert threads(alone, *asleep) == ["8"] * 6, "of those that take turns one runs"
    assert threads(*[alone] * 30) == ["1"] * 30
    assert threads(*asleep) == ["16"] * 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(alone) == [None], "the engine inherits it"


def test_engines_on_gpus_know_how_many_ranks_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    pair, on_cpu = section(2, 2), section(3, device="cpu")
    models = {"pair": pair, "on_cpu": on_cpu, "named": section(2, device=(0, 1))}
    models |= {"on_nodes": section(3, 2, (0, 1, 2, 3, 4, 5)), "on_cpu_of_node": section(device="cpu")}
    fleet = msgspec.structs.replace(
        configure(models),
        places={"on_nodes": tuple(Place(node, (0, 1)) for node in "aba"), "on_cpu_of_node": (Place("a", ()),)},
    )
    assert [gpu_ranks(fleet, node) for node in ("", "a", "b", "c")] == [6, 4, 2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_ranks(configure({"pair": pair, "on_cpu": on_cpu}), "") == 0


def test_models_that_are_awake_together_on_the_cpu_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that take turns in host memory share the room of the largest, so several small ones run beside each other.

    Before, each of them got all cores: threads that share a core wait for each other at every operation.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))

    def model(gib: int, replicas: int = 1, residency: str = "sleepable") -> ModelSection:
        return section(replicas, device="cpu", memory=gib * 2**30, residency=residency)

    large, small = model(32), [model(8)] * 3
    assert threads(large, *small) == ["16", "5", "5", "5"]
    assert threads(large, *small, model(1, residency="always_on")) == ["8", "4", "4", "4", "4"]
    assert threads(large, model(8, 2), model(20)) == ["16", "8", "16"]
    assert threads(model(8), model(8)) == ["16", "16"]


def test_engines_of_a_gpu_have_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7/x")
    server = SharingSection(min_share=0.3)

    def marks(device: Any, tensor_parallel_size: int = 1) -> list[str]:
        (replica,) = placed(section(1, tensor_parallel_size, device))
        engine = shared_engine(replica.engine, replica.gpu_names, server, "batch", tmp_path)
        assert engine.sharing is not None
        assert (engine.sharing.priority_class, engine.sharing.min_share) == ("batch", 0.3)
        for path in engine.sharing.marks:
            StepMarks(Path(path), "batch")  # the engine can open it
        return [Path(path).name for path in engine.sharing.marks]

    assert marks((1,)) == marks((1,)) == ["marks-5"]
    assert marks("auto", 2) == ["marks-4", "marks-5"]
    assert marks((2,)) == ["marks-GPU-7-x"]
    assert marks("cpu") == ["marks-cpu"]
    (replica,) = placed(section())
    assert shared_engine(replica.engine, (), SharingSection(means="none"), "batch", tmp_path) is replica.engine


def test_all_gpus_are_visible_without_cuda_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == []
    with pytest.raises(ConfigError, match="0 are visible"):
        placed(section(2, device="cuda"))


# --- whole servers


def stream(server: RunningServer, **fields: Any) -> Any:
    """A running stream."""
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


@pytest.mark.slow
@pytest.mark.parametrize("api_servers", [1, 2])
def test_dead_replica_fails_only_its_own_requests(api_servers: int) -> None:
    with scripted_server("--step-s", "0.01", replicas=2, api_server_count=api_servers) as server:
        assert server.request("GET", "/health").json == {"status": "ready", "replicas": "2 of 2"}
        streams = [stream(server, max_tokens=200) for _ in range(6)]
        assert by_replica(server, "replica_requests") == [3, 3]
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        found = [rest(connection) for connection in streams]
        assert sum(b"[DONE]" in data for data in found) == 3
        assert sum(b"the replica that worked on this has died" in data for data in found) == 3
        assert server.request("GET", "/health").json == {
            "status": "degraded",
            "replicas": "1 of 2",
            "models": {MODEL: "1 of 2 replicas serve"},
        }
        assert {server.chat("new", max_tokens=3).status for _ in range(4)} == {200}
        page = server.check_no_leak()
        assert (page["requests_finished_total"], page["requests_failed_total"], page["replicas"]) == (7, 3, 1)
        assert by_replica(server, "replica_tokens") == [0]
        assert "replica 0 has died: killed by signal 9; 3 open requests are retried or failed; 1 of 2" in server.stderr
        # With the last one goes the server.
        last = stream(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert b"the engine has died" in rest(last)
        assert server.request("GET", "/health").status == 503
        assert server.wait_exit() == 1


@pytest.mark.slow
@pytest.mark.parametrize("api_servers", [1, 2])
def test_stopped_replica_is_ended_within_seconds(api_servers: int) -> None:
    with scripted_server("--step-s", "0.01", replicas=2, api_server_count=api_servers) as server:
        streams = [stream(server, max_tokens=300) for _ in range(4)]
        stopped = server.engine_pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            found = [rest(connection) for connection in streams]
            assert sum(b"[DONE]" in data for data in found) == 2
            assert sum(b"the replica that worked on this has died" in data for data in found) == 2
            assert server.request("GET", "/health").json == {
                "status": "degraded",
                "replicas": "1 of 2",
                "models": {MODEL: "1 of 2 replicas serve"},
            }
            assert {server.chat("new", max_tokens=3).status for _ in range(3)} == {200}
            assert "replica 0 has died: its process is stopped by a signal (killed by signal 9)" in server.stderr
            server.check_no_leak()
        finally:
            if Path(f"/proc/{stopped}").exists():
                os.kill(stopped, signal.SIGKILL)


@pytest.mark.slow
def test_engine_stopped_while_loading_ends_the_start() -> None:
    with scripted_server("--load-s", "3600", wait=False) as server:
        wait_until(lambda: "scripted" in server.request("GET", "/health").error["message"], "loading")
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert server.wait_exit() == 2
        assert server.stderr.strip().splitlines()[-1] == "meltcore serve: its process is stopped by a signal"


class FakeEngine:
    """An engine process with a state that the test sets."""

    def __init__(self, device: str) -> None:
        self.loaded = GenerationReady(
            device, "bfloat16", "dummy", [], 0.0, 64, 8, 300, 64, 64, ["bfloat16"], "bfloat16", "none"
        )
        self.stopped = False
        self.failed: list[str] = []

    def is_stopped(self) -> bool:
        return self.stopped

    def fail(self, reason: str) -> None:
        self.failed.append(reason)


def test_replica_without_steps_is_ended_only_on_a_gpu_with_open_requests() -> None:
    stats = model_stats(3)
    engines = [FakeEngine("NVIDIA H200"), FakeEngine("2 x CPU"), FakeEngine("NVIDIA H200")]
    watch = StuckWatch(lambda: cast(list[EngineProcess], engines), partial(engine_problem, stats))
    now_s = time.monotonic()
    for replica in (0, 1):  # the last one has nothing to do
        stats.assign(replica, 10)
    for late_s in (1.0, STUCK_AFTER_S - 5, STUCK_AFTER_S + 5, STUCK_AFTER_S + 6):
        watch.check(now_s + late_s)
        assert not any(engine.failed for engine in engines), "seen for a moment is not enough"
    watch.check(now_s + STUCK_AFTER_S + 20)
    watch.check(now_s + STUCK_AFTER_S + 30)
    assert [len(engine.failed) for engine in engines] == [1, 0, 0]
    assert "no step has finished for 140 s" in engines[0].failed[0]


def test_replica_that_may_be_writing_a_profile_is_not_ended() -> None:
    stats = model_stats(1)
    engine = FakeEngine("NVIDIA H200")
    watch = StuckWatch(lambda: [cast(EngineProcess, engine)], partial(engine_problem, stats, profiles=True))
    now_s = time.monotonic()
    stats.assign(0, 10)
    for late_s in (STUCK_AFTER_S + 1, STUCK_AFTER_S + 20):
        watch.check(now_s + late_s)
    assert not engine.failed


def test_replica_that_is_idle_or_stopped_briefly_is_not_ended() -> None:
    stats = model_stats(1)
    engine = FakeEngine("CPU")
    watch = StuckWatch(lambda: [cast(EngineProcess, engine)], partial(engine_problem, stats))
    now_s = time.monotonic()
    engine.stopped = True
    for late_s in (0.0, 20.0):
        watch.check(now_s + late_s)
    stats.assign(0, 10)
    watch.check(now_s + 21)
    watch.check(now_s + 24)
    engine.stopped = False
    watch.check(now_s + 25)
    engine.stopped = True
    watch.check(now_s + 29)
    assert not engine.failed
    watch.check(now_s + 35)
    assert engine.failed == ["its process is stopped by a signal"]


@pytest.mark.slow
def test_replica_that_cannot_load_ends_the_start() -> None:
    with scripted_server("--fail", "no room on this GPU", "--fail-of", "1", replicas=2, wait=False) as server:
        assert server.wait_exit() == 2
        assert "replica 1: no room on this GPU" in server.stderr


@pytest.mark.slow
def test_sigterm_drains_all_replicas() -> None:
    with scripted_server("--step-s", "0.02", replicas=2) as server:
        streams = [stream(server, max_tokens=40) for _ in range(4)]
        pids = server.engine_pids()
        server.signal()
        assert all(b"[DONE]" in rest(connection) for connection in streams)
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the engines to be gone")


@pytest.mark.slow
@pytest.mark.parametrize("api_servers", [1, 2])
def test_stopped_api_server_is_replaced(api_servers: int) -> None:
    """Its clients hung for ever, and with a single one all new clients too.

    A connection that was passed to it and that it never took was reset. Now another process answers it.
    """
    with scripted_server("--step-s", "0.01", replicas=2, api_server_count=api_servers) as server:
        streams = [stream(server, max_tokens=300) for _ in range(4)]
        stopped = server.api_server_pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            unread = [server.open(CHAT, chat_body("unread", stream=True, max_tokens=3)) for _ in range(3)]
            found = [rest(connection) for connection in streams]
            assert sum(b"[DONE]" in data for data in found) == 4 - 4 // api_servers
            assert [rest(connection)[9:12] for connection in unread] == [b"200"] * 3
            assert server.chat("new", max_tokens=3).status == 200
            assert "API server process 1 has died: its process is stopped by a signal (killed by " in server.stderr
            assert server.metrics()["api_server_deaths_total"] == 1
            server.check_no_leak()
        finally:
            if Path(f"/proc/{stopped}").exists():
                os.kill(stopped, signal.SIGKILL)


@pytest.mark.slow
def test_dead_api_server_frees_its_requests_in_all_replicas() -> None:
    with scripted_server("--step-s", "0.01", replicas=2, api_server_count=2) as server:
        streams = [stream(server, max_tokens=300) for _ in range(4)]
        os.kill(server.api_server_pids()[0], signal.SIGKILL)
        assert sorted(b"[DONE]" in rest(connection) for connection in streams) == [False, False, True, True]
        page = server.check_no_leak()
        assert (page["requests_finished_total"], page["requests_failed_total"]) == (2, 2)
        assert by_replica(server, "replica_requests") == [0, 0]


@pytest.mark.slow
def test_two_real_replicas_give_the_same_answers(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "meltcore.cli.main", "serve", BUNDLED_MODEL, "--port", "0", "--device", "cpu"]
    with running(
        [*serve, "-dp", "2", "--memory", "128MiB", "--served-model-name", MODEL], tmp_path / "stderr"
    ) as server:
        server.wait_healthy(90)
        answers = [server.chat("What is 7 * 8?").json["choices"][0]["message"]["content"] for _ in range(4)]
        assert len(set(answers)) == 1
        assert "56" in answers[0]
        # As long as the model allows: none may end before its engine is killed.
        streams = [stream(server, max_tokens=1900, ignore_eos=True) for _ in range(4)]
        assert by_replica(server, "replica_requests") == [2, 2]
        os.kill(server.engine_pids()[1], signal.SIGKILL)
        assert sorted(b"[DONE]" in rest(connection) for connection in streams) == [False, False, True, True]
        assert server.chat("What is 7 * 8?").json["choices"][0]["message"]["content"] == answers[0]
        server.check_no_leak()
