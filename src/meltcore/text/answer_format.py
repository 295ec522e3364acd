"""Defines how model families write reasoning and tool calls, and which format a checkpoint uses.

Reasoning stands between a start and an end token, which are recognized by their ids alone. Neither is special, so
skipping special tokens does not hide them. A chat template may write the start token: a prompt that ends with it starts
reasoning, as DeepSeek-R1's does. A prompt that ends with start and end token starts the answer, whatever whitespace
follows.

A model reasons if its type is listed here, or if its chat template contains one of the tokens. A template uses a token
to begin an answer, or to drop the reasoning of earlier answers. So models that were trained on the answers of a
reasoning model are recognized by their templates, whatever their type.

Calls are recognized by the marks of a `CallFormat`: by the id of a token, or by its text, since some models spell it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.tokenizer import Tokenizer

THINK_MARKS = ("<think>", "</think>")
# The model types of config.json whose chat templates have a variable that turns reasoning off.
_REASONING_TYPES = frozenset(("qwen3", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "smollm3"))


@dataclass(frozen=True)
class CallFormat:
    """Describes how a model family writes tool calls.

    Args:
        body: How one call is written. "json" is an object with name and arguments, "named" a name before an object,
            "xml" a name and parameters in tags, and "python" a call with keyword arguments.
        opens: The marks that begin a block of calls.
        closes: The marks that end it.
        separators: What may stand between two calls beside whitespace.
        prefix: What precedes the name in a "named" call.
        name_ends: What may stand between the name and the object of a "named" call.
        quote: What begins and ends a string. With another one than JSON's, names of fields have no quotes.
        has_marks: Whether `opens` occurs nowhere else. Without, only the name of a known tool makes a call.
        id_letters: The number of letters and digits of an id, if the template checks it. None uses "call_" and 24.
    """

    body: Literal["json", "named", "xml", "python"]
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    separators: str = ""
    prefix: str = ""
    name_ends: tuple[str, ...] = ()
    quote: str = '"'
    has_marks: bool = True
    id_letters: int | None = None


# In the order in which a chat template is searched for their signs, below.
CALL_FORMATS = {
    # Qwen3.5, Qwen3-Coder. Some answers lack the outer mark.
    "qwen3_coder": CallFormat("xml", ("<tool_call>", "<function="), ("</tool_call>",)),
    # Nous Hermes, Qwen2.5, Qwen3, SmolLM3.
    "hermes": CallFormat("json", ("<tool_call>",), ("</tool_call>",)),
    # Before its tokenizer v11 Mistral writes a list of objects after the mark, since then a name before each object.
    "mistral": CallFormat("named", ("[TOOL_CALLS]",), ("]",), ",", name_ends=("[CALL_ID]", "[ARGS]"), id_letters=9),
    "functiongemma": CallFormat(
        *("named", ("<start_function_call>",), ("<end_function_call>",)), prefix="call:", quote="<escape>"
    ),
    "llama3_json": CallFormat("json", ("<|python_tag|>", "{"), (), ";,", has_marks=False),
    # Gemma 3 and Llama 3.2 as their prompts ask for it.
    "pythonic": CallFormat(
        "python", ("```tool_code\n[", "```python\n[", "["), ("]\n```", "]"), ",", has_marks=False
    ),
}  # fmt: skip
_SIGNS = {
    "qwen3_coder": ("<function=",),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "functiongemma": ("<start_function_call>",),
    "llama3_json": ('"parameters":', "<|python_tag|>"),
    "pythonic": ("func_name1(",),
}


@dataclass(frozen=True)
class AnswerFormat:
    """Holds what one model's answers may contain beside text.

    `reasoning_ids` are the ids of the tokens before and after reasoning; None if the model does not reason. `calls` is
    None if it is not known how the model writes calls.
    """

    tokenizer: Tokenizer
    reasoning_ids: tuple[int, int] | None
    calls: CallFormat | None
    mark_ids: Mapping[int, str] = field(default_factory=dict)  # of tokens that are, or are in, marks of calls

    def starts_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the start token of reasoning, apart from whitespace."""
        return self.reasoning_ids is not None and self._last_id(prompt) == self.reasoning_ids[0]

    def has_ended_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the end token of reasoning, apart from whitespace."""
        return self.reasoning_ids is not None and self._last_id(prompt) == self.reasoning_ids[1]

    def _last_id(self, prompt: Sequence[int]) -> int | None:
        texts = ((token_id, self.tokenizer.token_bytes(token_id)) for token_id in reversed(prompt))
        return next((token_id for token_id, text in texts if not text.decode(errors="replace").isspace()), None)


def answer_format(
    tokenizer: Tokenizer, config: Mapping[str, Any], template: ChatTemplate | MissingTemplate,
    response_template: Any = None, *, calls: str = "auto", reasoning: bool = True,
) -> AnswerFormat:  # fmt: skip
    """Return how the model of a config.json with a chat template writes its answers.

    Args:
        tokenizer: The tokenizer. A model reasons only if it has the tokens around reasoning.
        config: The checkpoint's config.json.
        template: The chat template.
        response_template: The field of that name of tokenizer_config.json, which transformers reads, if there is one.
        calls: A name of CALL_FORMATS. "auto" takes what `response_template` says, else what the chat template
            shows. "none" reads no calls.
        reasoning: Whether it is separated from the answer.
    """
    reasoning_ids = None
    marks = _reasoning_marks(response_template) or THINK_MARKS
    listed = config.get("model_type") in _REASONING_TYPES
    if reasoning and (listed or any(mark in template.source for mark in marks)):
        start_id, end_id = map(tokenizer.token_id, marks)
        reasoning_ids = None if start_id is None or end_id is None else (start_id, end_id)
    call_format = CALL_FORMATS.get(calls)
    if calls == "auto":
        call_format = format_of_response_template(response_template) or _format_of_template(template.source)
    return AnswerFormat(tokenizer, reasoning_ids, call_format, _mark_ids(tokenizer, call_format))


def template_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return default variables of the model's chat template, which a request may change. Reasoning is off."""
    return {"enable_thinking": False} if config.get("model_type") in _REASONING_TYPES else {}


