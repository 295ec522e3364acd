"""A fleet: models fail, die and come back by themselves; the others do not notice, and no process is left behind."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_harness import Answer, RunningServer, configure, make_model, running, serve_command
from waiting import wait_until

from meltcore.common.errors import EngineDeadError
from meltcore.fleet.run.readiness import PROBE_ID, probe_error
from meltcore.fleet.run.replica import EngineExit
from meltcore.fleet.run.restart_policy import NeverRestart, Outage, RestartAfterPause
from meltcore.fleet.run.start_gate import WAVE, StartGate
from meltcore.protocol.batch import BatchStats
from meltcore.protocol.generation import EngineStats, GenerationReady, SequenceOutput, StepOutputs
from meltcore.protocol.synthesis import SynthesisReady
from meltcore.protocol.transcription import Transcript, TranscriptionOutputs, TranscriptionReady
from meltcore.protocol.translation import TranslationReady
from meltcore.settings.fleet_spec import ModelSection

COMPLETIONS = "/v1/completions"
FAST = RestartAfterPause(first_pause_s=0.05, max_pause_s=0.2, max_deaths=3, probe_limit_s=10.0)


@contextmanager
def fleet(
    options: dict[str, dict[str, Any]], *, policy: RestartAfterPause = FAST, replicas: int = 1, **settings: Any
) -> Iterator[tuple[RunningServer, Path]]:
    """A fleet of scripted models. `options`: of the engine of each. Yields the folder of their checkpoints, too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {}
        for model, engine_options in options.items():
            checkpoint = folder / model
            if "missing" not in engine_options:
                make_model(checkpoint)
                (checkpoint / "engine.json").write_bytes(msgspec.json.encode(engine_options))
            models[model] = ModelSection(checkpoint=str(checkpoint), load_format="dummy", replicas=replicas)
        config = configure(models, port=0, api_server_count=2, **settings)
        with running(serve_command(config, policy=policy), folder / "stderr") as server:
            yield server, folder


def complete(server: RunningServer, model: str, max_tokens: int = 4) -> Answer:
    return server.post(COMPLETIONS, {"model": model, "prompt": "ab", "max_tokens": max_tokens})


def begin_stream(server: RunningServer, model: str, max_tokens: int) -> Any:
    body = {"model": model, "prompt": "ab", "max_tokens": max_tokens, "stream": True}
    connection = server.open(COMPLETIONS, body)
    data = b""
    while b"data: " not in data:
        data += connection.recv(65_536)
    return connection


def rest(connection: Any) -> bytes:
    data = b""
    while b"0\r\n\r\n" not in data and (chunk := connection.recv(65_536)):
        data += chunk
    return data


