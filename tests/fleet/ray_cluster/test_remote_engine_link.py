"""An engine over TCP: the same answers as on one machine, only for the fleet's keys, and lost ones are noticed."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from network_namespaces import network
from places import program
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.process import start
from meltcore.fleet.processes.remote_engine import RemoteEngineProcess
from meltcore.fleet.ray.cluster_driver import RemoteRun
from meltcore.fleet.run.logs import find_logs
from meltcore.protocol.cluster import StartEngine
from meltcore.protocol.generation import (
    AddRequest,
    EngineStats,
    GenerationReady,
    RequestTimes,
    SequenceOutput,
    StepOutputs,
    pack_token_ids,
)
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests, ForgetClient, Shutdown
from meltcore.protocol.tcp import (
    Binding,
    EngineAddress,
    KeyPair,
    decode_message,
    encode_message,
    read_address,
    read_listening,
    shift_times,
    write_address,
    write_binding,
)
from meltcore.protocol.translation import Translate
from meltcore.serve.engines.engine_link import EngineLink
from meltcore.serve.engines.engine_sockets import RemoteSocket
from meltcore.settings.config import EngineConfig

ENGINE = [sys.executable, str(program("scripted_engine.py"))]


class RemoteEngine:
    """A scripted engine that listens on TCP, and what its supervisor receives of it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.links: list[EngineLink] = []

    def link(self, client_index: int, messages: list[Any] | None = None) -> EngineLink:
        received = self.messages if messages is None else messages
        link = EngineLink(self.folder, client_index, received.append, pytest.fail, self.lost.append)
        self.links.append(link)
        return link

    def tokens(self, messages: list[Any], request_id: str) -> list[int]:
        steps = [each for each in messages if isinstance(each, StepOutputs)]
        return [
            token
            for step in steps
            for output in step.outputs
            if output.request_id == request_id
            for token in output.token_ids
        ]


def on_event_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return functools.wraps(test)(run)


