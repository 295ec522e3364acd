"""The end of the driver while an actor is being closed: no folder and no process is left. Ray is scripted."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from places import program
from waiting import WAIT_S

from meltcore.common.process import start_ticks
from meltcore.fleet.ray import driver, engine_actor, nodes
from meltcore.fleet.ray.driver import Driver
from meltcore.fleet.ray.engine_actor import EngineActor
from meltcore.fleet.ray.node_names import NodeNames
from meltcore.protocol.cluster import EngineEnded, EngineListening, StartEngine
from meltcore.protocol.tcp import KeyPair, Listening
from meltcore.settings.config import EngineConfig

WITHOUT_READER = """
import contextlib, sys
from meltcore.fleet.ray import driver
from meltcore.protocol.cluster import Pong

class Answers:
    def __init__(self, answer):
        self.answer = answer

    async def run(self):
        sys.stdin.buffer.readline()
        for _ in range(3):
            self.answer(Pong())

driver.connected, driver.Driver = lambda _address: contextlib.nullcontext(), Answers
sys.exit(driver.main())
"""
ENGINE = str(program("scripted_engine.py"))
CLOSE_S = 3.0  # more than the last output gets
NODE = {
    "NodeID": "0123456789",
    "Alive": True,
    "NodeManagerHostname": "a",
    "NodeManagerAddress": "127.0.0.1",
    "NodeManagerPort": 1,
}


class Handle:
    """An actor in this process, called as Ray's handles are."""

    def __init__(self, actor: EngineActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def ready() -> None:
            pass

        method: Callable[..., Any] = ready if name == "__ray_ready__" else getattr(self._actor, name)
        return SimpleNamespace(remote=lambda *values: asyncio.ensure_future(method(*values)))


class SlowActor(EngineActor):
    """An actor whose node is busy: it takes long to end its engine."""

    async def close(self) -> str:
        await asyncio.sleep(CLOSE_S)
        return await super().close()


@pytest.fixture
def scripted_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """A Ray of one node; the actors that were killed."""
    killed: list[Handle] = []
    ray, scheduling = ModuleType("ray"), ModuleType("ray.util.scheduling_strategies")
    error = type("RayError", (Exception,), {})
    exceptions = {name: type(name, (error,), {}) for name in ("RayTaskError", "OutOfMemoryError")}
    ray.__dict__.update(
        nodes=lambda: [NODE],
        kill=killed.append,
        exceptions=SimpleNamespace(RayError=error, **exceptions),
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        remote=lambda actor: SimpleNamespace(
            options=lambda **_options: SimpleNamespace(remote=lambda: Handle(actor()))
        ),
    )
    scheduling.__dict__["NodeAffinitySchedulingStrategy"] = lambda *_arguments, **_options: None
    for name, module in (("ray", ray), ("ray.util", ModuleType("ray.util")), (scheduling.__name__, scheduling)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nodes, "names", NodeNames())
    monkeypatch.setattr(driver, "EngineActor", SlowActor)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return killed


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["before", "with"])
def test_driver_that_ends_while_it_closes_an_actor_leaves_nothing(
    ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted_ray: list[Handle]
) -> None:
    """ended: when the engine has ended, before the driver or with it."""
    reading, writing = os.pipe()
    order = StartEngine(0, "a", [ENGINE], EngineConfig(model="m"), 1, KeyPair.generate().public, fleet="f")
    answers: list[Any] = []
    pids: list[int] = []

    async def run() -> None:
        running = asyncio.create_task(Driver(answers.append).run())
        os.write(writing, msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(each, EngineListening) for each in answers):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
            pids.extend(each.pid for each in answers if isinstance(each, EngineListening))
            if ended == "before":
                os.kill(pids[0], 9)
                await asyncio.sleep(1.0)  # the actor is being closed
            os.close(writing)
            await running

    with io.TextIOWrapper(os.fdopen(reading, "rb")) as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        asyncio.run(run())
    assert not any(map(start_ticks, pids))
    assert not list(tmp_path.glob("meltcore-*"))
    assert len(scripted_ray) == 1


class EvictedActor(EngineActor):
    """An actor that the memory monitor of Ray ends while it waits for its engine to listen."""

    async def start(self, encoded: bytes) -> tuple[str, Listening, int]:
        del encoded
        raise sys.modules["ray"].exceptions.OutOfMemoryError


