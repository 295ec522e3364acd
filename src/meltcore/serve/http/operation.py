"""Describes one operation of the API for OpenAPI."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

JSON_TYPE, AUDIO_TYPE = "application/json", "audio/*"
OPENAI, DWANI = "OpenAI", "dwani.ai"  # whose API an operation is of


class Operation(NamedTuple):
    """One route, as the API description shows it.

    Args:
        body: struct of the request, or the names of the fields of its form. None means a request without a body.
        answer: content type of the answer, or "" for a route that always answers 501.
        example: a body with which to try the route.
        query: names of the parameters in the URL.
        tag: heading in the description: OPENAI, DWANI, or the name of the server's own routes.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | tuple[str, ...] | None = None
    answer: str = JSON_TYPE
    example: dict[str, Any] | None = None
    query: tuple[str, ...] = ()
    tag: str = OPENAI
