"""POST /v1/translate, in the form of dwani.ai's API: sentences in, as many translations out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from starlette.types import Receive, Scope

from meltcore.api.backend import ModelTable
from meltcore.api.http import ClientDisconnectedError, read_body, request_id
from meltcore.api.log import Log
from meltcore.api.protocol import MAX_SENTENCES, TranslateRequest, decode_request
from meltcore.config import ServerConfig
from meltcore.errors import RequestError


class TranslatedTexts(NamedTuple):
    """The translation of each text of a request, and the tokens of its sentences: those read, and those written.

    The tokens include what a model adds to a sentence: its language tags and the end token.
    """

    texts: list[str]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@runtime_checkable
class TranslationBackend(Protocol):
    """A backend whose model may translate."""

    names: tuple[str, ...]

    @property
    def translates(self) -> bool:
        """Whether the model is loaded and translates."""

    async def translate(
        self, request: TranslateRequest, request_id: str, arrived_s: float, on_job: Callable[[Callable[[], None]], None]
    ) -> TranslatedTexts:
        """Return the translation of each text. on_job: receives a function that ends the request in the engines.

        Raises RequestError (400, 429, 500, 503).
        """


class TranslateHandler:
    """Reads a request, waits for its translations within the time limit, and logs it without text."""

    def __init__(self, models: ModelTable, config: ServerConfig, log: Log) -> None:
        self._models = models
        self._config = config
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """Return the response. Raises RequestError."""
        arrived_s, fields = time.monotonic(), dict[str, Any]()
        try:
            response = await self._answer(scope, receive, arrived_s, fields)
            fields["status"] = 200
        except RequestError as error:
            fields |= {"status": error.status, "error": error.code or error.param}
            if error.status == 499:
                raise ClientDisconnectedError from error
            raise
        finally:
            seconds = round(time.monotonic() - arrived_s, 6)
            self._log.write("request", request_id=request_id(scope), path=scope["path"], **fields, total_s=seconds)
        return response

    async def _answer(self, scope: Scope, receive: Receive, arrived_s: float, fields: dict[str, Any]) -> dict[str, Any]:
        self._models.check_ready()
        request = decode_request(await read_body(scope, receive, self._config.max_body_bytes), TranslateRequest)
        if not 1 <= len(request.sentences) <= MAX_SENTENCES:
            raise RequestError(
                f"sentences must have 1 to {MAX_SENTENCES} texts; got {len(request.sentences)}", param="sentences"
            )
        backend = self._find(request.model)
        fields |= {"model": backend.names[0], "sentences": len(request.sentences)}
        connection = scope["meltcore.connection"]
        limit_s = self._config.request_timeout_s

        def watch(end: Callable[[], None]) -> None:
            connection.set_disconnect_callback(end)

        try:
            async with asyncio.timeout(limit_s):
                translated = await backend.translate(request, request_id(scope), arrived_s, watch)
        except TimeoutError as error:
            raise RequestError(
                f"the answer took longer than {limit_s:g} s (--request-timeout)", status=504, code="request_timeout"
            ) from error
        finally:
            connection.set_disconnect_callback(None)
        usage = {
            "prompt_tokens": translated.prompt_tokens,
            "completion_tokens": translated.completion_tokens,
            "total_tokens": translated.prompt_tokens + translated.completion_tokens,
        }
        return {"translations": translated.texts, "usage": usage}

    def _find(self, name: str | None) -> TranslationBackend:
        """Return the named model, or the first that translates: clients of dwani.ai's API name none."""
        candidates = self._models.backends if name is None else [self._models.find(name)]
        for backend in candidates:
            if isinstance(backend, TranslationBackend) and backend.translates:
                return backend
        names = " and ".join(backend.names[0] for backend in candidates)
        raise RequestError(f"{names} cannot translate; serve an IndicTrans2 checkpoint", param="model")