def _mark_ids(tokenizer: Tokenizer, calls: CallFormat | None) -> dict[int, str]:
    if calls is None:
        return {}
    texts = (*calls.opens, *calls.closes, *calls.name_ends, calls.quote)
    found = {tokenizer.token_id(text): text for text in texts if len(text) > 1}
    return {token_id: text for token_id, text in found.items() if token_id is not None}


def _format_of_template(source: str) -> CallFormat | None:
    if "tool" not in source:
        return None
    return next((CALL_FORMATS[name] for name, signs in _SIGNS.items() if any(sign in source for sign in signs)), None)


def _reasoning_marks(response_template: Any) -> tuple[str, str] | None:
    fields = _fields(response_template)
    for name in ("reasoning_content", "thinking", "reasoning"):
        start, end = (fields.get(name, {}).get(key) for key in ("open", "close"))
        if isinstance(start, str) and isinstance(end, str):
            return start, end
    return None


def format_of_response_template(response_template: Any) -> CallFormat | None:
    """Return the call format that a checkpoint's `response_template` describes.

    The template names the marks of calls and how their content is written: as JSON, as JSON with strings of its own and
    bare names, or as tags. Returns None for one that is written in another way, so that the chat template decides.
    """
    spec = _fields(response_template).get("tool_calls", {})
    opens, closes = _literals(spec, "open"), _literals(spec, "close")
    content, args = spec.get("content"), spec.get("content_args")
    args = args if isinstance(args, dict) else {}
    if not opens:
        return None
    if content == "xml-inline" and "<parameter=" in str(args.get("tag_pattern")):
        return CallFormat("xml", (*opens, "<function="), tuple(each for each in closes if each != "</function>"))
    if content != "json":
        return None
    pattern = str(spec.get("open_pattern", ""))
    if "(?P<name>" not in pattern:
        return CallFormat("json", opens, closes)
    delimiters = args.get("string_delims") or [['"', '"']]
    head = pattern.split("(?P<name>")[0]
    prefix = "call:" if head.endswith("call:") else ""
    closes = tuple(each.removeprefix("}") for each in closes)
    return CallFormat("named", tuple(each.removesuffix(prefix) for each in opens), closes, prefix=prefix,
                      quote=str(delimiters[0][0]))  # fmt: skip


def note_on_unknown_calls(response_template: Any, form: AnswerFormat) -> str | None:
    """Return a note if a `response_template` describes calls in a way that is not known, or None."""
    spec = _fields(response_template).get("tool_calls")
    if spec is None or format_of_response_template(response_template) is not None:
        return None
    name = next((name for name, each in CALL_FORMATS.items() if each == form.calls), None)
    instead = "the model takes no tools" if name is None else f"calls are read as {name}, which its chat template shows"
    content = str(spec.get("content"))[:80]
    return f"response_template.fields.tool_calls has the unknown content {content!r}; {instead} (--tool-call-parser)"


def _fields(response_template: Any) -> dict[str, Any]:
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    found = fields.items() if isinstance(fields, dict) else ()
    return {name: spec for name, spec in found if isinstance(spec, dict)}


def _literals(spec: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the texts of a mark. Of a pattern these are the characters up to its first variable part."""
    value = spec.get(key)
    if isinstance(value, str | list):
        return tuple(each for each in ([value] if isinstance(value, str) else value) if isinstance(each, str) and each)
    pattern = str(spec.get(f"{key}_pattern") or "")
    start = re.sub(r"^(?:\\s\*)+", "", pattern)
    literal = re.match(r"(?:\\[^\w\s]|[^\\.^$*+?{}\[\]|()])+", start)
    return (re.sub(r"\\(.)", r"\1", literal[0]),) if literal else ()
