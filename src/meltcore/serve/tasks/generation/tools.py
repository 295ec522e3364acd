"""Checks the tools of a chat request, and gives them to the chat template and to the parser of the answer."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import ChatRequest, NamedTool, Tool, ToolCall
from meltcore.serve.tasks.generation.call_grammar import call_grammar
from meltcore.serve.tasks.generation.structured import RequestedGrammar
from meltcore.serve.tasks.generation.text_function import TextFunction
from meltcore.text.answer_format import AnswerFormat
from meltcore.text.call_scanners import ToolSet
from meltcore.text.chat_template import ChatTemplate, MissingTemplate

MAX_TOOLS = 1024
MAX_DEPTH = 128  # of objects and lists within each other, which templates and llguidance read by recursion
MAX_TOOLS_BYTES = 2**20  # of all tools as JSON; a template writes them into the prompt
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NOT_SHOWN = ("strict", "grammar", "grammar_param")  # fields of a function that a chat template does not get


def requested_tools(
    request: ChatRequest, form: AnswerFormat, template: ChatTemplate | MissingTemplate, *, is_streamed: bool = False
) -> ToolSet | None:
    """Return the tools of a request, or None without tools. Raises RequestError (400) that names what is wrong.

    `is_streamed` says whether the client receives calls as they come.
    """
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    _check_tools(tools)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    if len(schemas) < len(tools):
        names = [tool.function.name for tool in tools]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"tools: two functions have the name {repeated!r}", param="tools")
    if choice == "none":
        return ToolSet(schemas, max_calls=0)
    if isinstance(choice, NamedTool) and choice.function.name not in schemas:
        raise RequestError(
            f"tool_choice: {choice.function.name[:128]!r} is none of the tools", param="tool_choice.function.name"
        )
    if form.calls is None or (template.is_usable and "tool" not in template.source):
        fault = "its chat template has no tools" if "tool" not in template.source else "how it calls is not known"
        raise RequestError(
            f"this model takes no tools: {fault}; --chat-template FILE and --tool-call-parser NAME can say it",
            param="tools",
        )
    return ToolSet(schemas, 1 if request.parallel_tool_calls is False else None, is_streamed)


def _check_tools(tools: list[Tool]) -> None:
    """Raise RequestError (400) if there are too many tools, if they are too long, or for the first invalid tool."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; the limit is {MAX_TOOLS}", param="tools")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise RequestError(f"tools has {size} bytes as JSON; the limit is {MAX_TOOLS_BYTES}", param="tools")
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}].function", tool.function
        if _NAME.fullmatch(function.name) is None:
            raise RequestError(
                f"{where}.name must be 1 to 128 letters, digits, _, -, . and :; got {function.name[:200]!r}",
                param=f"{where}.name",
            )
        _check_depth(function.parameters, f"{where}.parameters")
        if not isinstance((function.parameters or {}).get("properties") or {}, dict):
            raise RequestError(
                f"{where}.parameters.properties must be an object with a schema for each parameter",
                param=f"{where}.parameters.properties",
            )
        if (function.parameters or {}).get("type", "object") != "object":
            found = str(function.parameters and function.parameters["type"])[:80]
            raise RequestError(
                f"{where}.parameters must be the schema of an object; its type is {found!r}",
                param=f"{where}.parameters",
            )


def tool_grammar(request: ChatRequest, form: AnswerFormat, answer: RequestedGrammar | None) -> RequestedGrammar | None:
    """Return the grammar that an answer with tools must follow.

    If tools need no grammar, return `answer`, the grammar of `response_format`. Calls are enforced if `tool_choice`
    forces one, or if a function is strict. An answer that is no call follows `answer`. Raises
    RequestError (400) if the format of the model's calls allows no grammar.
    """
    choice, functions = request.tool_choice, [tool.function for tool in request.tools or ()]
    is_forced = choice == "required" or isinstance(choice, NamedTool)
    is_strict = any(function.strict for function in functions)
    if not functions or choice == "none" or not (is_forced or is_strict or answer is not None):
        return answer
    param = "tool_choice" if is_forced else "tools" if is_strict or answer is None else answer.param
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    is_parallel = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    others = (None,) if is_forced or answer is None else answer.candidates
    weakened: list[str] = []
    found = [
        call_grammar(form, functions, weakened, is_forced=is_forced, is_parallel=is_parallel, answer=other)
        for other in others
    ]
    candidates = tuple(each for each in found if each is not None)
    if len(candidates) < len(found):
        raise RequestError(
            f"{param}: nothing can enforce how this model calls; leave out strict, grammars of tools, "
            "structured output, and a tool_choice that forces a call",
            param=param,
        )
    own = [function for function in functions if isinstance(function, TextFunction)]
    parts = [(each.grammar_param, each.grammar) for each in own if each.grammar is not None]
    return RequestedGrammar(param, candidates, tuple(dict.fromkeys(weakened)), tuple(parts))


def template_variables(request: ChatRequest, template: ChatTemplate | MissingTemplate) -> dict[str, Any]:
    """Return the variables that a request gives to the chat template.

    With tool_choice "none" the template gets no tools. Raises RequestError (400) for a `reasoning_effort` if the
    template has no variable for it.
    """
    variables: dict[str, Any] = {}
    if request.tools and request.tool_choice != "none":
        variables["tools"] = [_template_tool(tool) for tool in request.tools]
    effort = request.reasoning_effort
    if effort is not None:
        values = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        chosen = {name: value for name, value in values.items() if name in template.source}
        if not chosen and effort != "none" and template.is_usable:
            raise RequestError(
                "reasoning_effort: the chat template of this model has no such variable, nor enable_thinking",
                param="reasoning_effort",
            )
        variables |= chosen
    return variables | (request.chat_template_kwargs or {})


def _template_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = msgspec.to_builtins(tool.function)
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None and name not in _NOT_SHOWN},
    }


def template_calls(calls: list[ToolCall], param: str, template: ChatTemplate | MissingTemplate) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer as the template expects them, with arguments as an object or as text.

    Arguments that are no object, as of a call that was cut, are shown as text.
    """
    found = []
    for index, call in enumerate(calls):
        text = call.function.arguments
        shown: Any = _decode_arguments(text, f"{param}[{index}].function.arguments")
        if template.expects_text_arguments:
            shown = text or "{}"
        elif shown is None:
            shown = text if template.takes_text_arguments else {"arguments": text}
        function = {"name": call.function.name, "arguments": shown}
        found.append({"id": call.id, "type": "function", "function": function})
    return found


def _decode_arguments(arguments: str, param: str) -> dict[str, Any] | None:
    """Return arguments as an object, or None if they are none. Raises RequestError (400) if they cannot be read."""
    try:
        found = msgspec.json.decode(arguments or "{}", type=dict[str, Any] | None) or {}
    except msgspec.MsgspecError:
        return None
    except (UnicodeError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON object: {error}", param=param) from error
    _check_depth(found, param)
    return found


def _check_depth(value: Any, param: str) -> None:
    """Raise RequestError for a value with more than MAX_DEPTH objects and lists within each other."""
    if _is_deeper(value, MAX_DEPTH):
        raise RequestError(f"{param} is nested too deeply; the limit is {MAX_DEPTH} objects and lists", param=param)


def _is_deeper(value: Any, limit: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return limit == 0 or any(_is_deeper(each, limit - 1) for each in inner)
