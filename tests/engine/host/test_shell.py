"""The engine process over its real sockets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_tools as tools
import msgspec
import pytest
import torch
import zmq
from engine_client import EngineClient
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.engine.host import shell as shell_module
from meltcore.engine.host.device import describe_device
from meltcore.engine.host.shell import STEP, EngineShell, _CudaProfiler
from meltcore.protocol import engines
from meltcore.protocol.generation import AddRequest, GenerationReady, ToEngine
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests, EngineFailed, Profile, ProfileDone, Shutdown
from meltcore.protocol.sockets import socket_address
from meltcore.settings.config import EngineConfig


@pytest.fixture
def client(tmp_path: Path, checkpoint: Path) -> Iterator[EngineClient]:
    client = EngineClient(tmp_path, EngineConfig(model=str(checkpoint), device="cpu", memory_bytes=64 * 2**20))
    yield client
    client.close()


@pytest.mark.slow
def test_process_serves_aborts_refuses_profiles_and_shuts_down(client: EngineClient, tmp_path: Path) -> None:
    ready = client.ready()
    assert ready.vocab_size == tools.VOCAB
    assert ready.weights == "real"

    if not torch.cuda.is_available():
        client.send(Profile("start", "", "cuda"), Profile("stop", "", "cuda"))
        errors = [client.receive().error for _ in range(2)]
        assert errors == ["RuntimeError: the cuda profiler needs an NVIDIA GPU", "no profile is being taken"]

    prompt = tools.random_prompt(20, 0)
    client.send(Profile("start", str(tmp_path / "traces")))
    assert isinstance(client.receive(), ProfileDone)
    client.send(
        AddRequest("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True)),
        AddRequest("long", prompt, SamplingParams(max_tokens=900, ignore_eos=True)),
        AddRequest("bad", [tools.VOCAB], SamplingParams()),
    )
    seen = client.outputs(2)
    assert seen["bad"][-1].finish_reason == "error"
    assert str(tools.VOCAB - 1) in (seen["bad"][-1].error or "")
    assert sum(len(output.token_ids) for output in seen["a"]) == 5
    assert seen["a"][-1].finish_reason == "length"

    client.send(AbortRequests(["long", "unknown"]), AbortRequests(["long"]))
    (aborted,) = [outputs[-1] for outputs in client.outputs(1).values() if outputs[-1].finish_reason]
    assert aborted.finish_reason == "abort"

    client.send(Profile("stop", ""))
    while not isinstance(done := client.receive(), ProfileDone):
        pass
    assert done.error is None
    events = json.loads(gzip.decompress(Path(done.path).read_bytes()))["traceEvents"]
    assert sum(event.get("name") == STEP and event.get("cat") == "user_annotation" for event in events) >= 5
    client.send(Shutdown())
    assert client.process.wait(WAIT_S) == 0


def test_whole_exception_of_a_failed_start_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard error is the model's log. An error that names its cause for the user needs no traceback."""

    def read_weights() -> None:
        raise KeyError("layers.7.mlp")

    def broken(_progress: object) -> Any:
        try:
            read_weights()
        except KeyError as error:
            raise ValueError("shapes\ndiffer") from error

    def refused(_progress: object) -> Any:
        raise ConfigError("no room")

    with zmq.Context() as context, context.socket(zmq.PUSH) as to_engine, context.socket(zmq.PULL) as from_engine:
        to_engine.bind(socket_address(tmp_path, "to-engine", 0))
        from_engine.bind(socket_address(tmp_path, "from-engine", 0))
        from_engine.rcvtimeo = 10_000
        shell = EngineShell(tmp_path, ToEngine)
        said = []
        for build in (broken, refused):
            assert shell.serve(build) == 1
            said.append(msgspec.msgpack.decode(from_engine.recv(), type=engines.from_engine()))
        shell.close()
    assert said == [EngineFailed("the engine could not start: ValueError: shapes differ"), EngineFailed("no room")]
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 2, "of the error and of its cause"
    assert "in read_weights" in printed
    assert printed.endswith("ValueError: shapes\ndiffer\n"), "no traceback of the second"


@pytest.mark.parametrize(
    ("device", "adapts"), [(describe_device(torch.device("cpu"), 1), True), ("NVIDIA H200", False)]
)
def test_only_an_engine_on_the_cpu_adapts_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, adapts: bool
) -> None:
    class IdleEngine:
        has_work = False

        def ready(self) -> GenerationReady:
            return GenerationReady(
                device, "float32", "dummy", [], 0.0, 64, 1, 512, 64, 64, ["float32"], "float32", "none"
            )

        def close(self) -> None:
            pass

    limits: list[int] = []
    monkeypatch.setattr(shell_module, "CpuThreads", limits.append)
    with zmq.Context() as context, context.socket(zmq.PUSH) as to_engine, context.socket(zmq.PULL) as from_engine:
        to_engine.bind(socket_address(tmp_path, "to-engine", 0))
        from_engine.bind(socket_address(tmp_path, "from-engine", 0))
        shell = EngineShell(tmp_path, ToEngine)
        to_engine.send(msgspec.msgpack.encode([Shutdown()]))  # after the connection, for which it would wait
        assert shell.serve(lambda _progress: IdleEngine()) == 0  # type: ignore[arg-type, return-value]
        shell.close()
    assert len(limits) == adapts


def test_cuda_profiler_marks_range_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    @contextmanager
    def nvtx_range(name: str) -> Iterator[None]:
        calls.append(f"push {name}")
        yield
        calls.append("pop")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("cudaProfilerStart"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("cudaProfilerStop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    profiler = _CudaProfiler()
    for _ in range(2):
        with profiler.step():
            calls.append("kernels")
    assert profiler.stop() == ""
    steps = [f"push {STEP}", "kernels", "pop"] * 2
    assert calls == ["synchronize", "cudaProfilerStart", *steps, "synchronize", "cudaProfilerStop"]


@pytest.mark.slow
def test_process_exits_at_the_end_of_its_standard_input(client: EngineClient) -> None:
    client.ready()
    assert client.process.stdin is not None
    client.process.stdin.close()
    assert client.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_failed_start_with_ranks_is_one_line_and_a_non_zero_exit(tmp_path: Path, temporary_folder: Path) -> None:
    """That of one rank is tested with its server: test_real_engine.py."""
    client = EngineClient(tmp_path, EngineConfig(model=str(tmp_path / "nothing"), device="cpu", tensor_parallel_size=2))
    try:
        message = client.receive()
        assert isinstance(message, EngineFailed)
        assert "no such folder" in message.message
        assert "\n" not in message.message
        assert client.process.wait(WAIT_S) == 1
        assert not list(temporary_folder.glob("meltcore-group-*")), "ranks started ahead are ended"
    finally:
        client.close()
