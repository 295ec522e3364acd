"""Upstream servers behind a real server: URLs, processes of a command, restart, drain."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import openai
import pytest
from places import ROOT
from scripted_server import COMMAND_LINE
from server_harness import RunningServer, configure, running, scripted_server, serve_command
from waiting import WAIT_S, wait_until

from meltcore.common.process import LoggedProcess, free_port, group_members
from meltcore.fleet.admin import operations
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.run.upstream_model import UpstreamModel
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import ModelSection, ResidencySection, TimeoutsSection

SOURCE = str(ROOT / "src")
SCRIPTED = f"{COMMAND_LINE} --port {{port}} --ttft-ms 1 --itl-ms 1 --tokens 8"
CHAT = "/v1/chat/completions"
QUESTION: Any = [{"role": "user", "content": "hi"}]


TIMEOUTS = TimeoutsSection(health_interval_s=0.1, start_s=20.0)


def upstream(command: str = SCRIPTED, **fields: Any) -> ModelSection:
    return ModelSection(command=command, **({"environment": {"PYTHONPATH": SOURCE}} | fields))


@contextmanager
def serving(
    tmp_path: Path, fleet: bool = False, settings: dict[str, Any] | None = None, **models: ModelSection
) -> Iterator[RunningServer]:
    defaults = {"timeouts": TIMEOUTS, "port": 0, "api_server_count": 2}
    config = configure(models, **(defaults | (settings or {})))
    with running(
        serve_command(config, policy=RestartAfterPause(first_pause_s=0.1) if fleet else None), tmp_path / "stderr"
    ) as server:
        yield server


def children(server: RunningServer) -> list[int]:
    """The guards of upstream servers, each the leader of a process group."""
    return [pid for pid, command in server._children() if "common.die_with_parent" in command]


@pytest.mark.slow
def test_command_is_started_used_and_ended_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, a=upstream(replicas=2), b=upstream()) as server:
        server.wait_healthy()
        guards = children(server)
        assert len(guards) == 3
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["a", "b"]
            for name in ("a", "b", "a"):
                whole = client.chat.completions.create(model=name, messages=QUESTION)
                assert (whole.choices[0].message.content or "").split()[-1] == "w7"
                parts = client.chat.completions.create(model=name, messages=QUESTION, stream=True)
                assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices).count(" w") == 8
        assert server.post("/v1/chat/completions", {"messages": QUESTION}).status == 200  # the first model's
        wait_until(lambda: server.metrics()["requests_finished_total"] == 7, "the last one to be counted")
        assert server.metrics()["requests_accepted_total"] == 7
        server.signal()
        assert server.wait_exit() == 0
        assert [pid for guard in guards for pid in group_members(guard)] == []


@pytest.mark.slow
def test_process_that_ends_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    with serving(tmp_path, a=upstream(), b=upstream(), fleet=True) as server:
        server.wait_healthy()
        first, _ = children(server)
        os.kill(max(group_members(first)), signal.SIGKILL)
        wait_until(lambda: "the server of a has ended: exit status 137" in server.stderr, "the report")
        assert server.post("/v1/chat/completions", {"model": "b", "messages": QUESTION}).status == 200
        refused = server.post("/v1/chat/completions", {"model": "a", "messages": QUESTION})
        assert refused.status == 503
        assert refused.headers["retry-after"]
        wait_until(
            lambda: server.post("/v1/chat/completions", {"model": "a", "messages": QUESTION}).status == 200, "restart"
        )
        guards = children(server)
        assert len([pid for guard in guards for pid in group_members(guard)]) == 4
        server.process.kill()  # the guards end the servers of a supervisor that is killed
        wait_until(lambda: not any(group_members(guard) for guard in guards), "no orphan")


def test_restart_ends_a_server_that_sleeps(tmp_path: Path) -> None:
    ended: list[int] = []

    class Process:
        async def stop(self) -> None:
            ended.append(1)

        async def wait_freed(self) -> None:
            """It had no memory."""

    async def restart() -> None:
        parts = SimpleNamespace(
            pool=Mock(), policy=RestartAfterPause(), log_folder=tmp_path, timeouts=TIMEOUTS, report=print
        )
        model = UpstreamModel(0, "a", upstream(residency="sleepable"), ServerStats().models[0], parts)  # type: ignore[arg-type]
        (server,) = model.replicas
        server.process, server.state = Process(), "sleeping"  # type: ignore[assignment]
        await model.replace_engines(1.0)
        assert (server.state, server.restarts, ended) == ("unloaded", 1, [1])
        await model.stop()

    asyncio.run(restart())


@pytest.mark.slow
def test_sleepable_commands_take_turns_asleep_or_ended(tmp_path: Path) -> None:
    """Models a and b have vLLM's routes and sleep; c has none, so it is ended and started again."""
    turns = ResidencySection(minimum_s=0.1, turn_s=0.4, swaps_per_minute=1000)
    without = {"PYTHONPATH": SOURCE, "VLLM_SERVER_DEV_MODE": "0"}
    sleeps = {"residency": "sleepable", "sleep_mode": "vllm"}
    models = {
        "a": upstream(**sleeps, priority="interactive"),
        "b": upstream(**sleeps),
        "c": upstream(**sleeps, environment=without, priority="batch"),
    }

    def ask(name: str) -> None:
        answer = server.post("/v1/chat/completions", {"model": name, "messages": QUESTION})
        assert answer.status == 200, answer.body

    def alive() -> set[int]:
        return {guard for guard in children(server) if group_members(guard)}

    with serving(tmp_path, fleet=True, settings={"residency": turns}, **models) as server:
        started = {"status": "ready", "sleeping": ["b", "c"]}
        wait_until(lambda: server.request("GET", "/health").json == started and len(alive()) == 2, "the start")
        asleep = alive()
        text = server.request("GET", "/metrics").body.decode()
        assert 'engine_sleep_state{model_name="b",sleep_state="weights_offloaded"} 1.0' in text
        assert 'engine_sleep_state{model_name="c",sleep_state="discard_all"} 1.0' in text
        for name in ("b", "a", "c", "b"):
            ask(name)
            assert asleep <= alive(), "a and b keep their processes"
        assert "the server of c cannot sleep (/sleep?level=1 answers with status 404" in server.stderr
        server.wait_metric("wakes_total", 4)
        for guard in sorted(alive()):
            os.kill(max(group_members(guard)), signal.SIGKILL)  # one that sleeps among them
        wait_until(lambda: "the server of a has ended: exit status" in server.stderr, "the report")
        ask("a")
        ask("b")
        server.signal()
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_start_that_fails_ends_a_server_and_is_a_failed_model_of_a_fleet(tmp_path: Path) -> None:
    broken = upstream("sh -c 'echo no GPU; exit 3' {port}")
    with serving(tmp_path, a=broken) as server:
        assert server.wait_exit() == 2
        assert "the server of a ended while starting (exit status 3):\nno GPU" in server.stderr
    with serving(tmp_path, a=upstream("no-such-program {port}")) as server:
        assert server.wait_exit() == 2
        assert "'no-such-program' of its command is not there" in server.stderr
    with serving(tmp_path, a=upstream(paths=("/admin",))) as server:
        assert server.wait_exit() == 2
        assert "got '/admin'" in server.stderr