def health(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.request("GET", "/health").json
    return found


def wait_models(server: RunningServer, *names: str) -> None:
    def listed() -> set[str]:
        answer = server.request("GET", "/v1/models")
        return {card["id"] for card in answer.json["data"]} if answer.status == 200 else set()

    wait_until(lambda: listed() == set(names), f"{names} to be ready")


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_engine_that_loads_for_too_long_is_ended() -> None:
    policy = RestartAfterPause(first_pause_s=0.05, max_deaths=2)
    with fleet({"slow": {"load_s": 60.0}}, policy=policy, start_s=0.3) as (server, _):
        wait_until(lambda: "it was not loaded within 0.3 s (timeouts.start_s)" in server.stderr, "the report")
        wait_until(lambda: complete(server, "slow").status == 503 and "failed" in server.stderr, "the model's end")
        wait_until(lambda: not server.engine_pids(), "the end of its process")


@pytest.mark.slow
def test_killed_engine_fails_its_requests_immediately_and_comes_back() -> None:
    with fleet({"first": {"step_s": 0.01}, "second": {"step_s": 0.01}}) as (server, _):
        wait_models(server, "first", "second")
        lost = [begin_stream(server, "first", 4000) for _ in range(4)]
        kept = [begin_stream(server, "second", 100) for _ in range(4)]
        [second] = server.engine_pids("second")
        for round_number in range(2):  # it can be killed again, and has another process each time
            (first,) = [pid for pid in server.engine_pids() if pid != second]
            os.kill(first, signal.SIGKILL)
            if round_number == 0:
                for each in lost:
                    assert "the engine has died and is started again" in rest(each).decode()
            wait_until(lambda killed=first: set(server.engine_pids()) - {second} - {killed}, "another process")
            wait_models(server, "first", "second")
            assert complete(server, "first").status == 200
        assert all(b"[DONE]" in rest(each) for each in kept)
        assert second in server.engine_pids()
        assert health(server) == {"status": "ready", "replicas": "2 of 2"}
        found = server.check_no_leak()
        assert (found["requests_failed_total"], found["requests_finished_total"]) == (4, 6)
        assert "first has died: killed by signal 9; 4 open requests failed" in server.stderr
        assert "first: it is started again in 0.05 s" in server.stderr


@pytest.mark.slow
def test_retry_after_while_an_engine_restarts_is_the_time_of_its_last_start() -> None:
    began_s = time.monotonic()
    with fleet({"first": {"load_s": 3.0}}) as (server, _):
        wait_models(server, "first")
        longest_s = time.monotonic() - began_s
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until(lambda: "is started again" in server.stderr, "the death to be seen")
        answer = complete(server, "first")
        assert answer.status == 503
        assert 1 <= int(answer.headers["retry-after"]) <= longest_s + 2, "a pause before the start, and whole seconds"
        wait_models(server, "first")


@pytest.mark.slow
def test_crash_loop_stops_and_is_stated() -> None:
    with fleet({"good": {}, "bad": {"die_at_step": 2}}) as (server, _):  # it survives the readiness request alone
        wait_models(server, "good", "bad")
        for death in range(1, 4):
            wait_until(lambda: complete(server, "bad").error.get("code") == "engine_dead", "the engine to die")
            wait_until(lambda n=death: server.stderr.count("bad has died") == n, "the death to be seen")
        wait_until(lambda: "bad: it is not started again" in server.stderr, "the end of the restarts")
        answer = complete(server, "bad")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        reason = "the engine of bad has died 3 times and is not started again: exit status 7"
        assert answer.error["message"] == reason
        assert health(server) == {"status": "degraded", "replicas": "1 of 2", "models": {"bad": reason}}
        wait_models(server, "good")
        assert complete(server, "good").status == 200
        assert "in 0.05 s" in server.stderr
        assert "in 0.1 s" in server.stderr, "the pause doubles"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"missing": True}, "missing"),
        ({"fail": "no room on this GPU"}, "bad could not be loaded: no room on this GPU"),
        ({"die_loading": True}, "bad could not be loaded: the engine ended while loading (exit status 3)"),
        ({"silent_steps": 10**6}, "bad could not be loaded: the readiness request failed: no answer within 2 s"),
    ],
)
def test_model_that_cannot_load_does_not_end_the_others(options: dict[str, Any], reason: str) -> None:
    policy = RestartAfterPause(first_pause_s=0.05, max_deaths=2, probe_limit_s=2.0)
    with fleet({"good": {}, "bad": options}, policy=policy) as (server, folder):
        wait_models(server, "good")
        wait_until(lambda: "is not started again" in server.stderr or "missing" in options, "the last try")
        wait_until(lambda: "could not be loaded" in complete(server, "bad").error["message"], "the refusal")
        expected = str(folder / "bad") if "missing" in options else reason
        assert expected in complete(server, "bad").error["message"]
        assert expected in health(server)["models"]["bad"]
        assert len(server.engine_pids()) == 1
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_replica_of_a_fleet_comes_back_while_the_other_serves() -> None:
    with fleet({"pair": {"step_s": 0.005, "load_s": 0.3}}, replicas=2) as (server, _):
        wait_models(server, "pair")
        victim = server.engine_pids()[0]
        os.kill(victim, signal.SIGKILL)
        missing = {"status": "degraded", "replicas": "1 of 2", "models": {"pair": "1 of 2 replicas serve"}}
        wait_until(lambda: health(server) == missing, "one replica")
        assert {complete(server, "pair").status for _ in range(4)} == {200}
        wait_until(lambda: health(server) == {"status": "ready", "replicas": "2 of 2"}, "both replicas")
        streams = [begin_stream(server, "pair", 200) for _ in range(4)]
        page = server.request("GET", "/metrics").body.decode()
        assert page.count("replica_requests{") == page.count("} 2.0\nmeltcore:replica_requests{") + 1, "2 at each"
        assert all(b"[DONE]" in rest(each) for each in streams)
        server.check_no_leak()


