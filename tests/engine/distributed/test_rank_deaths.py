"""An engine process with two ranks: it serves, cleans up, and ends with a reason when a rank does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from engine_client import EngineClient
from waiting import WAIT_S, wait_until

from meltcore.protocol.generation import AddRequest, StepOutputs
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.protocol.shell import EngineFailed, Loading, Shutdown
from meltcore.settings.config import EngineConfig

RANK_MODULE = "meltcore.engine.distributed"
TIMEOUT_S = 4.0

StartEngineClient = Callable[..., EngineClient]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def start(request: pytest.FixtureRequest, tmp_path: Path, checkpoint: Path) -> Iterator[StartEngineClient]:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    clients: list[EngineClient] = []

    def starting(**settings: object) -> EngineClient:
        defaults = {"device": request.param, "tensor_parallel_size": 2, "max_num_seqs": 8}
        config = EngineConfig(model=str(checkpoint), memory_bytes=64 * 2**20, **(defaults | settings))
        clients.append(EngineClient(tmp_path, config))
        return clients[-1]

    yield starting
    for client in clients:
        client.close()


def rank_of(client: EngineClient) -> int:
    """The process id of rank 1. On GPUs the engine process has another child, a fork of it that compiles kernels."""
    engine = Path(f"/proc/{client.process.pid}")
    pids = [pid for task in engine.glob("task/*/children") for pid in task.read_text().split()]
    (rank,) = (pid for pid in pids if RANK_MODULE in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    return int(rank)


def ends(process: int) -> bool:
    """Whether the process ends in time; it may still wait for its parent to reap it."""

    def has_ended() -> bool:
        try:
            return " Z " in Path(f"/proc/{process}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    return wait_until(has_ended, f"the end of process {process}")


def failure(client: EngineClient) -> str:
    while isinstance(message := client.receive(), StepOutputs):
        pass
    assert isinstance(message, EngineFailed), message
    return message.message


@pytest.mark.slow
def test_engine_with_ranks_serves_under_signals_to_the_service_and_cleans_up(start: StartEngineClient) -> None:
    """systemd sends SIGTERM to all of them. The API server drains, for which it needs the engine."""
    client = start()
    assert client.ready().device.startswith("2 x ")
    rank = rank_of(client)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        name = number.name
        client.send(AddRequest(name, tools.random_prompt(20, 0), SamplingParams(max_tokens=40, ignore_eos=True)))
        first = client.receive()
        for process in (client.process.pid, rank):
            os.kill(process, number)
        assert isinstance(first, StepOutputs)
        already = sum(len(output.token_ids) for output in first.outputs)
        assert already + sum(len(output.token_ids) for output in client.outputs(1)[name]) == 40, name
    client.send(Shutdown())
    assert client.process.wait(WAIT_S) == 0
    assert ends(rank)


@pytest.mark.slow
def test_rank_exits_when_the_engine_is_killed(start: StartEngineClient, temporary_folder: Path) -> None:
    client = start()
    client.ready()
    rank = rank_of(client)
    assert list(temporary_folder.glob("meltcore-group-*"))
    client.process.kill()
    client.process.wait(WAIT_S)
    assert ends(rank)
    assert not list(temporary_folder.glob("meltcore-group-*")), "the remaining rank removes the shared folder"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "reason"),
    [(signal.SIGKILL, "): has ended: killed by signal 9"), (signal.SIGSTOP, "), stopped by a signal: ")],
    ids=["killed", "stopped"],
)
def test_dead_or_hanging_rank_ends_the_engine_during_a_step(
    start: StartEngineClient, end: signal.Signals, reason: str
) -> None:
    client = start(rank_timeout_s=TIMEOUT_S)
    client.ready()
    rank = rank_of(client)
    client.send(AddRequest("long", tools.random_prompt(20, 0), SamplingParams(max_tokens=900, ignore_eos=True)))
    assert isinstance(client.receive(), StepOutputs)
    os.kill(rank, end)
    text = failure(client)
    assert text.startswith("rank 1 (process ")
    assert reason in text
    assert client.process.wait(WAIT_S) == 1
    assert ends(rank)


@pytest.mark.slow
def test_dead_rank_ends_loading(start: StartEngineClient) -> None:
    """While the ranks join; test_ranks.py kills one later."""
    client = start()
    while not (isinstance(message := client.receive(), Loading) and message.stage == "joining the ranks"):
        pass
    os.kill(rank_of(client), signal.SIGKILL)
    while not isinstance(message := client.receive(), EngineFailed):
        pass
    assert "killed by signal 9" in message.message
    assert client.process.wait(WAIT_S) == 1