@pytest.mark.slow
def test_url_is_served_beside_a_model_of_our_own(tmp_path: Path) -> None:
    """The other model is a server of ours too, by its address: its names differ, and its answers keep their bytes."""
    with scripted_server() as upstream:
        theirs = ModelSection(url=upstream.url, upstream_model="scripted")
        with scripted_server(upstream={"far": theirs}, timeouts=TIMEOUTS) as server:
            body = {"messages": QUESTION, "max_tokens": 4}
            wait_until(lambda: server.post("/v1/chat/completions", body | {"model": "far"}).status == 200, "its health")
            answer = server.post("/v1/chat/completions", body | {"model": "far"})
            assert answer.json["model"] == "scripted"
            assert server.post("/v1/chat/completions", body | {"model": "scripted"}).status == 200
            missing = server.post("/v1/chat/completions", body | {"model": "x"})
            assert (missing.status, missing.error["code"]) == (404, "model_not_found")
            assert "far" in missing.error["message"]
            upstream.signal()
            upstream.wait_exit()
            wait_until(lambda: server.post("/v1/chat/completions", body | {"model": "far"}).status == 503, "its end")
            assert server.post("/v1/chat/completions", body | {"model": "scripted"}).status == 200
            server.check_no_leak()


REASONS = {  # a shell's command, and the reason that clients and operators see
    "crash": (
        r"printf 'loading\n\033[31mRuntimeError:\000 no kernel\033[0m for sm_120\n' >&2; exit 3",
        "ended while starting (exit status 3): loading | RuntimeError: no kernel for sm_120",
    ),
    "mute": ("exit 4", "ended while starting (exit status 4): (it printed nothing)"),
    "flood": (
        "yes loading | head -c 5000000; echo out of memory; kill -9 $$",
        "loading | loading | out of memory",
    ),
    "late": ("echo compiling; sleep 600", "was not ready within 6 s (timeouts.start_s): it cannot be connected to"),
    "missing": ("exec no-such-engine", "no-such-engine: not found"),
}