@pytest.mark.slow
def test_restarted_api_server_serves_restarted_engines() -> None:
    with fleet({"first": {}, "second": {}}) as (server, _):
        wait_models(server, "first", "second")
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        wait_until(lambda: "it is started again" in server.stderr, "the death to be seen")
        wait_models(server, "first", "second")
        servers = server.api_server_pids()
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(set(server.api_server_pids()) - set(servers)) == 2, "two other API servers")
        assert {complete(server, name).status for name in ("first", "second", "first", "second")} == {200}
        server.check_no_leak()


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [None, "{"], ids=["missing", "cut short"])
def test_restarted_api_server_that_cannot_read_a_model_serves_the_others(damaged: str | None) -> None:
    with fleet({"first": {}, "second": {}}) as (server, folder):
        wait_models(server, "first", "second")
        file = folder / "first" / "config.json"
        file.unlink() if damaged is None else file.write_text(damaged)
        servers = server.api_server_pids()
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.stderr.count(" cannot serve first: ") == 2, "two API servers that have failed")
        assert complete(server, "second").status == 200
        refused = complete(server, "first")
        assert refused.status == 503
        assert "first could not be loaded by this API server process" in refused.error["message"]
        assert str(file.parent) in refused.error["message"]
        health = server.request("GET", "/health")
        assert (health.status, health.json["status"]) == (200, "degraded")
        server.check_no_leak()


@pytest.mark.slow
@pytest.mark.parametrize("loading", [False, True])
def test_no_process_outlives_a_killed_supervisor(loading: bool) -> None:
    with fleet({"first": {}, "second": {"load_s": 60 if loading else 0}}) as (server, _):
        wait_models(server, *(("first",) if loading else ("first", "second")))
        wait_until(lambda: len(server.engine_pids()) == 2, "both engines")
        pids = [*server.engine_pids(), *server.api_server_pids()]
        server.process.kill()
        wait_until(lambda: gone(pids), "all processes to be gone")


@pytest.mark.slow
def test_sigterm_drains_all_models() -> None:
    with fleet({"first": {"step_s": 0.01}, "second": {"step_s": 0.01}, "bad": {"die_loading": True}}) as (server, _):
        wait_until(lambda: "bad: it is not started again" in server.stderr, "the last try")
        wait_models(server, "first", "second")
        streams = [begin_stream(server, name, 60) for name in ("first", "second")]
        pids = [*server.engine_pids(), *server.api_server_pids()]
        server.signal()
        wait_until(lambda: server.request("GET", "/health").status == 503, "draining")
        for name in ("first", "bad"):
            refused = complete(server, name)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert all(b"[DONE]" in rest(each) for each in streams)
        assert server.wait_exit() == 0
        assert gone(pids)
        assert "Traceback" not in server.stderr


# --- parts


def test_pauses_double_until_deaths_are_too_many() -> None:
    policy = RestartAfterPause(first_pause_s=1.0, max_pause_s=3.0, max_deaths=4, window_s=100.0)
    slow = [EngineExit(at_s, "", 0.0) for at_s in (0.0, 601.0, 1202.0, 1803.0)]  # each start took too long
    assert [policy.pause_s(slow[:deaths]) for deaths in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, None]
    assert policy.pause_s([*slow[:3], EngineExit(1903.0, "", 100.0)]) == 1.0, "exits before long service do not count"


OUTAGE = Outage("m", "ready", "ready", True, True, frozenset({"failed"}), "exit status 7", None, 3, 1)


@pytest.mark.parametrize(
    ("changes", "of_fleet", "of_serve"),
    [
        (
            {},
            ("failed", "the engine of m has died 3 times and is not started again: exit status 7"),
            ("dead", "the engine has died; the server is going down (exit status 7)"),
        ),
        (
            {"status": "loading", "text": "loading: weights", "is_open": False},
            ("failed", "m could not be loaded: exit status 7"),
            ("loading", "loading: weights"),
        ),
        (
            {"states": frozenset({"pausing"}), "pause_s": 2.0, "num_models": 2},
            ("restarting", "the engine of m has died (exit status 7); it is started again after a pause of 2 s"),
            ("dead", "the engine has died (exit status 7)"),
        ),
    ],
)
def test_status_of_a_model_without_engines_is_what_its_server_does(
    changes: dict[str, Any], of_fleet: tuple[str, str], of_serve: tuple[str, str]
) -> None:
    outage = OUTAGE._replace(**changes)
    assert [policy.status(outage) for policy in (FAST, NeverRestart())] == [of_fleet, of_serve]


