"""An engine process with two ranks: it serves, leaves nothing behind, and ends with a reason when a rank does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_tools as tools
import pytest
import torch
from engine_front import Front

from meltcore.config import EngineConfig
from meltcore.engine.messages import AddRequest, EngineFailed, Loading, Shutdown, StepOutputs
from meltcore.engine.sampling_params import SamplingParams

TIMEOUT_S = 4.0
# From a rank's end to the engine's: the limit of a step, what is then looked for, and a process that ends. Wide, for
# busy machines: unnoticed, it would never be over.
WITHIN_S = TIMEOUT_S + 26.0

StartFront = Callable[..., Front]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def start(request: pytest.FixtureRequest, tmp_path: Path, checkpoint: Path) -> Iterator[StartFront]:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    fronts: list[Front] = []

    def starting(**settings: object) -> Front:
        defaults = {"device": request.param, "tp": 2, "max_num_seqs": 8}
        config = EngineConfig(model=str(checkpoint), memory_bytes=512 * 2**20, **(defaults | settings))
        fronts.append(Front(tmp_path, config))
        return fronts[-1]

    yield starting
    for front in fronts:
        front.close()


def rank_of(front: Front) -> int:
    """The process of rank 1, the only child of the engine's."""
    (rank,) = map(int, Path(f"/proc/{front.process.pid}/task/{front.process.pid}/children").read_text().split())
    return rank


def ends(process: int) -> bool:
    """Whether it is gone in time, or has ended and waits for its parent."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        try:
            if " Z " in Path(f"/proc/{process}/stat").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def failure(front: Front) -> str:
    while isinstance(message := front.receive(), StepOutputs):
        pass
    assert isinstance(message, EngineFailed), message
    return message.message


def test_serves_and_leaves_nothing_behind(start: StartFront) -> None:
    front = start()
    assert front.ready().device.startswith("2 x ")
    rank = rank_of(front)
    prompt = tools.random_prompt(20, 0)
    front.send(AddRequest("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
    assert sum(len(output.token_ids) for output in front.outputs(1)["a"]) == 5
    front.send(Shutdown())
    assert front.process.wait(WITHIN_S) == 0
    assert ends(rank)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_all_processes_of_a_service_is_for_the_front(number: signal.Signals, start: StartFront) -> None:
    """As systemd sends SIGTERM: the front is to drain, for which it needs the engine."""
    front = start()
    front.ready()
    front.send(AddRequest("a", tools.random_prompt(20, 0), SamplingParams(max_tokens=40, ignore_eos=True)))
    first = front.receive()
    for process in (front.process.pid, rank_of(front)):
        os.kill(process, number)
    assert isinstance(first, StepOutputs)
    already = sum(len(output.token_ids) for output in first.outputs)
    assert already + sum(len(output.token_ids) for output in front.outputs(1)["a"]) == 40
    front.send(Shutdown())
    assert front.process.wait(WITHIN_S) == 0


def test_a_rank_goes_when_the_engine_is_killed(start: StartFront, temporary_folder: Path) -> None:
    front = start()
    front.ready()
    rank = rank_of(front)
    assert list(temporary_folder.glob("meltcore-group-*"))
    front.process.kill()
    front.process.wait(WITHIN_S)
    assert ends(rank)
    assert not list(temporary_folder.glob("meltcore-group-*")), "what ranks share is removed by who is left"


@pytest.mark.parametrize(
    ("end", "reason"),
    [(signal.SIGKILL, "): has ended: killed by signal 9"), (signal.SIGSTOP, "), stopped by a signal: ")],
    ids=["killed", "stopped"],
)
def test_at_work_a_rank_that_is_gone_or_stuck_ends_the_engine(
    start: StartFront, end: signal.Signals, reason: str
) -> None:
    front = start(rank_timeout_s=TIMEOUT_S)
    front.ready()
    rank = rank_of(front)
    front.send(AddRequest("long", tools.random_prompt(20, 0), SamplingParams(max_tokens=900, ignore_eos=True)))
    assert isinstance(front.receive(), StepOutputs)
    os.kill(rank, end)
    started = time.monotonic()
    text = failure(front)
    assert text.startswith("rank 1 (process ")
    assert reason in text
    assert front.process.wait(WITHIN_S) == 1
    assert time.monotonic() - started < WITHIN_S
    assert ends(rank)


def test_at_rest_a_rank_that_is_gone_ends_the_engine(start: StartFront) -> None:
    front = start()
    front.ready()
    os.kill(rank_of(front), signal.SIGKILL)
    assert "killed by signal 9" in failure(front)
    assert front.process.wait(WITHIN_S) == 1


@pytest.mark.parametrize("stage", ["meeting other ranks", "making the model"])
def test_a_rank_that_is_gone_while_loading_ends_the_start(stage: str, start: StartFront) -> None:
    front = start()
    while not (isinstance(message := front.receive(), Loading) and message.stage == stage):
        pass
    killed = time.monotonic()
    os.kill(rank_of(front), signal.SIGKILL)
    while not isinstance(message := front.receive(), EngineFailed):
        pass
    assert "killed by signal 9" in message.message
    assert time.monotonic() - killed < WITHIN_S
    assert front.process.wait(WITHIN_S) == 1