def test_eviction_of_a_start_is_told_apart_from_a_node_without_room(
    monkeypatch: pytest.MonkeyPatch, scripted_ray: list[Handle]
) -> None:
    monkeypatch.setattr(driver, "EngineActor", EvictedActor)
    reading, writing = os.pipe()
    order = StartEngine(0, "a", [ENGINE], EngineConfig(model="m"), 1, KeyPair.generate().public, fleet="f")
    answers: list[Any] = []

    async def run() -> None:
        running = asyncio.create_task(Driver(answers.append).run())
        os.write(writing, msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(WAIT_S):
            while not answers:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
        os.close(writing)
        await running

    with io.TextIOWrapper(os.fdopen(reading, "rb")) as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        asyncio.run(run())
    (ended,) = answers
    assert isinstance(ended, EngineEnded)
    assert (ended.is_evicted, ended.no_room) == (True, False), "its process may live, and no other node is tried"
    assert "the node a is low on memory" in ended.reason
    assert len(scripted_ray) == 1


def test_driver_whose_reader_was_killed_ends_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER, "address"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, printed = process.communicate(b"\n", WAIT_S)
    assert (process.returncode, printed) == (0, b"")


def run_engine(command: list[str]) -> list[EngineEnded]:
    """Let a driver run an engine. Returns its answers."""
    answers: list[Any] = []
    order = StartEngine(0, "a", command, EngineConfig(model="m"), 1, KeyPair.generate().public, fleet="f", model="chat")
    asyncio.run(Driver(answers.append)._keep_engine(order))
    return answers


@pytest.mark.parametrize("is_stuck", [False, True])
def test_processes_that_an_engine_leaves_are_killed_or_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    scripted_ray: list[Handle],
    *,
    is_stuck: bool,
) -> None:
    """is_stuck: whether a rank of the engine is in a call of the kernel, which no signal ends."""
    noted = tmp_path / "rank"
    rank = "subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid"  # it outlives the engine, in its group
    monkeypatch.setattr(driver, "EngineActor", EngineActor)
    monkeypatch.setattr(engine_actor, "_GROUP_LIMIT_S", 0.5)
    if is_stuck:
        monkeypatch.setattr(engine_actor, "signal_group", lambda _group, _signal: None)
    try:
        answers = run_engine(
            ["-c", f"import pathlib, subprocess; pathlib.Path({str(noted)!r}).write_text(str({rank}))"]
        )
    finally:
        pid = int(noted.read_text())
        is_left = start_ticks(pid) is not None
        if is_left:
            os.kill(pid, signal.SIGKILL)
    (ended,) = answers
    assert ended.reason.endswith("the engine ended before it listened (exit status 0)")
    assert is_left == is_stuck
    line = f"meltcore: node a: chat: its engine has ended, and these processes of it have not: {pid}\n"
    assert capfd.readouterr().err == (line if is_stuck else "")
    assert not list(tmp_path.glob("meltcore-*"))
    assert len(scripted_ray) == 1


class LateActor(EngineActor):
    """An actor that dies before it can end its engine."""

    async def close(self) -> str:
        assert not await super().close()
        raise sys.modules["ray"].exceptions.RayError("the actor is dead")


def test_actor_that_is_gone_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    scripted_ray: list[Handle],
) -> None:
    monkeypatch.setattr(driver, "EngineActor", LateActor)
    run_engine(["-c", ""])
    line = "its actor is gone; the next start there removes the files that its engine leaves"
    assert capfd.readouterr().err == f"meltcore: node a: chat: {line}\n"
    assert not list(tmp_path.glob("meltcore-*"))
    assert len(scripted_ray) == 1


class Unstarted:
    """The handle of an actor for which Ray starts no worker: it answers nothing."""

    calls: ClassVar[list[str]] = []

    def __init__(self, _actor: EngineActor) -> None:
        self.calls.clear()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return SimpleNamespace(remote=lambda *_values: asyncio.get_running_loop().create_future())


def test_actor_without_a_worker_is_not_waited_for_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    scripted_ray: list[Handle],
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Handle", Unstarted)
    monkeypatch.setattr(driver, "EngineActor", EngineActor)
    monkeypatch.setattr(driver, "_READY_LIMIT_S", 0.2)
    answers = run_engine(["-c", ""])
    assert answers == [EngineEnded(0, "Ray has started no worker on a within 0.2 s", no_room=True)]
    assert sorted(Unstarted.calls) == ["__ray_ready__", "read_output"], "its close would not be answered either"
    assert capfd.readouterr().err == ""
    assert not list(tmp_path.glob("meltcore-*"))
    assert len(scripted_ray) == 1
