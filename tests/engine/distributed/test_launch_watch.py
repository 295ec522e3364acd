"""A blocked launch is aborted by another thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from waiting import WAIT_S

from meltcore.engine.distributed.ranks import LaunchWatch

Process = subprocess.Popen[bytes]


@pytest.fixture
def rank() -> Iterator[Process]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_launch_is_aborted_when_a_rank_ends(rank: Process) -> None:
    caught = threading.Event()
    watch = LaunchWatch({1: rank}, caught.set)
    with watch.watch_launch(100.0):
        assert not caught.wait(0.2)
        rank.kill()
        assert caught.wait(WAIT_S)
    assert watch.aborted


def test_launch_is_aborted_after_its_limit(rank: Process) -> None:
    caught = threading.Event()
    watch = LaunchWatch({1: rank}, caught.set)
    with watch.watch_launch(0.1):
        assert caught.wait(WAIT_S)
    assert watch.aborted


def test_nothing_is_aborted_between_launches(rank: Process) -> None:
    """The engine checks the ranks itself then."""
    caught = threading.Event()
    watch = LaunchWatch({1: rank}, caught.set)
    with watch.watch_launch(0.1):
        pass
    rank.kill()
    assert not caught.wait(0.3)
    assert not watch.aborted
    watch.close()
