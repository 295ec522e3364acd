"""Single requests of the load generator's connections."""

import asyncio
import gc
import signal
import warnings
from contextlib import suppress

import pytest
from waiting import WAIT_S

from meltcore.measure.load.wire import connection
from meltcore.measure.load.wire.connection import parse_target, request, run_coroutine


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


def test_request_ends_when_it_is_cancelled_as_its_answer_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()
        writer.close()

    async def cancelled_with_the_answer() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            task = asyncio.create_task(request(parse_target(url), "GET", "/health", timeout_s=5.0))
            with monkeypatch.context() as patch:
                on_end = connection._BufferedResponse.on_end
                patch.setattr(connection._BufferedResponse, "on_end", lambda self: (on_end(self), task.cancel()))
                await asyncio.wait([task], timeout=WAIT_S)
            assert task.cancelled()

    asyncio.run(cancelled_with_the_answer())


def test_interrupt_is_raised_though_the_coroutine_has_ended() -> None:
    async def answer_in_spite_of_it() -> int:
        signal.raise_signal(signal.SIGINT)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(WAIT_S)
        return 1

    with pytest.raises(KeyboardInterrupt):
        run_coroutine(answer_in_spite_of_it())
