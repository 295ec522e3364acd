"""Sleep and wake over the sockets of the process shell: only without requests, and requests only while awake."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import msgspec
import pytest
import zmq

from meltcore.common.errors import SleepError
from meltcore.engine.host.shell import EngineShell
from meltcore.engine.host.sleep import SleepResult
from meltcore.protocol import engines
from meltcore.protocol.generation import AddRequest, EngineStats, GenerationReady, SequenceOutput, StepOutputs, ToEngine
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests, Asleep, Awake, Shutdown, Sleep, Wake
from meltcore.protocol.sockets import socket_address

WAIT_MS = 10_000


class Engine:
    """Ends a request in its second step, and has one step in flight after the last output."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.in_flight = False
        self.wake_errors: list[str] = []
        self.calls: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self.open) or self.in_flight

    def ready(self) -> GenerationReady:
        limits = 64, 8, 300, 64, 64
        return GenerationReady("cuda:0", "bfloat16", "real", [], 1.0, *limits, ["bfloat16"], "bfloat16", "none")

    def add(self, message: AddRequest, /) -> None:
        self.open[message.request_id] = 2

    def refuse(self, request_id: str, error: str) -> StepOutputs:
        return StepOutputs([SequenceOutput(request_id, [], finish_reason="error", error=error)], EngineStats(), 0.0)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.open[request_id] = 1

    def step(self) -> StepOutputs:
        self.calls.append("step")
        self.in_flight = bool(self.open)
        outputs = [
            SequenceOutput(request_id, [steps], finish_reason="stop" if steps == 1 else None)
            for request_id, steps in self.open.items()
        ]
        self.open = {request_id: steps - 1 for request_id, steps in self.open.items() if steps > 1}
        return StepOutputs(outputs, EngineStats(), 0.0)

    def check(self) -> None:
        """Nothing can fail."""

    def close(self) -> None:
        self.calls.append("close")


class SleepableEngine(Engine):
    def sleep(self, keep: Literal["host", "disk"]) -> SleepResult:
        assert not self.has_work
        self.calls.append(f"sleep {keep}")
        return SleepResult(freed_bytes=1000, resident_bytes=10)

    def wake(self) -> int:
        if self.wake_errors:
            raise SleepError(self.wake_errors.pop())
        self.calls.append("wake")
        return 700


def exchange(folder: Path, engine: Engine, messages: list[object], answers: int) -> list[Any]:
    """Serve these messages with an engine, and return what it sends after its ready message: `answers` messages."""
    context = zmq.Context.instance()
    with context.socket(zmq.PUSH) as to_engine, context.socket(zmq.PULL) as from_engine:
        to_engine.bind(socket_address(folder, "to-engine", 0))
        from_engine.bind(socket_address(folder, "from-engine", 0))
        shell = EngineShell(folder, ToEngine)
        thread = Thread(target=shell.serve, args=(lambda _: engine,), daemon=True)
        to_engine.send(msgspec.msgpack.encode(messages))
        thread.start()
        received = []
        for _ in range(1 + answers):
            assert from_engine.poll(WAIT_MS), received
            received.append(msgspec.msgpack.decode(from_engine.recv(), type=engines.from_engine()))
        to_engine.send(msgspec.msgpack.encode([Shutdown()]))
        thread.join(WAIT_MS / 1000)
        assert not thread.is_alive()
    shell.close()
    return received[1:]


@pytest.fixture(autouse=True)
def _unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)


def request(request_id: str) -> AddRequest:
    return AddRequest(request_id, [1], SamplingParams())


@pytest.mark.slow
def test_asleep_engine_refuses_requests_and_serves_again_after_wake(tmp_path: Path) -> None:
    engine = SleepableEngine()
    messages: list[object] = [Sleep("disk"), request("early"), Sleep(), Wake(), Wake()]
    asleep, refused, again, awake, twice = exchange(tmp_path, engine, messages, 5)
    assert (asleep.freed_bytes, asleep.resident_bytes, asleep.error) == (1000, 10, None)
    assert asleep.seconds >= 0
    assert refused.outputs[0].request_id == "early"
    assert "sleeps" in refused.outputs[0].error
    assert again == Asleep(0, again.seconds, error="the engine sleeps already")
    assert awake == Awake(awake.seconds, 700)
    assert twice == Awake(twice.seconds, 0, "the engine does not sleep")
    assert engine.calls == ["sleep disk", "wake", "close"]


def test_busy_engine_refuses_to_sleep_and_continues(tmp_path: Path) -> None:
    engine = SleepableEngine()
    refused, outputs = exchange(tmp_path, engine, [request("a"), request("b"), Sleep(), AbortRequests(["a", "b"])], 2)
    assert refused.error == "the engine has 2 open requests; it sleeps only without any"
    assert {output.request_id for output in outputs.outputs} == {"a", "b"}
    assert not any(call.startswith("sleep") for call in engine.calls)


def test_engine_without_open_requests_ends_its_step_in_flight_before_it_sleeps(tmp_path: Path) -> None:
    engine = SleepableEngine()
    engine.in_flight = True
    (_, asleep) = exchange(tmp_path, engine, [Sleep()], 2)
    assert isinstance(asleep, Asleep)
    assert engine.calls[:2] == ["step", "sleep host"]


def test_wake_that_fails_leaves_the_engine_asleep_until_a_later_one(tmp_path: Path) -> None:
    engine = SleepableEngine()
    engine.wake_errors = ["8 bytes are not there"]
    _, failed, refused, awake = exchange(tmp_path, engine, [Sleep(), Wake(), request("a"), Wake()], 4)
    assert failed == Awake(failed.seconds, 0, "8 bytes are not there")
    assert refused.outputs[0].finish_reason == "error"
    assert awake.error is None


def test_engine_without_a_sleep_mode_says_so_and_serves_on(tmp_path: Path) -> None:
    engine = Engine()
    refused, _ = exchange(tmp_path, engine, [Sleep(), request("a"), AbortRequests(["a"])], 2)
    assert refused.error == "Engine has no sleep mode"
    assert "step" in engine.calls
