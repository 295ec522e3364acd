"""Messages of ranks are received whenever they arrive, and kept until they are needed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from meltcore.common.errors import RankError
from meltcore.engine.distributed import rank_process, rank_start
from meltcore.engine.distributed import ranks as ranks_module
from meltcore.engine.distributed.rank_messages import RankFailed, RankStage, encoder, rank_address
from meltcore.engine.distributed.ranks import Ranks, step_counters
from meltcore.settings.config import EngineConfig

LIMIT_S = 3.0  # bounds the wait of a test that would hang
ARRIVES_S = 0.3


class Rank:
    """Rank 1: real messages from a process that does nothing."""

    def __init__(self) -> None:
        self._sender = zmq.Context.instance().socket(zmq.PUSH)
        self.receiver = zmq.Context.instance().socket(zmq.PULL)

    def start(self, folder: Path, rank: int) -> subprocess.Popen[bytes]:
        self._sender.connect(rank_address(folder, 0))
        self.receiver.connect(rank_address(folder, rank))
        self.send(RankStage(rank, "started"))
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def send(self, message: object) -> None:
        self._sender.send(encoder.encode(message))

    def close(self) -> None:
        self._sender.close(linger=0)
        self.receiver.close(linger=0)


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.close()


@pytest.fixture
def ranks(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(rank_start, "_start", rank.start)
    monkeypatch.setattr(ranks_module, "NO_PROGRESS_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(ranks_module, "STOPPED_LIMIT_S", 0.5)
    monkeypatch.setattr(ranks_module, "SEND_LIMIT_MS", 500)
    monkeypatch.setattr(ranks_module, "_LEAVE_LIMIT_S", 0.2)
    found = Ranks(EngineConfig(model="none", tensor_parallel_size=2))
    yield found
    found.close(lambda: None)


def test_message_received_by_a_check_is_kept(ranks: Ranks, rank: Rank) -> None:
    """A check of the processes once dropped the message that a start was waiting for."""
    rank.send(RankStage(1, "allocated"))
    time.sleep(ARRIVES_S)
    ranks.check()
    ranks.wait_allocated()


@pytest.mark.slow
def test_wait_for_messages_has_a_limit(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="0 of 1 other ranks have allocated"):
        ranks.wait_allocated()


@pytest.mark.slow
def test_progress_extends_the_limit(ranks: Ranks, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of which each look takes half of the limit."""
    looks = itertools.count()
    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: next(looks) * LIMIT_S / 2))
    _, signs = step_counters(ranks._folder, 2)
    seen: list[int] = []

    def load() -> None:
        seen.append(1)
        signs[1] += 1
        if len(seen) == 20:
            rank.send(RankStage(1, "allocated"))

    check_loading = ranks._check_loading
    monkeypatch.setattr(ranks, "_check_loading", lambda: (load(), check_loading()))
    ranks.wait_allocated()
    monkeypatch.undo()
    assert next(looks) > 20


def test_rank_stopped_while_loading_is_named(ranks: Ranks) -> None:
    process = ranks._processes[1]
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankError, match=rf"rank 1 \(process {process.pid}\): has been stopped by a signal for 0.5 s"):
        ranks.wait_allocated()


def test_loading_of_rank_0_ends_when_a_rank_is_gone(ranks: Ranks) -> None:
    reported = []
    progress = ranks.watched_progress(lambda stage, fraction: reported.append((stage, fraction)))
    progress("loading weights", 0.5)
    ranks._processes[1].kill()
    ranks._processes[1].wait(LIMIT_S)
    with pytest.raises(RankError, match="killed by signal 9"):
        progress("loading weights", 0.6)
    assert reported == [("loading weights", 0.5)]


def test_error_carries_the_reason_of_the_rank(ranks: Ranks, rank: Rank) -> None:
    rank.send(RankFailed(1, "no memory for its shard"))
    with pytest.raises(RankError, match=r"rank 1 .*no memory for its shard"):
        ranks.wait_allocated()


def test_rank_that_is_not_connected_is_named(ranks: Ranks, rank: Rank) -> None:
    rank.receiver.close(linger=0)
    time.sleep(ARRIVES_S)
    with pytest.raises(RankError, match=r"rank 1 .*is not connected"):
        ranks.capture_graphs()


def test_rank_without_settings_exits_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 ended before it could send settings."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["meltcore.engine.distributed", str(folder), "1"])
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert rank_process.main() == 0
    assert capfd.readouterr() == ("", "")
    assert not folder.exists()
