"""A host that is caught in a launch: another thread gives up for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from meltcore.engine.launch_watch import LaunchWatch

ENDS_IN_S = 10.0  # bounds the wait of a test that would hang

Process = subprocess.Popen[bytes]


@pytest.fixture
def rank() -> Iterator[Process]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_a_launch_ends_when_a_rank_does(rank: Process) -> None:
    caught = threading.Event()
    watch = LaunchWatch({1: rank}, caught.set)
    with watch.during(100.0):
        assert not caught.wait(0.2)
        rank.kill()
        assert caught.wait(ENDS_IN_S)
    assert watch.gave_up


def test_a_launch_ends_after_its_limit(rank: Process) -> None:
    caught = threading.Event()
    watch = LaunchWatch({1: rank}, caught.set)
    with watch.during(0.1):
        assert caught.wait(ENDS_IN_S)
    assert watch.gave_up


def test_between_launches_nobody_gives_up(rank: Process) -> None:
    """The engine looks for itself then."""
    caught = threading.Event()
    watch = LaunchWatch({1: rank}, caught.set)
    with watch.during(0.1):
        pass
    rank.kill()
    assert not caught.wait(0.3)
    assert not watch.gave_up
    watch.close()
