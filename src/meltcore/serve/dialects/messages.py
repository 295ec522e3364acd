"""Serves Anthropic's POST /v1/messages and /v1/messages/count_tokens: the same requests and answers as chats.

Messages are translated to a chat before anything else sees them, and events of the answer are written in Anthropic's
form. https://docs.anthropic.com/en/api/messages describes both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.dialects.answer_writer import (
    CLIENT_NAMES,
    AnswerWriter,
    DialectEndpoint,
    Part,
    server_event,
    to_json,
)
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.protocol import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionName,
    JsonSchema,
    JsonSchemaFormat,
    NamedTool,
    StreamOptions,
    Tool,
    ToolCall,
)
from meltcore.serve.tasks.generation.completions import MakeWriter
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket

PING_S = 10.0  # between pings while nothing else is sent: agents and proxies end silent streams after a minute or more
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?P<end>"?)|true|false|null|[][{}:,]', re.DOTALL)
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """A part of a message. `cache_control` is accepted and not used: prefixes are cached without it."""

    cache_control: Any = None


class TextBlock(_Block, tag="text", kw_only=True):
    """A text. `citations` of an earlier answer are not shown to the model."""

    text: str
    citations: Any = None


class ThinkingBlock(_Block, tag="thinking", kw_only=True):
    """The reasoning of an earlier answer. The signature is not checked."""

    thinking: str
    signature: str = ""


class RedactedBlock(_Block, tag="redacted_thinking", kw_only=True):
    """Encrypted reasoning of another server, which the model cannot see."""

    data: str


class ToolUseBlock(_Block, tag="tool_use", kw_only=True):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None  # in Anthropic's answers, which clients send back


class ToolResultBlock(_Block, tag="tool_result", kw_only=True):
    """The result of a tool call. With `is_error` the model sees "Error: " before the text."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool of the client. `input_schema` is the JSON Schema of an object. Tools that a server runs are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model reasons before it answers, and in how many tokens at most.

    A model that cannot reason refuses "enabled". It accepts "adaptive", which lets the model choose; agents send it
    with every model.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Any = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The JSON Schema that the answer must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How the model answers. A chat template may read `effort` as `reasoning_effort`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a server removes from a conversation. Only edits that keep everything are accepted."""

    type: str
    keep: Any = None
    trigger: Any = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The edits of a conversation before the model sees it."""

    edits: list[ContextEdit]


class CountRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages. The fields after `metadata` are accepted; they change no answer."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def chat_of(request: CountRequest, names: dict[str, str]) -> ChatRequest:
    """Return a request as a chat. Raises RequestError (400) for a tool or an edit that a server would perform.

    `names` gets the client's name of each field with an index, by the name in the chat.
    """
    for index, edit in enumerate(request.context_management.edits if request.context_management else ()):
        if edit.keep != "all":
            param = f"context_management.edits[{index}]"
            raise RequestError(f"{param}: {edit.type[:80]} is not supported, unless it keeps all", param=param)
    system = _text(request.system)
    messages = [ChatMessage("system", system)] if system else []
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]", len(messages), names)
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    chat = ChatRequest(messages=messages, model=request.model)
    chat.continue_final_message = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
    if request.tools:
        chat.tools = [_tool(tool, f"tools[{index}]", names) for index, tool in enumerate(request.tools)]
    if choice is not None:
        chat.parallel_tool_calls = False if choice.disable_parallel_tool_use else None
        if choice.type == "tool":
            chat.tool_choice = NamedTool("function", FunctionName(choice.name or ""))
        else:
            chat.tool_choice = "required" if choice.type == "any" else choice.type
    variables: dict[str, Any] = {}
    if thinking is not None:
        if thinking.type == "enabled" and thinking.budget_tokens is None:  # as Anthropic's API
            raise RequestError(
                "thinking.budget_tokens is needed with type enabled; type adaptive sets no limit",
                param="thinking.budget_tokens",
            )
        variables["enable_thinking"] = thinking.type != "disabled"
        chat.thinking_token_budget = thinking.budget_tokens
    if output is not None and output.effort is not None:
        variables["reasoning_effort"] = output.effort
    if output is not None and output.format is not None:
        chat.response_format = JsonSchemaFormat(JsonSchema("answer", output.format.schema, strict=True))
    chat.chat_template_kwargs = variables or None
    if isinstance(request, MessagesRequest):
        if (chat.thinking_token_budget or 0) > request.max_tokens:
            raise RequestError(
                f"thinking.budget_tokens is {chat.thinking_token_budget}; it must be at most max_tokens, "
                f"{request.max_tokens}",
                param="thinking.budget_tokens",
            )
        chat.max_tokens, chat.stream, chat.stop = request.max_tokens, request.stream, request.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        user = (request.metadata or {}).get("user_id")
        chat.user = user if isinstance(user, str) else None
    return chat


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _messages(message: InputMessage, param: str, at: int, names: dict[str, str]) -> list[ChatMessage]:
    """Return the messages of a chat, from the index `at`, that one message stands for: results of tools, then text."""
    blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    text = "\n".join(texts)
    if message.role == "assistant":
        if any(isinstance(block, ToolResultBlock) for block in blocks):
            raise RequestError(f"{param}: tool_result belongs into a message of the user", param=param)
        calls: list[ToolCall] = []
        for index, block in enumerate(blocks):
            if isinstance(block, ToolUseBlock):
                names[f"messages[{at}].tool_calls[{len(calls)}].function.arguments"] = f"{param}.content[{index}].input"
                calls.append(ToolCall(block.id, CalledFunction(block.name, to_json(block.input).decode())))
        reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        content = text if texts or not calls else None
        return [ChatMessage("assistant", content, reasoning_content=reasoning or None, tool_calls=calls or None)]
    results: list[ChatMessage] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and message.role == "user":
            result = f"Error: {_text(block.content)}" if block.is_error else _text(block.content)
            names[f"messages[{at + len(results)}].tool_call_id"] = f"{param}.content[{index}].tool_use_id"
            results.append(ChatMessage("tool", result, tool_call_id=block.tool_use_id))
        elif not isinstance(block, TextBlock):
            allowed = "text and tool_result belong" if message.role == "user" else "text belongs"
            raise RequestError(f"{param}: only {allowed} into a message of the {message.role}", param=param)
    return [*results, *([ChatMessage(message.role, text)] if texts or not results else [])]


def _tool(tool: ToolDefinition, param: str, names: dict[str, str]) -> Tool:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        raise RequestError(
            f"{param}: only tools of the client, with an input_schema, are supported; got type {str(tool.type)[:80]!r}",
            param=f"{param}.type",
        )
    names |= {f"{param}.function": param, f"{param}.function.parameters": f"{param}.input_schema"}
    return Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))


