"""Follows the parts of an answer, which other APIs than OpenAI's chats stream one after another.

A part is reasoning, text or one tool call. A dialect says which events begin, continue and end a part, and how it calls
the fields of a chat.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Literal

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.protocol import StreamOptions
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.generation.completions import GenerationEndpoint
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket
from meltcore.serve.tasks.generation.local_engine import LocalEngine
from meltcore.serve.tasks.generation.responses import ChatResponseWriter
from meltcore.text.call_scanners import CallDelta, divide_pieces

to_json = msgspec.json.Encoder().encode
CLIENT_NAMES = "meltcore.client_names"  # in the scope of a request: its fields with an index, by a chat's names


@dataclass
class Part:
    """One part of an answer. A call has a name and an id, and its content is the JSON text of its arguments.

    A call is incomplete if the answer ended within, or if it broke after its beginning was sent. If it is broken and
    the API sends only whole calls, its characters follow as text.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""
    call_id: str = ""
    call_index: int | None = None
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    is_broken: bool = False

    @property
    def content(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


class AnswerWriter(ChatResponseWriter):
    """Writes the one answer of a chat as parts in their order. Parts never interleave.

    A whole answer has the same parts as a streamed one, but for calls that break: the client has seen nothing of them.
    """

    waiting_event = b":\n\n"  # while nothing can be sent of a long call: clients give up silent streams

    def __init__(self, ticket: GenerationTicket, model: str, options: StreamOptions) -> None:
        super().__init__(ticket, model, options)
        self._ticket = ticket
        self._parts: list[Part] = []
        self._open: Part | None = None  # the part that is being sent

    @abstractmethod
    def _answer_started(self) -> list[bytes]:
        """Return the first events of an answer."""

    @abstractmethod
    def _part_started(self, part: Part) -> list[bytes]: ...

    @abstractmethod
    def _part_continued(self, part: Part, text: str) -> list[bytes]: ...

    @abstractmethod
    def _part_ended(self, part: Part) -> list[bytes]: ...

    @abstractmethod
    def _answer_ended(self, choice: Choice) -> list[bytes]:
        """Return the last events of an answer."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Return the whole answer."""

    def event(self, choice: Choice) -> bytes:
        """Return the events of the unsent output of a choice. The last ones end the answer."""
        events = [] if choice.role_sent else self._answer_started()
        choice.role_sent = True
        begin, text = choice.sent_chars, choice.take_text()
        pieces = choice.take_pieces(begin + len(text) if choice.finish_reason is None else None)
        _, calls = divide_pieces(pieces)
        broken = {call.call_index for call in calls if call.end == "broken" and not self._ticket.streams_calls}
        at = 0
        for (position, _), group in groupby(pieces, lambda piece: (piece[0], isinstance(piece[1], str))):
            end = max(at, position - begin)
            events += self._add("text", text[at:end])
            at = end
            reasoning, calls = divide_pieces(group)
            events += self._add("reasoning", "".join(reasoning))
            for call in calls:
                events += self._add_call(choice, call, broken)
        events += self._add("text", text[at:])
        if choice.finish_reason is not None:
            events += self._end(is_complete=choice.finish_reason == "stop")
            if all(part.kind == "reasoning" for part in self._parts):
                events += self._begin("text") + self._end(is_complete=choice.finish_reason == "stop")
            events += self._answer_ended(choice)
        return b"".join(events) or self.waiting_event

    def end_events(self, ticket: GenerationTicket) -> list[bytes]:  # noqa: ARG002 - the events have the usage
        """Return no events: the events of the last output end the answer."""
        return []

    def body(self, ticket: GenerationTicket) -> bytes:
        """Return the whole answer as JSON."""
        [choice] = ticket.choices
        self.event(choice)
        return to_json(self._whole(choice))

    def _add(self, kind: Literal["reasoning", "text"], text: str) -> list[bytes]:
        if not text:
            return []
        begin = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        return begin + self._continue(text)

    def _add_call(self, choice: Choice, call: CallDelta, broken: Collection[int]) -> list[bytes]:
        events: list[bytes] = []
        if call.name is not None and call.call_index not in broken:
            events += self._begin("call", call.name, choice.new_call_id(), call.call_index)
        if self._open is None or self._open.call_index != call.call_index:
            return events  # it broke before it was sent
        if call.arguments:
            events += self._continue(call.arguments)
        if call.end is not None:
            self._open.is_broken = call.end == "broken"
            events += self._end(is_complete=call.end == "complete")
        return events

    def _begin(self, kind: Literal["reasoning", "text", "call"], *fields: Any) -> list[bytes]:
        ended = self._end(is_complete=True)
        self._open = Part(kind, len(self._parts), *fields)
        self._parts.append(self._open)
        return ended + self._part_started(self._open)

    def _continue(self, text: str) -> list[bytes]:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._part_continued(self._open, text)

    def _end(self, *, is_complete: bool) -> list[bytes]:
        part, self._open = self._open, None
        if part is None:
            return []
        part.is_complete = is_complete
        return self._part_ended(part)


def server_event(kind: str, /, **fields: Any) -> bytes:
    """Return an event of a stream. Its name is also the field `type`."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


class DialectEndpoint(GenerationEndpoint):
    """Serves chats in another form. Errors name fields as clients know them.

    Errors of the translation name them already. It puts `CLIENT_NAMES` into the scope once it has succeeded.
    """

    field_names: ClassVar[Mapping[str, str]]  # by the name of a chat's field
    phrases: ClassVar[Mapping[str, str]] = {}  # for fields of a chat that the client did not write, in messages

    def find_model(self, exchange: Exchange, name: str | None) -> LocalEngine:
        """Return the language model that answers. Raises RequestError (400, 404, 503)."""
        return language_model(self, exchange, name)

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request, with errors that name the fields of a chat. Raises RequestError."""
        await super().respond(exchange)

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        try:
            await self.answer(exchange)
        except RequestError as error:
            if error.param is not None and CLIENT_NAMES in exchange.scope:
                names = {**self.field_names, **exchange.scope[CLIENT_NAMES]}
                error.message = _rename(error.message, {**names, **self.phrases})
                error.param = _rename(error.param, names)
            raise


def _rename(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the client's names of fields. What stands in quotes is a value of the client."""
    found = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.'])(?:{found})(?![\w\['])", lambda match: names[match[0]], text)


def language_model(endpoint: Endpoint, exchange: Exchange, name: str | None) -> LocalEngine:
    """Return a model of ours that answers chats. Raises RequestError (400, 404, 503)."""
    backend = endpoint.choices.chat_model(name)
    exchange.fields["model"] = backend.names[0]
    if not isinstance(backend, LocalEngine):
        raise RequestError(
            f"the model {backend.names[0]} of an upstream server does not serve {exchange.scope['path']}", param="model"
        )
    return backend
