"""Waiting that ends: for a driver that may never answer, and for signals that must not come between two steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Found = TypeVar("Found")


def answer_within(limit_s: float, question: Callable[[], Found]) -> Found:
    """What `question` returns or raises. Raises TimeoutError after `limit_s`.

    It is asked on a thread of its own, which is left behind where it hangs and ends with the process.
    """
    answers: list[Found] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # handed to whoever asked
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if errors:
        raise errors[0]
    return answers[0]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect when the block is left: what it starts must not be lost sight of.

    Only the main thread is ever interrupted; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)
