"""What a rank says is taken in whenever it comes, and kept until it is asked for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from meltcore.config import EngineConfig
from meltcore.engine import rank_start
from meltcore.engine import ranks as ranks_file
from meltcore.engine.rank_messages import RankFailed, RankStage, encoder, rank_address
from meltcore.engine.ranks import Ranks, step_board
from meltcore.errors import RankError

LIMIT_S = 3.0  # bounds the wait of a test that would hang
ARRIVES_S = 0.3


class Rank:
    """Rank 1, of which only the words are real."""

    def __init__(self) -> None:
        self._voice = zmq.Context.instance().socket(zmq.PUSH)
        self.ear = zmq.Context.instance().socket(zmq.PULL)

    def start(self, folder: Path, rank: int) -> subprocess.Popen[bytes]:
        self._voice.connect(rank_address(folder, 0))
        self.ear.connect(rank_address(folder, rank))
        self.say(RankStage(rank, "started"))
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def say(self, message: object) -> None:
        self._voice.send(encoder.encode(message))

    def close(self) -> None:
        self._voice.close(linger=0)
        self.ear.close(linger=0)


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.close()


@pytest.fixture
def ranks(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(rank_start, "_start", rank.start)
    monkeypatch.setattr(ranks_file, "QUIET_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(ranks_file, "STOPPED_LIMIT_S", 0.5)
    monkeypatch.setattr(ranks_file, "SEND_LIMIT_MS", 500)
    monkeypatch.setattr(ranks_file, "_LEAVE_LIMIT_S", 0.2)
    found = Ranks(EngineConfig(model="none", tp=2))
    yield found
    found.close(lambda: None)


def test_what_comes_while_nobody_waits_is_kept(ranks: Ranks, rank: Rank) -> None:
    """A look whether all still live found the word that a start was waiting for, and threw it away."""
    rank.say(RankStage(1, "settled"))
    time.sleep(ARRIVES_S)
    ranks.check()
    ranks.wait_settled()


def test_a_wait_for_words_has_a_limit(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="0 of 1 others could be settled"):
        ranks.wait_settled()


def test_signs_of_life_put_the_limit_off(ranks: Ranks, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_file, "QUIET_LIMIT_S", 0.6)
    begun = time.monotonic()

    def load() -> None:
        _, signs = step_board(ranks._folder, 2)
        for _ in range(6):
            time.sleep(0.3)
            signs[1] += 1
        rank.say(RankStage(1, "settled"))

    loading = threading.Thread(target=load)
    loading.start()
    ranks.wait_settled()
    loading.join(LIMIT_S)
    assert time.monotonic() - begun > 1.5


def test_a_rank_that_stays_stopped_while_it_loads_is_named(ranks: Ranks) -> None:
    process = ranks._processes[1]
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankError, match=rf"rank 1 \(process {process.pid}\): has been stopped by a signal for 0.5 s"):
        ranks.wait_settled()


def test_our_own_loading_ends_where_a_rank_is_gone(ranks: Ranks) -> None:
    told = []
    progress = ranks.watched(lambda stage, fraction: told.append((stage, fraction)))
    progress("loading weights", 0.5)
    ranks._processes[1].kill()
    ranks._processes[1].wait(LIMIT_S)
    with pytest.raises(RankError, match="killed by signal 9"):
        progress("loading weights", 0.6)
    assert told == [("loading weights", 0.5)]


def test_the_reason_of_a_failure_is_told(ranks: Ranks, rank: Rank) -> None:
    rank.say(RankFailed(1, "no room for its share"))
    with pytest.raises(RankError, match=r"rank 1 .*no room for its share"):
        ranks.wait_settled()


def test_a_rank_that_does_not_listen_is_named(ranks: Ranks, rank: Rank) -> None:
    rank.ear.close(linger=0)
    time.sleep(ARRIVES_S)
    with pytest.raises(RankError, match=r"rank 1 .*does not listen"):
        ranks.capture_graphs()


def test_a_rank_that_is_told_nothing_leaves_without_a_word(tmp_path: Path) -> None:
    """Rank 0 was gone before it had settings to pass on."""
    folder = tmp_path / "shared"
    folder.mkdir()
    words = [sys.executable, "-m", "meltcore.engine.rank_process", str(folder), "1"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not folder.exists()
