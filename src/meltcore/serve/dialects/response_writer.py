"""Writes answers of /v1/responses: items of reasoning, text and calls, whole or as numbered events."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from meltcore.common.errors import RequestError
from meltcore.serve.dialects.answer_writer import AnswerWriter, Part, server_event
from meltcore.serve.dialects.response_forms import ResponsesRequest
from meltcore.serve.requests.asgi import ErrorForm
from meltcore.serve.requests.protocol import StreamOptions
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket
from meltcore.serve.tasks.generation.responses import padding
from meltcore.serve.tasks.generation.text_function import text_input

REASONING = "reasoning.encrypted_content"  # of the field `include`
_PREFIX = (
    "meltcore.1."  # of `encrypted_content`, which is no secret: the reasoning as it stands in the answer, in base64
)
_ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_CONTENT_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}


def write_reasoning(text: str) -> str:
    """Return `encrypted_content` for reasoning."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def read_reasoning(encrypted: str, param: str) -> str:
    """Return the reasoning of `encrypted_content`. Raises RequestError (400) if this server has not written it."""
    try:
        if encrypted.startswith(_PREFIX):
            return base64.b64decode(encrypted.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        pass
    raise RequestError(
        f"{param} was not written by this server, which cannot read it; leave the item out",
        param=param,
        code="invalid_encrypted_content",
    )


class CalledTool(NamedTuple):
    """A tool as the client knows it. A custom tool is called with a text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponsesWriter(AnswerWriter):
    """Writes one answer. The input of a custom tool is sent once it is complete, since it is known only then."""

    id_prefix = "resp_"
    stream_object = full_object = "response"

    def __init__(
        self,
        request: ResponsesRequest,
        tools: Mapping[str, CalledTool],
        ticket: GenerationTicket,
        model: str,
        options: StreamOptions,
    ) -> None:
        """Create a writer. The answer repeats most fields of `request`, as OpenAI's does.

        `tools` has the tools by the names that the model sees.
        """
        super().__init__(ticket, model, options)
        self._request = request
        self._tools = tools
        self._items: list[dict[str, Any]] = []  # what has ended
        self._num_events = 0

    def error_event(self, error: RequestError, form: ErrorForm) -> bytes:  # noqa: ARG002 - the event is of this API alone
        """Return the event of a failed response."""
        failure = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _answer_started(self) -> list[bytes]:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _part_started(self, part: Part) -> list[bytes]:
        if self._is_custom(part):
            return []
        item = self._item(part, "in_progress")
        events = [self._event("response.output_item.added", output_index=len(self._items), item=item)]
        if part.kind != "call":
            events.append(self._item_event(part, "content_part.added", content_index=0, part=_content(part)))
        return events

    def _part_continued(self, part: Part, text: str) -> list[bytes]:
        if self._is_custom(part):
            return []
        if part.kind == "call":
            return [self._item_event(part, "function_call_arguments.delta", delta=text)]
        return [self._item_event(part, f"{_CONTENT_TYPES[part.kind]}.delta", delta=text, **_position(part))]

    def _part_ended(self, part: Part) -> list[bytes]:
        item = self._item(part, "completed" if part.is_complete else "incomplete")
        if part.kind != "call":
            content = _content(part)
            events = [
                self._item_event(part, f"{_CONTENT_TYPES[part.kind]}.done", text=part.content, **_position(part)),
                self._item_event(part, "content_part.done", content_index=0, part=content),
            ]
        elif not self._is_custom(part):
            events = [self._item_event(part, "function_call_arguments.done", name=item["name"], arguments=part.content)]
        else:
            begun = item | {"input": ""}
            events = [
                self._event("response.output_item.added", output_index=len(self._items), item=begun),
                self._item_event(part, "custom_tool_call_input.delta", delta=item["input"]),
                self._item_event(part, "custom_tool_call_input.done", input=item["input"]),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        return events

    def _answer_ended(self, choice: Choice) -> list[bytes]:
        response = self._whole(choice)
        return [self._event(f"response.{response['status']}", response=response)]

    def _whole(self, choice: Choice) -> dict[str, Any]:
        ticket = self._ticket
        details = {"reason": "max_output_tokens"} if choice.finish_reason == "length" else None
        usage = {
            "input_tokens": ticket.prompt_tokens,
            "input_tokens_details": {"cached_tokens": ticket.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": ticket.output_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": ticket.prompt_tokens + ticket.output_tokens,
        }
        status = "completed" if details is None else "incomplete"
        return self._response(status, incomplete_details=details, usage=usage, completed_at=int(time.time()))

    def _response(self, status: str, **changes: Any) -> dict[str, Any]:
        request, params = self._request, self._ticket.choices[0].params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            **self._notes,
            **changes,
        }

    def _tool(self, part: Part) -> CalledTool:
        return self._tools.get(part.name, CalledTool(part.name))

    def _is_custom(self, part: Part) -> bool:
        return part.kind == "call" and self._tool(part).is_custom

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        if part.kind == "text":
            fields: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        elif part.kind == "reasoning":
            fields = {"type": "reasoning", "summary": [], "content": []}
            if REASONING in (self._request.include or ()):
                fields["encrypted_content"] = write_reasoning(part.content)
        else:
            tool = self._tool(part)
            fields = {"call_id": part.call_id, "name": tool.name}
            fields |= {} if tool.namespace is None else {"namespace": tool.namespace}
            if tool.is_custom:
                is_cut = status == "incomplete"
                fields |= {"type": "custom_tool_call", "input": text_input(part.content, is_cut=is_cut)}
            else:
                fields |= {"type": "function_call", "arguments": part.content}
        if "content" in fields and status != "in_progress":
            fields["content"] = [_content(part)]
        return {"id": self._item_id(part, fields["type"]), "status": status, **fields}

    def _item_id(self, part: Part, kind: str) -> str:
        return f"{_ID_PREFIXES[kind]}{self._id.removeprefix(self.id_prefix)}_{part.index}"

    def _item_event(self, part: Part, name: str, /, **fields: Any) -> bytes:
        kinds = {"text": "message", "call": "custom_tool_call" if self._is_custom(part) else "function_call"}
        item_id = self._item_id(part, kinds.get(part.kind, part.kind))
        return self._event(f"response.{name}", item_id=item_id, output_index=len(self._items), **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._num_events += 1
        event = server_event(kind, sequence_number=self._num_events - 1, **fields)
        if not self.is_padded or not kind.endswith(".delta"):
            return event
        return server_event(kind, sequence_number=self._num_events - 1, **fields, obfuscation=padding(len(event)))


def _content(part: Part) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if part.kind == "text" else {}
    return {"type": _CONTENT_TYPES[part.kind], "text": part.content, **extra}


def _position(part: Part) -> dict[str, Any]:
    return {"content_index": 0} | ({"logprobs": []} if part.kind == "text" else {})
