"""GET /openapi.json and /docs: the API described from the structs that decode its requests."""

from __future__ import annotations

from html import escape
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from meltcore import __version__
from meltcore.api.gate import OPEN_PATHS
from meltcore.api.http import send_bytes
from meltcore.api.protocol import (
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
from meltcore.api.stats import CLASSES
from meltcore.api.vision import PATHS as VISION_PATHS

PATHS = ("/docs", "/openapi.json")
_JSON, _AUDIO, _FORM = "application/json", "audio/*", "multipart/form-data"


class _Operation(NamedTuple):
    """One route. body: the struct of its request, or the fields of its form. answer: "" where it is always a 501."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | tuple[str, ...] | None = None
    answer: str = _JSON


_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Answer a chat, streamed or not", ChatRequest),
    _Operation("post", "/v1/completions", "Continue texts or token ids", CompletionRequest),
    _Operation("post", "/v1/translate", "Translate sentences", TranslateRequest),
    _Operation("post", "/v1/audio/speech", "Speak a text", SynthesisFields, _AUDIO),
    _Operation(
        "post",
        "/v1/audio/transcriptions",
        "Transcribe a recording",
        ("file", "model", "language", "response_format", "timestamp_granularities[]", "decoder", "stream", "user"),
    ),
    _Operation("post", "/v1/indic_chat", "Answer a prompt in a language", IndicChatRequest),
    _Operation("post", "/v1/chat_direct", "Answer a prompt", DirectChatRequest),
    _Operation("post", "/v1/chat", "Answer a text", TalkRequest),
    _Operation(
        "post",
        "/v1/speech_to_speech",
        "Answer a spoken question with speech",
        ("file", *SpeechToSpeechFields.__struct_fields__),
        _AUDIO,
    ),
    _Operation("post", "/v1/transcribe", "Transcribe a recording (?language=)", ("file", "language")),
    _Operation("post", "/transcribe_batch", "Transcribe up to 64 recordings (?language=)", ("files", "language")),
    _Operation(
        "post",
        "/v1/audio/speech_batch",
        "Speak up to 64 texts, as a zip archive",
        SpeechBatchRequest,
        "application/zip",
    ),
    *(
        _Operation("post", path, "Refused: images and PDF files need a vision model", answer="")
        for path in VISION_PATHS
        if not path.endswith("/")
    ),
    _Operation("post", "/tokenize", "Return the token ids of a text or of a chat", TokenizeRequest),
    _Operation("post", "/detokenize", "Return the text of token ids", DetokenizeRequest),
    _Operation("get", "/v1/models", "List the models that are ready"),
    _Operation("get", "/v1/models/{name}", "Describe a model"),
    _Operation("get", "/v1/status", "Tell what each model and GPU does now"),
    _Operation("get", "/v1/health", "Tell whether the server can answer requests, in dwani.ai's form"),
    _Operation("get", "/health", "Tell whether the server can answer requests"),
    _Operation("get", "/metrics", "Return Prometheus text", answer="text/plain"),
)
_ERROR = {"description": "An error in OpenAI's form: error.message, type, param and code"}
_REFUSED = {**_ERROR, "headers": {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}}
_HEADERS = (
    ("X-Request-Timeout", "Seconds that the answer may take, below the server's limit", {"type": "number"}),
    ("X-Priority-Class", "Class of the request in its model's queue", {"enum": list(CLASSES)}),
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
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{"bearer": []}, {"x_api_key": []}],
    }


def _header_key() -> dict[str, str]:
    return {"type": "apiKey", "in": "header", "name": "X-API-Key"}


def _described(operation: _Operation) -> dict[str, Any]:
    answer = {"200": {"description": "The answer", "content": {operation.answer: {}}}} if operation.answer else {}
    refusal = {} if operation.answer else {"501": _ERROR}
    described: dict[str, Any] = {"summary": operation.summary, "responses": {**answer, **refusal, "default": _ERROR}}
    if operation.path in OPEN_PATHS:
        described["security"] = []
    if operation.body is None:
        return described
    described["responses"] |= {"429": _REFUSED, "503": _REFUSED}
    described["parameters"] = [
        {"name": name, "in": "header", "description": text, "schema": schema} for name, text, schema in _HEADERS
    ]
    if isinstance(operation.body, tuple):
        fields = {name: {"type": "string"} for name in operation.body}
        content = {_FORM: {"schema": {"type": "object", "properties": fields, "required": [operation.body[0]]}}}
    else:
        content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{operation.body.__name__}"}}}
    described["requestBody"] = {"required": True, "content": content}
    return described


def page(described: dict[str, Any]) -> str:
    """Return the description as HTML, without a script."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>Meltcore API</title>"]
    parts.append("<meta name=viewport content='width=device-width'><h1>Meltcore API</h1>")
    parts.append("<p>As OpenAPI: <a href=openapi.json>openapi.json</a><h2>Operations</h2><ul>")
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<li><code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}")
            for content_type, body in operation.get("requestBody", {}).get("content", {}).items():
                name = body["schema"].get("$ref", "").rpartition("/")[2]
                fields = ", ".join(body["schema"].get("properties", ()))
                link = f"<a href='#{escape(name)}'>{escape(name)}</a>" if name else escape(fields)
                parts.append(f" ({escape(content_type)}: {link})")
    parts.append("</ul><h2>Schemas</h2>")
    for name, schema in described["components"]["schemas"].items():
        text = msgspec.json.format(msgspec.json.encode(schema), indent=2).decode()
        parts.append(f"<h3 id='{escape(name)}'>{escape(name)}</h3><pre>{escape(text)}</pre>")
    return "".join(parts)


class ApiDocs:
    """Both routes as a raw ASGI application. They need no API key: they hold nothing of a user or of a model."""

    def __init__(self) -> None:
        described = document()
        self._answers = {
            "/openapi.json": (msgspec.json.encode(described), b"application/json"),
            "/docs": (page(described).encode(), b"text/html; charset=utf-8"),
        }

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the description in the form of the path."""
        body, content_type = self._answers[scope["path"]]
        policy = (b"content-security-policy", b"default-src 'none'")
        await send_bytes(send, body, content_type, headers=[policy, (b"x-content-type-options", b"nosniff")])
