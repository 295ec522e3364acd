"""The API described in OpenAPI 3.1, from the structs that decode its requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from meltcore import __version__
from meltcore.serve.dialects.vision import PATHS as VISION_PATHS
from meltcore.serve.http.paths import OPEN_PATHS
from meltcore.serve.requests.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DirectChatRequest,
    IndicChatRequest,
    SpeechBatchRequest,
    SpeechToSpeechFields,
    SynthesisFields,
    TalkRequest,
    TokenizeRequest,
    TranslateRequest,
)
from meltcore.serve.requests.stats import CLASSES

_JSON, _AUDIO, _FORM = "application/json", "audio/*", "multipart/form-data"


class _Operation(NamedTuple):
    """One route. body: the struct of its request, or the fields of its form. answer: "" where it is always a 501.

    example: a body to try it with. query: fields of the URL.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | tuple[str, ...] | None = None
    answer: str = _JSON
    example: dict[str, Any] | None = None
    query: tuple[str, ...] = ()


_QUESTION = [{"role": "user", "content": "What is 7 * 8?"}]
_OPERATIONS = (
    _Operation(
        *("post", "/v1/chat/completions", "Answer a chat, streamed or not", ChatRequest),
        example={"model": "NAME", "messages": _QUESTION, "max_tokens": 64},
    ),
    _Operation(
        *("post", "/v1/completions", "Continue texts or token ids", CompletionRequest),
        example={"model": "NAME", "prompt": "7 * 8 =", "max_tokens": 16},
    ),
    _Operation(
        *("post", "/v1/translate", "Translate sentences", TranslateRequest),
        example={"sentences": ["the cat sees the dog"], "src_lang": "eng_Latn", "tgt_lang": "guj_Gujr"},
    ),
    _Operation("post", "/v1/audio/speech", "Speak a text", SynthesisFields, _AUDIO, {"input": "go at seven"}),
    _Operation(
        "post",
        "/v1/audio/transcriptions",
        "Transcribe a recording",
        ("file", "model", "language", "response_format", "timestamp_granularities[]", "decoder", "stream", "user"),
    ),
    _Operation(
        *("post", "/v1/indic_chat", "Answer a prompt in a language", IndicChatRequest),
        example={"prompt": "What is 7 * 8?", "src_lang": "eng_Latn", "tgt_lang": "guj_Gujr"},
    ),
    _Operation(
        *("post", "/v1/chat_direct", "Answer a prompt", DirectChatRequest), example={"prompt": "What is 7 * 8?"}
    ),
    _Operation("post", "/v1/chat", "Answer a text", TalkRequest, example={"text": "What is 7 * 8?"}),
    _Operation(
        "post",
        "/v1/speech_to_speech",
        "Answer a spoken question with speech",
        ("file", *SpeechToSpeechFields.__struct_fields__),
        _AUDIO,
    ),
    _Operation("post", "/v1/transcribe", "Transcribe a recording", ("file",), query=("language",)),
    _Operation("post", "/transcribe_batch", "Transcribe up to 64 recordings", ("files",), query=("language",)),
    _Operation(
        "post",
        "/v1/audio/speech_batch",
        "Speak up to 64 texts, as a zip archive",
        SpeechBatchRequest,
        "application/zip",
        {"input": ["go at seven", "come at nine"]},
    ),
    *(
        _Operation("post", path, "Refused: images and PDF files need a vision model", answer="")
        for path in VISION_PATHS
        if not path.endswith("/")
    ),
    _Operation(
        *("post", "/tokenize", "Return the token ids of a text or of a chat", TokenizeRequest),
        example={"prompt": "7 * 8"},
    ),
    _Operation(
        *("post", "/detokenize", "Return the text of token ids", DetokenizeRequest), example={"tokens": [1, 2, 3]}
    ),
    _Operation("get", "/v1/models", "List the models that are ready"),
    _Operation("get", "/v1/models/{name}", "Describe a model"),
    _Operation("get", "/v1/status", "Tell what each model and GPU does now"),
    _Operation("get", "/v1/health", "Tell whether the server can answer requests, in dwani.ai's form"),
    _Operation("get", "/health", "Tell whether the server can answer requests"),
    _Operation("get", "/metrics", "Return Prometheus text", answer="text/plain"),
)
# Every form has audio in its first field. OpenAPI 3.1 says so by the media type, 3.0 by the format.
_UPLOAD = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
_TAGS = {
    "OpenAI": "The API of OpenAI, as vLLM has it. GET /v1/models lists the names of models.",
    "dwani.ai": "The API of dwani.ai",
    "server": "Models, health and load",
}
_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/audio/speech", "/v1/audio/transcriptions")
_SERVER_PATHS = ("/tokenize", "/detokenize", "/v1/status")
_ERROR = {"description": "An error in OpenAI's form: error.message, type, param and code"}
_REFUSED = {**_ERROR, "headers": {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}}
_HEADERS = (
    ("X-Request-Timeout", "Seconds that the answer may take, below the server's limit", {"type": "number"}),
    ("X-Priority-Class", "Class of the request in its model's queue", {"type": "string", "enum": list(CLASSES)}),
    ("X-Request-ID", "Name of the request in answer and log", {"type": "string", "maxLength": 128}),
)


def document() -> dict[str, Any]:
    """Return the description in the form of OpenAPI 3.1, whose schemas are JSON schemas."""
    structs = [operation.body for operation in _OPERATIONS if isinstance(operation.body, type)]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    keys = {"bearer": {"type": "http", "scheme": "bearer"}, "x_api_key": _header_key()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Meltcore", "version": __version__},
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{"bearer": []}, {"x_api_key": []}],
    }


def _header_key() -> dict[str, str]:
    return {"type": "apiKey", "in": "header", "name": "X-API-Key"}


def _tag(operation: _Operation) -> str:
    if operation.path in _OPENAI_PATHS or operation.path.startswith("/v1/models"):
        return "OpenAI"
    return "server" if operation.method == "get" or operation.path in _SERVER_PATHS else "dwani.ai"


def _described(operation: _Operation) -> dict[str, Any]:
    answer = {"200": {"description": "The answer", "content": {operation.answer: {}}}} if operation.answer else {}
    refusal = {} if operation.answer else {"501": _ERROR}
    described: dict[str, Any] = {
        "tags": [_tag(operation)],
        "summary": operation.summary,
        "responses": {**answer, **refusal, "default": _ERROR},
    }
    if operation.path in OPEN_PATHS:
        described["security"] = []
    if parameters := list(_parameters(operation)):
        described["parameters"] = parameters
    if operation.body is not None:
        described["responses"] |= {"429": _REFUSED, "503": _REFUSED}
        described["requestBody"] = {"required": True, "content": _body(operation.body, operation.example)}
    return described


def _parameters(operation: _Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name in operation.query:
        yield {"name": name, "in": "query", "schema": {"type": "string"}}
    if operation.body is not None:
        for name, text, schema in _HEADERS:
            yield {"name": name, "in": "header", "description": text, "schema": schema}


def _body(body: type[msgspec.Struct] | tuple[str, ...], example: dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(body, tuple):
        uploads = {"file": _UPLOAD, "files": {"type": "array", "items": _UPLOAD}}
        fields = {name: uploads.get(name, {"type": "string", "example": ""}) for name in body}
        return {_FORM: {"schema": {"type": "object", "properties": fields, "required": [body[0]]}}}
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}, "example": example}}
