"""Serves OpenAI's POST /v1/responses without storage: the same requests and answers as chats.

A request is translated to a chat before anything else sees it. Nothing is kept between requests, so a client sends the
whole conversation each time. https://platform.openai.com/docs/api-reference/responses describes the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.dialects.answer_writer import CLIENT_NAMES, DialectEndpoint, to_json
from meltcore.serve.dialects.response_forms import (
    Content,
    ConversationItem,
    CustomCallItem,
    CustomForm,
    FunctionCallItem,
    FunctionForm,
    GrammarText,
    ItemHead,
    MessageItem,
    NamespaceForm,
    OutputItem,
    ReasoningItem,
    RefusalContent,
    ResponsesRequest,
    SchemaFormat,
    ToolForm,
    ToolReference,
    full_name,
)
from meltcore.serve.dialects.response_writer import REASONING, CalledTool, ResponsesWriter, read_reasoning
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
    TextPart,
    Tool,
    ToolCall,
    check_supported,
    decode_request,
)
from meltcore.serve.tasks.generation.completions import MakeWriter
from meltcore.serve.tasks.generation.text_function import TextFunction, text_function

INLINE_ITEMS = 500  # of a conversation; more are translated on a thread
# The values of unsupported fields that are accepted, beside null.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "defer_loading": (False,),
}
# Values of `include` that concern tools and images, which no answer here has.
_OTHER_OUTPUTS = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
)
_Form = TypeVar("_Form", bound=msgspec.Struct)


_ITEMS: Mapping[str, type[ConversationItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
}
_TOOLS: dict[str, type[ToolForm]] = {"function": FunctionForm, "custom": CustomForm}


def chat_of(request: ResponsesRequest, names: dict[str, str]) -> tuple[ChatRequest, dict[str, CalledTool]]:
    """Return a request as a chat, and its tools by the names that the model sees.

    `names` gets the client's name of each field with an index, by the name in the chat. Raises RequestError (400) that
    names what is not supported.
    """
    check_supported(request, neutral=_NEUTRAL)
    unknown = [name for name in request.include or () if name not in (REASONING, *_OTHER_OUTPUTS)]
    if unknown:
        raise RequestError(f"include: {unknown[0][:80]!r} is not supported; known is {REASONING}", param="include")
    chat = ChatRequest(
        messages=_messages(request, names),
        model=request.model,
        stream=request.stream,
        user=request.user,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        priority=request.priority,
        parallel_tool_calls=request.parallel_tool_calls,
    )
    if request.stream_options is not None:
        chat.stream_options = StreamOptions(include_obfuscation=request.stream_options.include_obfuscation)
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None:
        check_supported(request.text, "text.", _NEUTRAL)
        form = request.text.format
        if isinstance(form, SchemaFormat):
            chat.response_format = JsonSchemaFormat(JsonSchema(form.name, form.schema, form.strict, form.description))
        else:
            chat.response_format = form
    chat.tools, called, places = [], {}, {}
    for index, raw in enumerate(request.tools or ()):
        for tool, namespace, where in _tools(raw, f"tools[{index}]"):
            function = tool.function
            called[full_name(namespace, function.name)] = CalledTool(
                function.name, namespace, is_custom=isinstance(function, TextFunction)
            )
            function.name = full_name(namespace, function.name)
            chat.tools.append(tool)
            places[id(tool)] = where
    _choose_tools(chat, request.tool_choice, called)
    names |= {f"tools[{index}].function": places[id(tool)] for index, tool in enumerate(chat.tools)}
    chat.tools = chat.tools or None
    return chat, called


def _messages(request: ResponsesRequest, names: dict[str, str]) -> list[ChatMessage]:
    """Return the messages of a chat. Instructions, and messages of system and developer after them, become one."""
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage("system", [TextPart(request.instructions)]))
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", request.input)]
    for index, raw in enumerate(request.input):
        where = f"input[{index}]"
        head = _decode(raw, ItemHead, where)
        kind = head.type or ("message" if head.role is not None else "")
        item = _decode(raw, _known(_ITEMS, kind, f"{where}.type"), where)
        if isinstance(item, OutputItem):
            names[f"messages[{len(messages)}].tool_call_id"] = f"{where}.call_id"
            messages.append(ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))
        elif not isinstance(item, MessageItem) or item.role == "assistant":
            _add_to_answer(messages, item, where, names)
        elif item.role == "user":
            messages.append(ChatMessage("user", _text(item.content)))
        elif messages and messages[-1].role == "system" and isinstance(messages[-1].content, list):
            messages[-1].content.append(TextPart(_text(item.content)))
        else:
            messages.append(ChatMessage("system", [TextPart(_text(item.content))]))
    for message in messages:
        if message.content is None and not message.tool_calls:
            message.content = ""
    return messages


def _add_to_answer(messages: list[ChatMessage], item: ConversationItem, where: str, names: dict[str, str]) -> None:
    """Add a part of an answer to the last message, which is the assistant's, or begin one.

    An answer is its reasoning, its text and its calls in this order, with one of the first two.
    """
    last = messages[-1] if messages else ChatMessage("user")
    is_call = isinstance(item, FunctionCallItem | CustomCallItem)
    is_next = is_call or not (last.content or last.tool_calls or isinstance(item, ReasoningItem))
    if last.role != "assistant" or not is_next:
        last = ChatMessage("assistant")
        messages.append(last)
    if isinstance(item, MessageItem):
        last.content = _text(item.content)
    elif isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or ())
        if not text and item.encrypted_content is not None:
            text = read_reasoning(item.encrypted_content, f"{where}.encrypted_content")
        last.reasoning_content = text or None
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        arguments = item.arguments if isinstance(item, FunctionCallItem) else to_json({"input": item.input}).decode()
        last.tool_calls = last.tool_calls or []
        call = f"messages[{len(messages) - 1}].tool_calls[{len(last.tool_calls)}]"
        names[f"{call}.function.arguments"] = f"{where}.arguments"
        last.tool_calls.append(ToolCall(item.call_id, CalledFunction(item.full_name, arguments)))


def _text(content: str | Sequence[Content]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalContent) else part.text for part in content)


def _tools(raw: msgspec.Raw, where: str, *, is_inner: bool = False) -> Iterator[tuple[Tool, str | None, str]]:
    """Yield a tool, or all tools of a namespace, each with the name of its namespace and its place in the request."""
    forms = _TOOLS if is_inner else _TOOLS | {"namespace": NamespaceForm}
    form = _decode(raw, _known(forms, _decode(raw, ItemHead, where).type or "", f"{where}.type"), where)
    check_supported(form, f"{where}.", _NEUTRAL)
    if isinstance(form, NamespaceForm):
        for index, inner in enumerate(form.tools):
            for tool, _, place in _tools(inner, f"{where}.tools[{index}]", is_inner=True):
                tool.function.description = "\n".join(filter(None, [form.description, tool.function.description]))
                yield tool, form.name, place
    elif isinstance(form, FunctionForm):
        yield Tool("function", Function(form.name, form.description, form.parameters, form.strict)), None, where
    elif isinstance(form, CustomForm):
        grammar = (form.format.definition, form.format.syntax) if isinstance(form.format, GrammarText) else ()
        function = text_function(form.name, form.description, *grammar, param=f"{where}.format.definition")
        yield Tool("function", function), None, where


def _choose_tools(
    chat: ChatRequest,
    choice: Literal["none", "auto", "required"] | ToolReference | None,
    called: Mapping[str, CalledTool],
) -> None:
    """Set the tool choice of a chat. Tools that are not allowed are left out. Raises RequestError (400)."""
    if not isinstance(choice, ToolReference):
        chat.tool_choice = choice
        return
    references = choice.tools or [] if choice.type == "allowed_tools" else [choice]
    names = [reference.name or "" for reference in references]
    for reference, name in zip(references, names, strict=True):
        if name not in called or reference.type != ("custom" if called[name].is_custom else "function"):
            raise RequestError(
                f"tool_choice: {reference.type[:80]} {name[:128]!r} is none of the tools", param="tool_choice"
            )
    if choice.type == "allowed_tools":
        chat.tool_choice = choice.mode or "auto"
        chat.tools = [tool for tool in chat.tools or () if tool.function.name in names]
    else:
        chat.tool_choice = NamedTool("function", FunctionName(names[0]))


def _known(forms: Mapping[str, type[_Form]], kind: str, param: str) -> type[_Form]:
    if kind not in forms:
        raise RequestError(f"{param}: {kind[:80]!r} is not supported; known are {', '.join(forms)}", param=param)
    return forms[kind]


def _decode(raw: msgspec.Raw, form: type[_Form], where: str) -> _Form:
    """Return an object within the body. Raises RequestError (400) that names the invalid field."""
    try:
        return decode_request(bytes(raw), form)
    except RequestError as error:
        param = where if error.param is None else f"{where}.{error.param}"
        reason = error.message.removeprefix("the body: ")
        message = f"{where}: {reason}" if error.param is None else f"{where}.{reason}"
        raise RequestError(message, param=param) from error


class ResponsesEndpoint(DialectEndpoint):
    """Serves POST /v1/responses."""

    field_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }
    operations = (
        Operation(
            *("post", "/v1/responses", "Answer a conversation, streamed or not, without storage", ResponsesRequest),
            example={"model": "NAME", "input": "What is 7 * 8?", "max_output_tokens": 64},
            tag="server",
        ),
    )

    async def read_request(self, exchange: Exchange) -> tuple[ChatRequest, MakeWriter]:
        """Read the request as a chat. Raises RequestError (400, 413), ClientDisconnectedError."""
        request = await self.read(exchange, ResponsesRequest)
        # Each item takes up to 20 us; other requests wait meanwhile.
        is_long = len(request.input) > INLINE_ITEMS and not isinstance(request.input, str)
        names: dict[str, str] = {}
        chat, tools = await asyncio.to_thread(chat_of, request, names) if is_long else chat_of(request, names)
        exchange.scope[CLIENT_NAMES] = names
        return chat, partial(ResponsesWriter, request, tools)


class InputTokensEndpoint(ResponsesEndpoint):
    """Serves POST /v1/responses/input_tokens."""

    paths = ("/v1/responses/input_tokens",)
    operations = (
        Operation(
            *("post", *paths, "Count the tokens of a conversation", ResponsesRequest),
            example={"model": "NAME", "input": "What is 7 * 8?"},
            tag="server",
        ),
    )

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        chat, _ = await self.read_request(exchange)
        backend = self.find_model(exchange, chat.model)
        counted = {"object": "response.input_tokens", "input_tokens": await backend.count_tokens(chat)}
        await exchange.answer_json(counted)
