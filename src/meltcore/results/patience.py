"""A question to a driver that may never answer it."""

import threading
from collections.abc import Callable
from typing import TypeVar

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
