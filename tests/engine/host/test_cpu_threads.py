"""Threads of an engine on a CPU, with times as Linux gives them for idle and busy machines."""

from __future__ import annotations

import threading

import pytest

from meltcore.engine.host.cpu_threads import CpuThreads, CpuTime, core_limit, cpu_time


class Machine:
    """Has `cores` for the threads of one engine, whose time passes in steps of 0.3 s."""

    def __init__(self, cores: float, limit: int) -> None:
        self.cores, self.now, self.running, self.waiting = cores, 0.0, 0.0, 0.0
        self.counts: list[int] = []
        self.threads = CpuThreads(limit, clock=lambda: self.now, times=self.times, set_threads=self.counts.append)

    def times(self) -> CpuTime:
        return CpuTime(self.running, self.waiting)

    def run(self, seconds: float) -> int:
        """Return the number of threads after these seconds of steps."""
        for _ in range(round(seconds / 0.3)):
            self.now += 0.3
            count = self.counts[-1]
            on_core = min(self.cores, count)
            self.running += 0.3 * on_core
            self.waiting += 0.3 * (count - on_core)
            self.threads.end_step()
        return self.counts[-1]


def test_idle_cores_are_all_taken_within_a_second() -> None:
    assert Machine(cores=2, limit=2).run(0.6) == 2
    assert Machine(cores=16, limit=16).run(1.5) == 16
    assert Machine(cores=16, limit=12).run(1.5) == 12


@pytest.mark.parametrize(("cores", "limit", "expected"), [(1.0, 2, 1), (0.6, 2, 1), (8.0, 16, 8), (15.2, 16, 15)])
def test_threads_without_a_core_are_given_up(cores: float, limit: int, expected: int) -> None:
    machine = Machine(cores, limit)
    machine.run(300)
    assert abs(machine.counts[-1] - expected) <= 1
    # The longer a machine is busy, the rarer it is tried with more threads.
    before = len(machine.counts)
    machine.run(120)
    assert len(machine.counts) - before <= 8


def test_an_api_server_on_a_part_of_a_core_does_not_halve_the_engine() -> None:
    assert Machine(cores=1.7, limit=2).run(30) == 2


def test_cores_that_become_free_are_taken_again() -> None:
    machine = Machine(cores=1, limit=2)
    machine.run(600)
    assert machine.counts[-1] == 1
    machine.cores = 2
    assert machine.run(61) == 2


def test_idle_time_between_requests_changes_nothing() -> None:
    machine = Machine(cores=2, limit=2)
    machine.run(1)
    machine.now += 3600
    machine.threads.end_step()
    assert machine.counts[-1] == 2


def test_without_times_of_the_kernel_one_core_is_left_to_others() -> None:
    counts: list[int] = []
    threads = CpuThreads(4, times=lambda: None, set_threads=counts.append)
    threads.end_step()
    assert counts == [3]


def test_the_kernel_counts_the_work_of_all_threads() -> None:
    before = cpu_time()
    if before is None:
        pytest.skip("this kernel does not count what threads wait")
    done = threading.Event()
    worker = threading.Thread(target=lambda: (sum(range(3_000_000)), done.wait(60)))
    worker.start()
    sum(range(3_000_000))
    after = cpu_time()
    done.set()
    worker.join(60)
    assert after is not None
    assert after.running_s > before.running_s
    assert after.waiting_s >= before.waiting_s


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("1", 1)])
def test_the_variable_of_openmp_is_the_limit(monkeypatch: pytest.MonkeyPatch, value: str, expected: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert core_limit() == expected


@pytest.mark.parametrize("value", ["", "0", "all", "4,2"])
def test_another_value_of_the_variable_leaves_all_cores(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert core_limit() == 6
