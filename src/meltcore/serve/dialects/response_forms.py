"""Defines the forms of OpenAI's POST /v1/responses: its body, and the items and tools that a body holds.

Items and tools are decoded one by one, since an item that is a message needs no `type`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from meltcore.serve.requests.protocol import JsonObjectFormat, JsonRequest, ReasoningEffort, TextFormat


class ItemHead(msgspec.Struct):
    """The fields that tell what an item is."""

    type: str | None = None
    role: str | None = None


class ConversationItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An item of a conversation. The fields here occur in the items of answers and are not used."""

    type: str | None = None
    id: str | None = None
    status: str | None = None


class TextContent(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A text for the model."""

    text: str


class AnswerContent(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text of an earlier answer. Its annotations and log-probabilities are not shown to the model."""

    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalContent(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """The text with which an earlier answer has refused to answer."""

    refusal: str


Content = TextContent | AnswerContent | RefusalContent


class MessageItem(ConversationItem, kw_only=True):
    """A message. It needs no `type`."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    phase: Any = None


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    """The reasoning of an earlier answer."""

    text: str


class ReasoningItem(ConversationItem, kw_only=True):
    """The reasoning of an earlier answer. `encrypted_content` counts only if this server has made it."""

    summary: Any = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class _CallItem(ConversationItem, kw_only=True):
    call_id: str
    name: str
    namespace: str | None = None
    caller: Any = None

    @property
    def full_name(self) -> str:
        """The name by which the model has called the tool."""
        return full_name(self.namespace, self.name)


class FunctionCallItem(_CallItem, kw_only=True):
    """A call of a function in an earlier answer."""

    arguments: str


class CustomCallItem(_CallItem, kw_only=True):
    """A call of a custom tool in an earlier answer."""

    input: str


class OutputItem(ConversationItem, kw_only=True):
    """The result of a call."""

    call_id: str
    output: str | list[Content]
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class ToolForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all tools share."""

    type: str
    name: str
    description: str | None = None
    defer_loading: Any = None
    allowed_callers: Any = None


class FunctionForm(ToolForm, kw_only=True):
    """A function that the model may call. `parameters` is the JSON Schema of an object."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = None


class AnyText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The input of a custom tool that is any text."""


class GrammarText(msgspec.Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """The input of a custom tool that follows a grammar in llguidance's Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomForm(ToolForm, kw_only=True):
    """A tool whose input is a text."""

    format: AnyText | GrammarText | None = None


class NamespaceForm(ToolForm, kw_only=True):
    """Tools with a common name. The model sees each as NAMESPACE.TOOL, below the description of its namespace."""

    tools: list[msgspec.Raw]


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which a model calls a tool."""
    return name if namespace is None else f"{namespace}.{name}"


class ToolReference(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A `tool_choice` that names a tool, or the tools among which the model chooses."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, kw_only=True):
    """The form of an answer that follows a JSON Schema."""

    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the text of the answer."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Any = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model reasons. Answers have the reasoning itself and no summary."""

    effort: ReasoningEffort | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class ObfuscationOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's stream_options."""

    include_obfuscation: bool | None = None  # pad deltas, so that their lengths do not show the lengths of texts


class ResponsesRequest(JsonRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses. `store` is accepted, and nothing is stored."""

    input: str | list[msgspec.Raw]
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolReference | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    priority: int | None = None  # vLLM's
    include: list[str] | None = None
    stream_options: ObfuscationOptions | None = None
    # Accepted and not used: they concern tools that OpenAI runs, its storage, its cache and abuse monitoring.
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    client_metadata: Any = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None
    # Known, not supported.
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    service_tier: Any = None
    top_logprobs: Any = None
    truncation: Any = None
