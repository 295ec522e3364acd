"""What a level says about the machine of the load generator, its own length and its number of answers."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from waiting import WAIT_S

from meltcore.measure.load.run import surroundings
from meltcore.measure.load.run.surroundings import Surroundings, SurroundingsMonitor, cautions, machine_cautions
from meltcore.measure.load.wire.connection import Target, resolve_target

QUIET = Surroundings(
    cores=4, is_server_local=False, client_share=0.2, server_share=None, other_share=0.09, steal_share=0.01
)
LISTEN = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def test_a_long_level_on_a_quiet_machine_has_no_caution() -> None:
    assert cautions(QUIET, duration_s=10.0, num_answers=1_000) == {}
    assert cautions(None, duration_s=10.0, num_answers=1_000) == {}


def test_short_levels_and_few_answers_are_named_with_their_limits() -> None:
    assert cautions(QUIET, duration_s=9.94, num_answers=999) == {
        "short level": "the level lasted 9.9 s; limit 10 s",
        "few answers": "999 complete answers; a steady p99 needs 1,000",
    }


@pytest.mark.parametrize(
    ("kind", "measured", "words"),
    [
        ("other processes", {"other_share": 0.11}, "used 0.4 of 4 cores; limit 0.4"),
        ("other processes", {"other_share": 0.5}, "used 2.0 of 4 cores; limit 0.4"),
        ("steal", {"steal_share": 0.031}, "3.1% of the cores' time for others; limit 2%"),
    ],
)
def test_busy_machines_are_named_with_their_limits(kind: str, measured: dict[str, float], words: str) -> None:
    found = machine_cautions(Surroundings(cores=4, is_server_local=False, **measured))  # type: ignore[arg-type]
    assert list(found) == [kind]
    assert words in found[kind]


def test_a_shared_machine_says_what_both_used() -> None:
    found = machine_cautions(
        Surroundings(cores=2, is_server_local=True, client_share=0.25, server_share=0.6, other_share=0.0)
    )
    assert list(found) == ["one machine"]
    assert "shared the 2 cores of one machine" in found["one machine"]
    assert "(the generator used 0.5, the server used 1.2)" in found["one machine"]


def test_an_unreadable_local_server_is_no_pass() -> None:
    found = machine_cautions(Surroundings(cores=2, is_server_local=True, client_share=0.25))
    assert "unknown" in found["other processes"]
    assert "the server used" not in found["one machine"]


def test_a_level_too_short_for_clock_ticks_says_nothing_of_other_processes() -> None:
    assert list(machine_cautions(Surroundings(cores=2, is_server_local=True))) == ["one machine"]


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[int, int]]:
    """A process that listens at a port: its id and the port."""
    process = subprocess.Popen([sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_the_server_on_this_machine_is_found(listener: tuple[int, int]) -> None:
    pid, port = listener
    assert surroundings._listeners(port) == [pid]
    stats = surroundings._process_stats()
    assert surroundings._top_ancestor(pid, stats, surroundings._ancestors(os.getpid(), stats)) == pid


class Clock:
    """The machine of a level: /proc at its start and at its end, 10 s later, on two cores of 100 ticks a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: dict[int, str], after: dict[int, str]) -> None:
        self._seconds = iter([100.0, 110.0])
        start_text = "cpu0 0 0 0 9 9 0 0 0 0 0\ncpu1 0 0 0 9 9 0 0 0 0 0\ncpu9 7 7 7 7 7 7 7 7 7 7\n"
        end_text = "cpu0 300 50 50 9 9 0 0 40 0 0\ncpu1 500 0 0 9 9 60 40 20 0 0\ncpu9 8 8 8 8 8 8 8 8 8 8\n"
        texts = iter([start_text, end_text])
        stats = iter([before, before, after])  # the first is read when the monitor is made
        monkeypatch.setattr(surroundings, "time", SimpleNamespace(monotonic=lambda: next(self._seconds)))
        monkeypatch.setattr(surroundings, "_TICKS_PER_S", 100)
        monkeypatch.setattr(surroundings, "_core_text", lambda: next(texts))
        monkeypatch.setattr(
            surroundings, "_process_stats", lambda: {pid: text.split() for pid, text in next(stats).items()}
        )
        monkeypatch.setattr(surroundings.os, "sched_getaffinity", lambda _pid: {0, 1})
        monkeypatch.setattr(surroundings.os, "getpid", lambda: 10)


def _stat(parent: int, *ticks: int) -> str:
    return f"S {parent} " + "0 " * 9 + " ".join(map(str, ticks))


def test_cpu_time_is_split_among_generator_server_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # 10 is this process with the worker 11, 20 the server's first process with the listener 21 and the engine 22.
    before = {5: _stat(1, 0, 0, 0, 0), 10: _stat(5, 5, 5, 0, 0), 11: _stat(10, 0, 0, 0, 0), 20: _stat(1, 1, 1, 1, 1),
              21: _stat(20, 0, 0, 0, 0), 22: _stat(20, 9, 0, 0, 0), 30: _stat(5, 0, 0, 0, 0)}  # fmt: skip
    after = {5: _stat(1, 70, 0, 0, 0), 10: _stat(5, 55, 55, 0, 0), 11: _stat(10, 60, 40, 0, 0),
             20: _stat(1, 1, 1, 201, 101), 22: _stat(20, 109, 0, 0, 0), 30: _stat(5, 0, 300, 0, 0)}  # fmt: skip
    Clock(monkeypatch, before, after)
    monkeypatch.setattr(surroundings, "_listeners", lambda _port: [21])
    monitor = SurroundingsMonitor(Target("http", "127.0.0.1", 8000, "127.0.0.1"))
    monitor.start()
    found = monitor.finish()
    assert (found.cores, found.is_server_local) == (2, True)
    assert found.client_share == pytest.approx(200 / 2000)
    assert found.server_share == pytest.approx(400 / 2000)
    assert found.other_share == pytest.approx((1000 - 200 - 400) / 2000)
    assert found.steal_share == pytest.approx(60 / 2000)


@pytest.mark.parametrize(("address", "is_local"), [("127.0.0.1", True), ("127.3.2.1", True), ("192.0.2.7", False)])
def test_a_machines_own_addresses_are_local(address: str, is_local: bool) -> None:
    assert surroundings._is_local(address) is is_local


def test_the_generator_knows_a_server_of_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monitor = SurroundingsMonitor(resolve_target(f"http://127.0.0.1:{server.getsockname()[1]}"))
        assert monitor._server_roots == {os.getpid()}
