"""Describes the API in OpenAPI 3.1. The schemas come from the structs that decode the requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meltcore import __version__
from meltcore.serve.endpoints import endpoint_types
from meltcore.serve.http.operation import DWANI, JSON_TYPE, OPENAI, Operation
from meltcore.serve.http.paths import OPEN_PATHS
from meltcore.serve.requests.protocol import DetokenizeRequest, TokenizeRequest
from meltcore.serve.requests.stats import CLASSES

_FORM = "multipart/form-data"
_SERVER = "server"
_OTHERS = (
    Operation(
        *("post", "/tokenize", "Return the token ids of a text or of a chat", TokenizeRequest),
        example={"prompt": "7 * 8"},
        tag=_SERVER,
    ),
    Operation(
        *("post", "/detokenize", "Return the text of token ids", DetokenizeRequest),
        example={"tokens": [1, 2, 3]},
        tag=_SERVER,
    ),
    Operation("get", "/v1/models", "List the models that are ready"),
    Operation("get", "/v1/models/{name}", "Describe a model"),
    Operation("get", "/v1/status", "Tell what each model and GPU does now", tag=_SERVER),
    Operation("get", "/v1/health", "Tell whether the server can answer requests, in dwani.ai's form", tag=_SERVER),
    Operation("get", "/health", "Tell whether the server can answer requests", tag=_SERVER),
    Operation("get", "/live", "Tell that the process of the server answers", tag=_SERVER),
    Operation("get", "/metrics", "Return Prometheus text", answer="text/plain", tag=_SERVER),
)
# Every form has audio in its first field. OpenAPI 3.1 says so by the media type, 3.0 by the format.
_UPLOAD = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
_TAGS = {
    OPENAI: "The API of OpenAI, as vLLM has it. GET /v1/models lists the names of models.",
    DWANI: "The API of dwani.ai",
    _SERVER: "Models, health and load",
}
_ERROR = {"description": "An error in OpenAI's form: error.message, type, param and code"}
_REFUSED = {**_ERROR, "headers": {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}}
_HEADERS = (
    ("X-Request-Timeout", "Seconds that the answer may take, below the server's limit", {"type": "number"}),
    ("X-Priority-Class", "Class of the request in its model's queue", {"type": "string", "enum": list(CLASSES)}),
    ("X-Request-ID", "Name of the request in answer and log", {"type": "string", "maxLength": 128}),
)


def document() -> dict[str, Any]:
    """Return the API description as an OpenAPI 3.1 document, whose schemas are JSON schemas."""
    operations = [*(each for endpoint in endpoint_types() for each in endpoint.operations), *_OTHERS]
    structs = [operation.body for operation in operations if isinstance(operation.body, type)]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for operation in operations:
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


def _described(operation: Operation) -> dict[str, Any]:
    answer = {"200": {"description": "The answer", "content": _contents(operation)}} if operation.answer else {}
    refusal = {} if operation.answer else {"501": _ERROR}
    described: dict[str, Any] = {
        "tags": [operation.tag],
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


def _contents(operation: Operation) -> dict[str, Any]:
    """Return the content types of the answers of a route, some of which a request chooses."""
    body = operation.body or ()
    fields = body if isinstance(body, tuple) else body.__struct_fields__
    can_stream = "stream" in fields and operation.path != "/v1/responses/input_tokens"  # whose form is another route's
    can_be_text = isinstance(body, tuple) and "response_format" in fields
    others = {"text/event-stream": can_stream, "text/plain": can_be_text}
    return {operation.answer: {}, **{name: {} for name, is_possible in others.items() if is_possible}}


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
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
    return {JSON_TYPE: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}, "example": example}}