def test_errors_that_end_a_start_are_the_first_one_or_those_of_all_replicas() -> None:
    errors = [("replica 1", EngineDeadError("exit status 3"))]
    named, unnamed = (NeverRestart().start_error([(name, errors[0][1])], 2) for name in ("replica 1", ""))
    assert [str(named), str(unnamed)] == ["replica 1: exit status 3", "exit status 3"]
    assert FAST.start_error(errors, 2) is None
    assert FAST.start_error(errors * 2, 2) is errors[0][1]
    assert NeverRestart().start_error([], 2) is None


def test_engines_that_measure_memory_load_alone_on_their_gpus() -> None:
    async def load_all(starts: list[Mapping[str, Any]]) -> list[list[int]]:
        """The engines that load together, step by step; each step ends the first one."""
        gate, loading, ends = StartGate(), set[int](), [asyncio.Event() for _ in starts]

        async def load(index: int) -> None:
            async with gate.loading(**starts[index]):
                loading.add(index)
                await ends[index].wait()
                loading.discard(index)

        tasks = [asyncio.create_task(load(index)) for index in range(len(starts))]
        steps = []
        while not all(task.done() for task in tasks):
            for _ in range(5):
                await asyncio.sleep(0)
            if loading:
                steps.append(sorted(loading))
                ends[min(loading)].set()
        return steps

    with_budget, without = ({"gpus": frozenset("0"), "has_budget": has_budget} for has_budget in (True, False))
    assert asyncio.run(load_all([with_budget, with_budget])) == [[0, 1], [1]]
    assert asyncio.run(load_all([without, without, with_budget])) == [[0], [1], [2]]
    assert asyncio.run(load_all([with_budget, without, with_budget])) == [[0], [1], [2]], "no overtaking"
    assert asyncio.run(load_all([without, {"gpus": frozenset("1"), "has_budget": False}])) == [[0, 1], [1]], (
        "other GPUs"
    )
    assert asyncio.run(load_all([{"gpus": frozenset(), "has_budget": False}] * 2)) == [[0, 1], [1]]
    on_nodes = [with_budget | {"gpus": frozenset([f"n{at}:0"]), "in_cluster": True} for at in range(WAVE + 2)]
    waves = asyncio.run(load_all(on_nodes))
    assert waves[:2] == [list(range(WAVE)), list(range(1, WAVE + 1))], "engines of a cluster, in waves"


def test_readiness_request_of_each_task() -> None:
    base: tuple[Any, ...] = ("CPU", "float32", "dummy", [], 0.0)
    engines: list[Any] = [
        GenerationReady(*base, 64, 8, 300, 64, 64, ["float32"], "float32", "none"),
        TranscriptionReady(*base, 100, ["kn"], 16_000, 1600, 16_000, "real"),
        SynthesisReady(*base, 100, [], 24_000, 100, 1.0, 3.0, 0.5, 2.0, [32, 16], "real"),
        TranslationReady(*base, 100, 8, 64, 5, 4, 64, "real"),
    ]
    text, clip, speech, sentence = [engine.probe(PROBE_ID) for engine in engines]
    assert (text.sampling.max_tokens, text.prompt_length) == (1, 1)  # type: ignore[union-attr]
    assert (clip.language, len(clip.samples)) == ("kn", 3200)  # type: ignore[union-attr]
    assert (speech.num_steps, len(speech.reference)) == (16, 2 * 24_000 * 4)  # type: ignore[union-attr]
    assert max(sentence.token_ids) == 4  # type: ignore[union-attr]
    ended = SequenceOutput(PROBE_ID, [1], finish_reason="length")
    assert probe_error(StepOutputs([ended], EngineStats(), 0.0)) == ""
    assert probe_error(StepOutputs([], EngineStats(), 0.0)) is None
    refused = Transcript(request_id=PROBE_ID, finish_reason="error", error="no room")
    assert probe_error(TranscriptionOutputs([refused], BatchStats(), 0.0)) == "no room"
