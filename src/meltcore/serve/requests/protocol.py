"""Defines the OpenAI request forms, decoded into typed structs. No field is silently ignored.

`null` means absent for optional fields. A known but unsupported field is accepted only with a neutral value (`"suffix":
""`, `"audio": null`). Any other value, and any unknown field, is an error 400 that names the field.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import msgspec

from meltcore.common.errors import RequestError

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = int


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's stream_options, extended by vLLM's continuous_usage_stats."""

    include_usage: bool | None = None  # one last event with the whole usage
    continuous_usage_stats: bool | None = None  # usage so far in every event
    include_obfuscation: bool | None = None  # pad events, so that their lengths do not show the lengths of texts


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """The response_format of an answer of any form."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """The response_format of an answer that is any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A named schema. With `strict` no keyword of it may be left unenforced."""

    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """The response_format of an answer that follows a JSON Schema."""

    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structured_outputs, of which a request gives exactly one."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark
    structural_tag: dict[str, Any] | str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, tag_field="type", tag="text"):
    """A content part with text, the only type that a text model accepts."""

    text: str
    prompt_cache_breakpoint: Any = None  # not used: all full pages are cached


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name and the arguments of a call. The arguments are a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier answer. `index` is sent by clients that have joined the parts of a stream."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is the JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the model may use. Only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of the function that a chat must call."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. The fields after `content` occur in answers that clients send back as history.

    The chat template receives reasoning and calls, and decides how to use them. `reasoning` is another name of
    `reasoning_content`. `name` is not used. The fields after it must be null or empty.
    """

    role: Role
    content: str | list[TextPart] | None = None  # None: an assistant's message with calls alone
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None  # of the call that a message of the role "tool" answers
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class JsonRequest(msgspec.Struct, kw_only=True):
    """The fields that all JSON requests of OpenAI's API share.

    If a request may be forwarded, only these fields are decoded, because the upstream checks the rest of the body.
    """

    model: str | None = None  # None uses the default of the route
    stream: bool | None = None
    user: str | None = None  # the caller's name for its end user: written to the request log, nothing else
    priority: Any = None


class _Sampling(JsonRequest, forbid_unknown_fields=True, kw_only=True):
    """The fields that chat and completion requests share."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    speculative_decoding: bool | None = None  # false: this answer has no drafts
    stream_options: StreamOptions | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None  # lower runs earlier
    logit_bias: dict[str, float] | None = None  # by token id
    n: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    # Known, not supported.
    bad_words: Any = None
    length_penalty: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None


class ChatRequest(_Sampling, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: int | None = None  # as vLLM calls it: the tokens of reasoning at most
    add_generation_prompt: bool | None = None  # False ends the prompt after the last message
    continue_final_message: bool | None = None  # the answer continues the last message, which is the assistant's
    prediction: dict[str, Any] | None = None
    # Known, not supported.
    audio: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    include_reasoning: Any = None
    modalities: Any = None
    moderation: Any = None
    service_tier: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_Sampling, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None  # begin the text with the prompt, and the log-probabilities with its tokens'
    best_of: int | None = None  # answers that are made, of which the n most probable ones are returned
    # Known, not supported.
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize. It has either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True  # for `prompt`; a chat template writes its own
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# Accepted and not used: they concern OpenAI's storage, abuse monitoring, cache and speed, and change no answer.
UNUSED = frozenset(
    (
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "session_id", "store"),
    )
)
# The values of unsupported fields that are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "bad_words": ([],),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "refusal": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default", "flex"),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_UNSUPPORTED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    struct: tuple(name for name in struct.__struct_fields__ if name in _NEUTRAL)
    for struct in (ChatMessage, ChatRequest, CompletionRequest)
}

Request = TypeVar("Request", bound=msgspec.Struct)


class _Decoders(dict[type, msgspec.json.Decoder[Any]]):
    def __missing__(self, form: type) -> msgspec.json.Decoder[Any]:
        return self.setdefault(form, msgspec.json.Decoder(form))


_DECODERS = _Decoders()  # by the form of a request


def decode_request(body: bytes, form: type[Request]) -> Request:
    """Return the decoded body of a request. Raises RequestError (400) that names the invalid field."""
    if not body:
        raise RequestError("the body is empty; send a JSON object")
    try:
        request = _decode(body.removeprefix(codecs.BOM_UTF8), form)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), form) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # msgspec takes a body for truncated whose end is too near to hold the second half of a surrogate pair.
        lone_surrogate = _LONE_SURROGATE_AT_END.search(body) if "truncated" in str(error) else None
        reason = (
            f"{lone_surrogate[1].decode()} is half of a surrogate pair, which is no character"
            if lone_surrogate
            else error
        )
        raise RequestError(f"the body is not valid JSON: {reason}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    check_supported(request)
    for index, message in enumerate(getattr(request, "messages", None) or ()):
        check_supported(message, f"messages[{index}].")
    return request


def _decode(body: bytes, form: type[Request]) -> Request:
    """Decode a body. An integer may be written as 16.0, as JSON Schema allows."""
    try:
        request: Request = _DECODERS[form].decode(body)
    except msgspec.ValidationError as error:
        if _FLOAT_FOR_INT.match(str(error)) is None:
            raise
        fields = msgspec.json.decode(body, type=dict[str, Any])
        return msgspec.convert({name: _with_whole_numbers(value) for name, value in fields.items()}, form)
    return request


def _with_whole_numbers(value: Any) -> Any:
    """Convert whole floats to integers, in a number or in a list of numbers. Objects in a list are not changed."""
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def convert_fields(fields: dict[str, Any], form: type[Request]) -> Request:
    """Return the struct `form` with fields of a form or of a URL, whose values are text. Raises RequestError (400)."""
    try:
        return msgspec.convert(fields, form, strict=False)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), form) from error


def check_supported(
    struct: msgspec.Struct, prefix: str = "", neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Raise RequestError (400) for the first unsupported field whose value is not neutral.

    `neutral` has the accepted values of a form that is not OpenAI's chats or completions, by field.
    """
    names = _UNSUPPORTED.get(type(struct), ()) if neutral is None else struct.__struct_fields__
    values = _NEUTRAL if neutral is None else neutral
    for name in names:
        value = _with_whole_numbers(getattr(struct, name))
        if value is not None and name in values and not _is_neutral(value, values[name]):
            accepted = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in values[name])])
            raise RequestError(f"{prefix}{name} is not supported; leave it out or set {accepted}", param=prefix + name)