@pytest.mark.slow
def test_reason_of_a_server_that_does_not_start_has_its_last_lines(tmp_path: Path) -> None:
    """In the health of the fleet, and in what clients get."""
    models = {name: upstream(shlex.join(["sh", "-c", f"{shell} # {{port}}"])) for name, (shell, _) in REASONS.items()}
    timeouts = msgspec.structs.replace(TIMEOUTS, start_s=6.0)
    with serving(tmp_path, fleet=True, settings={"timeouts": timeouts}, good=upstream(), **models) as server:

        def found() -> dict[str, tuple[str, str]]:
            health = server.request("GET", "/health").json.get("models", {})
            asked = {name: server.post(CHAT, {"model": name, "messages": QUESTION}) for name in REASONS}
            return {name: (health.get(name, ""), asked[name].error["message"]) for name in REASONS}

        def shown() -> bool:
            seen = found()
            return all(REASONS[name][1] in text for name, texts in seen.items() for text in texts)

        wait_until(shown, "the reasons")
        for name, texts in found().items():
            for text in texts:
                assert len(text) < 1500, name
                assert text.isprintable(), name
        assert "killed by SIGKILL" in found()["flood"][0]
        assert "its last output: compiling" in found()["late"][1]


@pytest.mark.slow
def test_each_of_several_models_that_fail_has_its_reason_in_an_answer(tmp_path: Path) -> None:
    models = {
        "mute": upstream("sh -c 'exit 4 # {port}'"),
        "loud": upstream("sh -c 'echo no memory; exit 5 # {port}'"),
    }
    with serving(tmp_path, fleet=True, **models) as server:

        def reason() -> str:
            return str(server.post(CHAT, {"model": "loud", "messages": QUESTION}).error["message"])

        wait_until(lambda: "(exit status 4): (it printed nothing)" in reason(), "the reason of the first")
        wait_until(lambda: "(exit status 5): no memory" in reason(), "the reason of the second")
        assert reason().startswith("mute: ")


def test_ps_shows_the_reason_of_a_server_that_fails_beside_another_one() -> None:
    reason = "exit status 1:\n\x1b[31mno memory\x1b[0m\n"
    server = SimpleNamespace(state="pausing", reason=reason, restarts=1, log="", process=SimpleNamespace(pid=None))
    stats = SimpleNamespace(open_requests=lambda _: 0)
    config = ModelSection(url="http://h", task="transcription")
    model = SimpleNamespace(name="m", status="ready", reason="ready", replicas=[server], stats=stats, config=config)
    row = operations._upstream_row(model, 0, 1)
    assert (row.reason, row.task) == ("exit status 1: no memory", "transcription")
    model.status, model.reason = "failed", "m could not be loaded: it ended"
    assert operations._upstream_row(model, 0, 1).reason == "m could not be loaded: it ended"


@pytest.mark.slow
def test_fleet_waits_for_a_server_elsewhere_and_uses_one_that_is_late(tmp_path: Path) -> None:
    port = free_port()
    far = ModelSection(url=f"http://127.0.0.1:{port}")
    timeouts = msgspec.structs.replace(TIMEOUTS, start_s=1.0)
    command = [*SCRIPTED.format(port=port).split()]
    with serving(tmp_path, fleet=True, settings={"timeouts": timeouts}, far=far) as server:
        assert server.request("GET", "/health").status == 503, "it is not ready before it answers"
        wait_until(lambda: "far could not be loaded: no answer within 1 s (timeouts.start_s)" in server.stderr, "fail")
        with LoggedProcess(command, tmp_path / "upstream.log", name="upstream", report=print):
            ask = {"model": "far", "messages": QUESTION}
            wait_until(lambda: server.post("/v1/chat/completions", ask).status == 200, "the late server")
        server.signal()
        assert server.wait_exit() == 0
