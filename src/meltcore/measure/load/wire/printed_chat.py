"""Prints a streamed chat in a terminal while it comes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from meltcore.measure.load.config import AnswerRules
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.wire.connection import HttpRequestError, Target, connect, run_coroutine
from meltcore.measure.load.wire.stream import StreamedResponse

_CONNECT_S, _SILENCE_S = 10.0, 600.0
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class _PrintedResponse(StreamedResponse):
    """Prints the content of an answer as it arrives, and in a terminal its reasoning, dimmed."""

    __slots__ = ("_num_printed", "arrived")

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._num_printed = [0, 0]
        super().__init__(
            RequestRecord(index=0, intended_s=0.0),
            lambda _: self.arrived.set(),
            keep_text=True,
            rules=AnswerRules(allow_empty=True),
        )

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete or has failed."""
        return self._on_done is None

    def on_body(self, data: bytes) -> None:
        """Decode the events in `data` and print their text."""
        super().on_body(data)
        is_terminal = sys.stdout.isatty()
        for index, text in enumerate((self.reasoning if is_terminal else "", self.content)):
            new_text, self._num_printed[index] = text[self._num_printed[index] :], len(text)
            if new_text:
                print(f"{_DIM}{new_text}{_PLAIN}" if index == 0 else new_text, end="", flush=True)
        self.arrived.set()


def print_answer(target: Target, request: dict[str, Any]) -> tuple[str, str | None]:
    """Send a streamed chat request and print the answer. An interrupt ends the answer and is not raised.

    Returns the text that came and the error that ended it, or None if the answer is complete or was interrupted.
    """
    response: list[_PrintedResponse] = []
    error = None
    try:
        run_coroutine(_stream(target, request, response))
        record = response[0].record
        error = None if record.failure is None else f"{record.failure}: {record.detail}"
    except KeyboardInterrupt:
        pass
    except HttpRequestError as failure:
        error = str(failure)
    return response[0].content if response else "", error


async def _stream(target: Target, request: dict[str, Any], responses: list[_PrintedResponse]) -> None:
    """Receive the answer to a chat until it ends, and put its response into `responses` before that.

    Raises HttpRequestError if the server cannot be reached, or if nothing comes for `_SILENCE_S`.
    """
    response = _PrintedResponse()
    responses.append(response)
    connection = await connect(target, _CONNECT_S)
    try:
        body = msgspec.json.encode(request)
        connection.send(target.encode_head("POST", "/v1/chat/completions", len(body)) + body, response)
        while not response.is_over:
            response.arrived.clear()
            async with asyncio.timeout(_SILENCE_S):
                await response.arrived.wait()
    except TimeoutError as error:
        raise HttpRequestError("timeout", f"nothing came for {_SILENCE_S:g} s") from error
    finally:
        connection.close()
