"""Waiting that ends, and signals that wait."""

import signal
import threading

import pytest

from meltcore.results.patience import answer_within, undisturbed


def test_answers_and_errors_come_through_and_what_hangs_is_left() -> None:
    assert answer_within(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        answer_within(5.0, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        answer_within(0.05, lambda: threading.Event().wait(20))


def test_an_interruption_comes_when_the_block_is_left() -> None:
    done = []

    def work() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_is_left_alone() -> None:
    handlers = []

    def look() -> None:
        with undisturbed():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(5.0)
    assert handlers == [signal.default_int_handler]