def _is_neutral(value: Any, neutral_values: tuple[Any, ...]) -> bool:
    # By type as well: in Python True equals 1, in JSON it does not.
    return any(type(value) is type(neutral_value) and value == neutral_value for neutral_value in neutral_values)


_ENUMERATIONS = {
    "response_format": get_args(AudioFormat),
    "stream_format": ("audio", "sse"),
    "mode": ("llm", "agent"),
    "format": ("audio", "json"),
    "tool_choice": ("none", "auto", "required", "the name of a function"),
    "reasoning_effort": get_args(ReasoningEffort),
}
_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
# Fewer bytes follow than the six of a second half, and they do not begin one.
_LONE_SURROGATE_AT_END = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u|\\\Z|\Z).{1,5}\Z", re.DOTALL
)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_CONTENT_TYPE = re.compile(r"content\[[^]]*\]\.type$")  # of a part of a message
_NAMED_FIELD = re.compile(r"field `(?P<name>[^`]+)`")


def _validation_error(text: str, form: type) -> RequestError:
    """Convert msgspec's message to an error that names the field.

    For example "Expected `str`, got `int` - at `$.model`" names `model`.
    """
    path_match = _PATH.search(text)
    path = path_match["path"] if path_match else ""
    reason = text[: path_match.start()] if path_match else text
    reason = reason.replace("Object contains unknown field", "unknown field")
    reason = reason.replace("Object missing required field", "missing field")
    field_match = _NAMED_FIELD.search(reason)
    param = ".".join(part for part in (path, field_match["name"] if field_match else "") if part)
    if reason.startswith("unknown field"):
        reason = "this field is not known here, so it is not supported"
        if param.startswith("guided_"):  # of vLLM before 0.12, whose later versions ignore it
            reason += "; give structured_outputs"
    elif reason.startswith("missing field"):
        reason = "this field is required"
    elif path == "response_format.type":
        reason += "; known are text, json_object, json_schema"
    elif reason.startswith("Invalid enum value") and path in _ENUMERATIONS:
        reason += f"; known are {', '.join(_ENUMERATIONS[path])}"
    elif reason.startswith("Invalid enum value") and issubclass(form, ChatRequest | TokenizeRequest):  # a type or role
        known = "; only function is known" if path.endswith("type") else f"; known are {', '.join(get_args(Role))}"
        reason += known
    elif _CONTENT_TYPE.search(path):
        known = "; only text is known" if issubclass(form, ChatRequest | TokenizeRequest) else ""
        reason += f"{known}: language models read no images and no audio"
    return RequestError(f"{param or 'the body'}: {reason}", param=param or None)
