"""The engine process over its real sockets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from engine_client import EngineClient

from meltcore.config import EngineConfig
from meltcore.engine.host.shell import STEP, _CudaProfiler
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import AbortRequests, EngineFailed, Profile, ProfileDone, Shutdown


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
    assert client.process.wait(20) == 0


@pytest.mark.slow
def test_cuda_profiler_without_a_gpu_is_refused(client: EngineClient) -> None:
    client.ready()
    client.send(Profile("start", "", "cuda"), Profile("stop", "", "cuda"))
    errors = [done.error for done in (client.receive(), client.receive()) if isinstance(done, ProfileDone)]
    assert errors == ["RuntimeError: the cuda profiler needs an NVIDIA GPU", "no profile is being taken"]


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
    assert client.process.wait(10) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_failed_start_is_one_line_and_a_non_zero_exit(tmp_path: Path, temporary_folder: Path, ranks: int) -> None:
    client = EngineClient(
        tmp_path, EngineConfig(model=str(tmp_path / "nothing"), device="cpu", tensor_parallel_size=ranks)
    )
    try:
        message = client.receive()
        assert isinstance(message, EngineFailed)
        assert "no such folder" in message.message
        assert "\n" not in message.message
        assert client.process.wait(20) == 1
        assert not list(temporary_folder.glob("meltcore-group-*")), "ranks started ahead are ended"
    finally:
        client.close()
