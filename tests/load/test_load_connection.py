"""Single requests of the load generator's connections."""

import asyncio
import gc
import signal
import warnings

import pytest

from meltcore.load.connection import parse_target, request, run_coroutine


def test_interrupt_before_the_event_loop_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_loop() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the interrupt did not arrive")

    monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted_loop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            run_coroutine(request(parse_target("http://127.0.0.1:9"), "GET", "/health", timeout_s=1.0))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_coroutine_returns_its_result_and_its_error() -> None:
    async def divide(by: int) -> float:
        await asyncio.sleep(0)
        return 6 / by

    assert run_coroutine(divide(3)) == 2
    with pytest.raises(ZeroDivisionError):
        run_coroutine(divide(0))