class MessageWriter(AnswerWriter):
    """Writes answers of /v1/messages: blocks of reasoning, text and tool calls.

    A call is sent once it has ended, as Anthropic does by default. A call that is cut has the members of its input that
    are complete. Comments keep the stream alive from the moment when an engine has the request. `message_start` comes
    with the first output, since the engine says only then how much of the prompt was cached: clients count its usage.
    """

    id_prefix = "msg_"
    stream_object = full_object = "message"
    waiting_event = server_event("ping")
    waits_s = (0.0, PING_S)

    def __init__(self, ticket: GenerationTicket, model: str, options: StreamOptions) -> None:
        super().__init__(ticket, model, options)
        self._blocks: list[dict[str, Any]] = []  # what has ended

    def waiting_events(self, ticket: GenerationTicket) -> list[bytes]:
        """Return a ping, or a comment before the answer begins, or nothing while the request waits in the queue."""
        [choice] = ticket.choices
        if choice.replica is None:
            return []
        return [self.waiting_event if choice.role_sent else AnswerWriter.waiting_event]

    def _answer_started(self) -> list[bytes]:
        return [server_event("message_start", message=self._message([], None))]

    def _part_started(self, part: Part) -> list[bytes]:
        if part.kind == "call":
            return []
        return [self._block_event("start", content_block=_block(part))]

    def _part_continued(self, part: Part, text: str) -> list[bytes]:
        if part.kind == "call":
            return []
        name = "thinking" if part.kind == "reasoning" else "text"
        return [self._block_event("delta", delta={"type": f"{name}_delta", name: text})]

    def _part_ended(self, part: Part) -> list[bytes]:
        events, block = [], _block(part)
        if part.kind == "call":
            if part.is_broken:
                return []
            events.append(self._block_event("start", content_block=block | {"input": {}}))
            delta = {"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}
            events.append(self._block_event("delta", delta=delta))
        events.append(self._block_event("stop"))
        self._blocks.append(block)
        return events

    def _block_event(self, name: str, **fields: Any) -> bytes:
        return server_event(f"content_block_{name}", index=len(self._blocks), **fields)

    def _answer_ended(self, choice: Choice) -> list[bytes]:
        return [server_event("message_delta", delta=_stop(choice), usage=self._usage()), server_event("message_stop")]

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return self._message(self._blocks, choice)

    def _message(self, content: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        stop = {"stop_reason": None, "stop_sequence": None} if choice is None else _stop(choice)
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, **self._notes}
        return {**head, "content": content, **stop, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        ticket, cached = self._ticket, self._ticket.cached_tokens
        return {
            "input_tokens": ticket.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": ticket.output_tokens,
        }


def _block(part: Part) -> dict[str, Any]:
    """Return a block with what its part has so far."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.content, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.content}
    arguments = part.content if part.is_complete else complete_members(part.content)
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": msgspec.Raw(arguments.encode())}


def complete_members(arguments: str) -> str:
    """Return the members of a cut JSON object that are complete, as a JSON object.

    A number that ends the text is left out, since further digits may have been cut.
    """
    depth, end, is_value = 0, 0, False
    for token in _JSON_TOKEN.finditer(arguments):
        text = token[0]
        if text[0] == '"' and not token["end"]:
            break
        depth += (text in ("{", "[")) - (text in ("}", "]"))
        if depth == 0:  # the object is complete
            return arguments[: token.end()]
        if depth == 1 and text == ",":
            end = max(end, token.start())
        elif depth == 1 and text not in ("{", ":") and is_value:
            end = token.end()
        if depth == 1:
            is_value = text == ":" or (is_value and text not in ("{", ","))
    return arguments[:end] + "}" if end else "{}"


def _stop(choice: Choice) -> dict[str, str | None]:
    """Return why an answer has ended, and the stop sequence that has ended it."""
    stop_string = choice.detokenizer.matched_stop
    if stop_string is not None and choice.shown_finish_reason != "tool_calls":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS.get(choice.shown_finish_reason or ""), "stop_sequence": None}


class MessagesEndpoint(DialectEndpoint):
    """Serves POST /v1/messages."""

    body_form: type[CountRequest] = MessagesRequest
    streams_calls = False
    field_names: ClassVar[Mapping[str, str]] = {
        "response_format.json_schema": "output_config.format",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "tool_choice.function.name": "tool_choice.name",
    }
    phrases: ClassVar[Mapping[str, str]] = {"continue_final_message": "a last message of the assistant in messages"}
    operations = (
        Operation(
            *("post", "/v1/messages", "Answer messages in Anthropic's form", MessagesRequest),
            example={"model": "NAME", "max_tokens": 64, "messages": [{"role": "user", "content": "What is 7 * 8?"}]},
            tag="server",
        ),
    )

    async def read_request(self, exchange: Exchange) -> tuple[ChatRequest, MakeWriter]:
        """Read the request as a chat. Raises RequestError (400, 413), ClientDisconnectedError."""
        request = await self.read(exchange, self.body_form)
        names: dict[str, str] = {}
        chat = chat_of(request, names)
        exchange.scope[CLIENT_NAMES] = names
        return chat, MessageWriter


class CountTokensEndpoint(MessagesEndpoint):
    """Serves POST /v1/messages/count_tokens."""

    body_form = CountRequest
    paths = ("/v1/messages/count_tokens",)
    operations = (
        Operation(
            *("post", *paths, "Count the tokens of messages", CountRequest),
            example={"model": "NAME", "messages": [{"role": "user", "content": "What is 7 * 8?"}]},
            tag="server",
        ),
    )

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        chat, _ = await self.read_request(exchange)
        backend = self.find_model(exchange, chat.model)
        await exchange.answer_json({"input_tokens": await backend.count_tokens(chat)})
