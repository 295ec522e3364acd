"""The engine process over its real sockets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import engine_tools as tools
import pytest
from engine_front import Front

from meltcore.config import EngineConfig
from meltcore.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    Profile,
    ProfileDone,
    Shutdown,
)
from meltcore.engine.profiler import STEP
from meltcore.engine.sampling_params import SamplingParams


@pytest.fixture
def front(tmp_path: Path, checkpoint: Path) -> Iterator[Front]:
    front = Front(tmp_path, EngineConfig(model=str(checkpoint), device="cpu", memory_bytes=64 * 2**20))
    yield front
    front.close()


def test_serves_aborts_refuses_profiles_and_leaves(front: Front, tmp_path: Path) -> None:
    ready = front.ready()
    assert ready.vocab_size == tools.VOCAB
    assert ready.weights == "real"

    prompt = tools.random_prompt(20, 0)
    front.send(Profile("start", str(tmp_path / "traces")))
    assert isinstance(front.receive(), ProfileDone)
    front.send(
        AddRequest("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True)),
        AddRequest("long", prompt, SamplingParams(max_tokens=900, ignore_eos=True)),
        AddRequest("bad", [tools.VOCAB], SamplingParams()),
    )
    seen = front.outputs(2)
    assert seen["bad"][-1].finish_reason == "error"
    assert str(tools.VOCAB - 1) in (seen["bad"][-1].error or "")
    assert sum(len(output.token_ids) for output in seen["a"]) == 5
    assert seen["a"][-1].finish_reason == "length"

    front.send(AbortRequests(["long", "unknown"]), AbortRequests(["long"]))
    (aborted,) = [outputs[-1] for outputs in front.outputs(1).values() if outputs[-1].finish_reason]
    assert aborted.finish_reason == "abort"

    front.send(Profile("stop", ""))
    while not isinstance(done := front.receive(), ProfileDone):
        pass
    assert done.error is None
    events = json.loads(gzip.decompress(Path(done.path).read_bytes()))["traceEvents"]
    assert sum(event.get("name") == STEP and event.get("cat") == "user_annotation" for event in events) >= 5
    front.send(Shutdown())
    assert front.process.wait(20) == 0


def test_leaves_when_the_front_is_gone(front: Front) -> None:
    front.ready()
    assert front.process.stdin is not None
    front.process.stdin.close()
    assert front.process.wait(10) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_start_up_failure_is_one_line_and_a_non_zero_exit(tmp_path: Path, temporary_folder: Path, ranks: int) -> None:
    front = Front(tmp_path, EngineConfig(model=str(tmp_path / "nothing"), device="cpu", tp=ranks))
    try:
        message = front.receive()
        assert isinstance(message, EngineFailed)
        assert "no such folder" in message.message
        assert "\n" not in message.message
        assert front.process.wait(20) == 1
        assert not list(temporary_folder.glob("meltcore-group-*")), "ranks started ahead are ended"
    finally:
        front.close()