async def until(condition: Callable[[], object], limit_s: float = WAIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def remote_engine(
    tmp_path: Path, *options: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> AsyncIterator[RemoteEngine]:
    there, here, keys = tmp_path / "there", tmp_path / "here", KeyPair.generate()
    there.mkdir()
    here.mkdir()
    write_binding(there, Binding(host, keys.public))
    process = start([*prefix, *ENGINE, *options, str(there), "3"], stdin=subprocess.PIPE)
    engine = RemoteEngine(here, process)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(EngineConfig(model="m")) + b"\n")
        process.stdin.close()  # an engine on another machine does not end with it
        await until(lambda: read_listening(there))
        assert not (there / "binding.json").exists()
        listening = read_listening(there)
        assert listening is not None
        write_address(here, EngineAddress("node-b", host, listening.port, listening.engine_key, keys))
        yield engine
    finally:
        for link in engine.links:
            link.close()
        process.kill()
        process.wait(WAIT_S)


def request(name: str, tokens: list[int], max_tokens: int) -> AddRequest:
    return AddRequest(name, tokens, SamplingParams(max_tokens=max_tokens), arrived_s=time.monotonic())


@on_event_loop
async def test_clients_get_their_own_tokens_and_a_dead_one_is_forgotten(tmp_path: Path) -> None:
    async with remote_engine(tmp_path) as engine:
        others: list[Any] = []
        api_server = engine.link(1, others)
        await asyncio.sleep(0.2)
        assert engine.process.poll() is None
        assert not others  # the engine waits for the supervisor
        supervisor = engine.link(0)
        await until(lambda: any(isinstance(each, GenerationReady) for each in engine.messages))
        started_s = time.monotonic()
        api_server.send(request("a", [5, 6, 7], 9))
        supervisor.send(request("b", [8], 3))
        await until(lambda: len(engine.tokens(others, "a")) == 9 and len(engine.tokens(engine.messages, "b")) == 3)
        assert engine.tokens(others, "a") == [5, 6, 7] * 3
        assert engine.tokens(engine.messages, "b") == [8] * 3
        assert not engine.tokens(others, "b")
        (times,) = [output.times for step in others for output in step.outputs if output.times]
        assert started_s <= times.arrived_s <= times.scheduled_s <= times.first_token_s <= times.finished_s
        assert times.finished_s <= time.monotonic()

        api_server.send(request("c", [9], 4000))
        await until(lambda: engine.tokens(others, "c"))
        api_server.close()
        again = engine.link(1, later := [])  # an API server that is started again
        supervisor.send(ForgetClient(1))
        again.send(request("d", [4], 2))
        await until(lambda: len(engine.tokens(later, "d")) == 2)
        await until(lambda: "abort" in str(engine.messages[-1]))  # of its request, which the supervisor takes over
        assert engine.lost == []
        supervisor.send(Shutdown())
        await until(lambda: engine.process.poll() is not None)
        assert engine.process.returncode == 0


@pytest.mark.slow
@on_event_loop
async def test_engine_that_hangs_is_lost(tmp_path: Path) -> None:
    async with remote_engine(tmp_path) as engine:
        engine.link(0)
        await until(lambda: engine.messages)
        os.kill(engine.process.pid, signal.SIGSTOP)
        await until(lambda: engine.lost)
        assert engine.lost == ["the engine on node-b cannot be reached: the connection is lost"]


@pytest.mark.slow
@on_event_loop
async def test_engine_whose_server_is_gone_ends(tmp_path: Path) -> None:
    async with remote_engine(tmp_path, "--step-s", "0.05") as engine:
        link = engine.link(0)
        await until(lambda: engine.messages)
        link.send(request("a", [5], 4000))
        await until(lambda: engine.tokens(engine.messages, "a"))
        address = read_address(engine.folder)
        assert address is not None
        with ExitStack() as strangers:  # one connection after another that never shows a key
            stranger = socket.create_connection((address.host, address.port), 5)
            strangers.enter_context(stranger)
            link.close()
            started_s = time.monotonic()
            while engine.process.poll() is None and time.monotonic() - started_s < WAIT_S:
                await asyncio.sleep(1)
                with suppress(OSError):
                    strangers.enter_context(socket.create_connection((address.host, address.port), 5)).close()
            assert engine.process.poll() == 4


@pytest.mark.slow
def test_partition_ends_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @on_event_loop
    async def run(folder: Path) -> None:
        monkeypatch.setattr(RemoteSocket, "_context", None)  # its threads are in the namespace of their start
        with network() as made:
            prefix = ["ip", "netns", "exec", made.far]
            async with remote_engine(folder, host=made.far_address, prefix=prefix) as engine:
                link = engine.link(0)
                await until(lambda: engine.messages)
                # These requests fill the connection before the next heartbeat is due, so none can be sent.
                for number in range(256):
                    link.send(request(f"a{number}", [5], 4000))
                await until(lambda: engine.tokens(engine.messages, "a255"))
                await asyncio.to_thread(made.cut)
                await until(lambda: engine.lost)
                await until(lambda: engine.process.poll() is not None)
                assert engine.process.returncode == 4

    run(tmp_path)


@on_event_loop
async def test_other_keys_are_refused(tmp_path: Path) -> None:
    async with remote_engine(tmp_path) as engine:
        right = read_address(engine.folder)
        assert right is not None
        stranger = KeyPair.generate()
        for wrong in (replace(right, client_keys=stranger), replace(right, engine_key=stranger.public)):
            write_address(engine.folder, wrong)
            engine.link(0)
            await asyncio.sleep(1.0)
            assert not engine.messages
        write_address(engine.folder, right)
        engine.link(0)
        await until(lambda: engine.messages)


def test_times_keep_their_distance_from_the_send_on_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = RequestTimes(1000.0, 1001.0, 0.0, 1004.0)
    outputs = [SequenceOutput("a", [1], "stop", times=times), SequenceOutput("b", [2])]
    sent = StepOutputs(outputs, EngineStats(), 1004.5)
    monkeypatch.setattr(time, "monotonic", lambda: 1005.0)  # of the sender
    data = bytes(encode_message(msgspec.msgpack.Encoder(), sent))
    monkeypatch.setattr(time, "monotonic", lambda: 20.0)  # of the receiver
    received = shift_times(*decode_message(msgspec.msgpack.Decoder(StepOutputs), data))
    assert received.step_ended_s == 19.5
    assert received.outputs == [SequenceOutput("a", [1], "stop", times=RequestTimes(15, 16, 0.0, 19)), outputs[1]]
    text = Translate(request_id="t", token_ids=[1], arrived_s=30.0, deadline_s=None)
    assert shift_times(text, 2.0) == Translate(request_id="t", token_ids=[1], arrived_s=32.0, deadline_s=None)
    assert shift_times(AbortRequests(["a"]), 2.0) == AbortRequests(["a"])
    with pytest.raises(msgspec.DecodeError, match="a message of 3 bytes has no clock"):
        decode_message(msgspec.msgpack.Decoder(StepOutputs), b"abc")


@on_event_loop
async def test_engine_that_prints_nothing_has_a_log(tmp_path: Path) -> None:
    class Quiet:
        async def start_engine(self, *_arguments: object) -> RemoteRun:
            keys = KeyPair.generate()
            return RemoteRun(EngineAddress("node-b", "127.0.0.1", 1, keys.public, keys), 1, asyncio.Future())

        def kill_engine(self, engine: int) -> None:
            del engine

    order = StartEngine(0, "node-b", [], EngineConfig(model="m"), 1, KeyPair.generate().public)
    log = tmp_path / "m.log"
    log.write_text("of the engine before\n")
    await RemoteEngineProcess(Quiet(), order, print, tmp_path, log).prepare()
    assert log.read_text() == "of the engine before\n"
    log.unlink()
    await RemoteEngineProcess(Quiet(), order, print, tmp_path, log).prepare()
    assert find_logs(tmp_path, "", "m")[0].path == log
    with pytest.raises(ConfigError, match=r"no log of m in .*; no engine has started"):
        find_logs(tmp_path / "other", "", "m")


def test_packed_token_ids_have_one_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_token_ids([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    request = AddRequest("a", pack_token_ids([7, 70_000]), SamplingParams())
    assert (list(request.prompt), request.prompt_length) == ([7, 70_000], 2)
    monkeypatch.setattr("meltcore.protocol.generation._IS_SWAPPED", True)  # as on a machine with the other order
    assert pack_token_ids([0x01020304]) == bytes([1, 2, 3, 4])
    assert list(AddRequest("a", pack_token_ids([7, 70_000]), SamplingParams()).prompt) == [7, 70_000]
    assert list(AddRequest("a", [7, 70_000], SamplingParams()).prompt) == [7, 70_000]
