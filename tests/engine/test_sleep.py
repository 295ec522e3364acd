"""Engines on a CPU sleep and wake: the same answers, nothing cached, and memory given back."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any, Literal

import engine_tools as tools
import pytest
import torch
from engine_client import EngineClient

from meltcore.common.errors import ConfigError, SleepError
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.host.sleep_memory import CpuSleepMemory
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import Asleep, Awake, Sleep, Wake
from meltcore.settings.config import EngineConfig

PROMPT = [*range(20, 150)]  # two full pages, which the prefix cache keeps
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "enable_sleep_mode": True}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    tools.make_reference(family="qwen3_5_moe_text").save_pretrained(folder)
    return folder


def engine_of(folder: Path, **changes: Any) -> GenerationEngine:
    return GenerationEngine(EngineConfig(model=str(folder), memory_bytes=16 * 2**20, **(SETTINGS | changes)))


def answer(engine: GenerationEngine, request_id: str) -> tuple[list[int], int]:
    """The greedy tokens of a prompt, and how many of its tokens were cached."""
    engine.add(AddRequest(request_id, PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    return [token for output in outputs for token in output.token_ids], outputs[-1].cached_tokens


@pytest.mark.parametrize("family", ["checkpoint", "hybrid"])
def test_engine_sleeps_three_times_and_answers_alike(family: str, request: pytest.FixtureRequest) -> None:
    engine = engine_of(request.getfixturevalue(family))
    runner = engine.runner
    weight_bytes, largest = sum(weight.nbytes for weight in runner.weights), max(runner.weights, key=torch.numel)
    (tokens, _), (again, cached) = answer(engine, "a"), answer(engine, "b")
    assert (again, cached) == (tokens, 128)
    addresses = [tensor.data_ptr() for tensor in (*runner.weights, *runner.cache_tensors)]
    keeps: tuple[Literal["host", "disk"], ...] = ("host", "disk", "host")
    for cycle, keep in enumerate(keeps):
        is_dropped = keep == "disk"
        freed_bytes, resident_bytes = engine.sleep(keep)
        sleeping_bytes = runner.cache_bytes + is_dropped * weight_bytes
        assert 0.5 * sleeping_bytes < freed_bytes <= sleeping_bytes, "all but the ends of tensors, which are small here"
        assert resident_bytes == (not is_dropped) * weight_bytes
        assert not any(cache.count_nonzero() for cache in runner.cache_tensors)
        assert (largest.flatten()[1024:-1024].count_nonzero() == 0) == is_dropped
        assert engine.wake() == is_dropped * weight_bytes
        assert answer(engine, f"c{cycle}") == (tokens, 0), "the prefix cache was emptied"
        assert answer(engine, f"d{cycle}") == (tokens, 128)
        assert addresses == [tensor.data_ptr() for tensor in (*runner.weights, *runner.cache_tensors)]
        engine.check_idle()


@pytest.mark.slow
def test_engine_with_requests_or_without_a_sleep_mode_refuses(checkpoint: Path) -> None:
    engine = engine_of(checkpoint)
    engine.add(AddRequest("a", PROMPT, SamplingParams()))
    with pytest.raises(SleepError, match="1 open requests"):
        engine.sleep("host")
    engine.abort(["a"])
    with pytest.raises(SleepError, match="started without enable_sleep_mode"):
        engine_of(checkpoint, enable_sleep_mode=False).sleep("host")
    with pytest.raises(ConfigError, match=r"enable_sleep_mode: .* got --tensor-parallel-size 2"):
        engine_of(checkpoint, tensor_parallel_size=2)


def test_checkpoint_that_is_gone_leaves_the_engine_asleep(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    engine = engine_of(folder)
    tokens, _ = answer(engine, "a")
    engine.sleep("disk")
    (weights,) = folder.glob("*.safetensors")
    weights.rename(tmp_path / "moved")
    with pytest.raises(SleepError, match=r"weights cannot be read again: .*holds no"):
        engine.wake()
    (tmp_path / "moved").rename(weights)
    engine.wake()
    assert answer(engine, "b")[0] == tokens


def test_wake_without_host_memory_takes_none() -> None:
    weights, caches = [torch.ones(2**20), torch.ones(2**20)[10:]], [torch.ones(2**20)]
    held, available = 3 * 4 * 2**20, [10**9]
    memory = CpuSleepMemory(lambda: (weights, caches), lambda: available[0])
    freed_bytes, resident_bytes = memory.sleep("disk")
    assert held - 6 * mmap.PAGESIZE <= freed_bytes <= held
    assert resident_bytes == 0
    available[0] = held - 1
    with pytest.raises(SleepError, match="of host memory"):
        memory.wake(pytest.fail)
    available[0] += 1
    assert memory.wake(lambda: weights[1].fill_(2)) == 2 * 4 * 2**20
    assert (weights[1].unique().tolist(), caches[0].unique().tolist()) == ([2], [0])


@pytest.mark.slow
def test_engine_process_sleeps_and_wakes(checkpoint: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(checkpoint), memory_bytes=16 * 2**20, **SETTINGS)
    client = EngineClient(tmp_path, config)

    def tokens(name: str) -> Any:
        client.send(AddRequest(name, PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
        return [output.token_ids for output in client.outputs(1)[name]]

    try:
        client.ready()
        expected = tokens("a")
        client.send(AddRequest("long", PROMPT, SamplingParams(max_tokens=150, ignore_eos=True)), Sleep("disk"))
        answers = [client.receive() for _ in range(2)]
        (busy,) = [answer for answer in answers if isinstance(answer, Asleep)]
        assert busy.error == "the engine has 1 open requests; it sleeps only without any"
        client.outputs(1)
        client.send(Sleep("disk"), AddRequest("early", PROMPT, SamplingParams()), Wake())
        asleep, refused, awake = (client.receive() for _ in range(3))
        assert isinstance(asleep, Asleep)
        assert asleep.freed_bytes > 2**20 > asleep.resident_bytes == 0
        assert "sleeps and must be woken" in refused.outputs[0].error
        assert isinstance(awake, Awake)
        assert awake.bytes_copied > 0
        assert tokens("b") == expected
    finally:
        client.close()
