"""Serves POST /v1/translate in the form of dwani.ai's API.

The answer has one translation per sentence of the request.
"""

from __future__ import annotations

from meltcore.common.errors import RequestError
from meltcore.serve.http.operation import DWANI, Operation
from meltcore.serve.requests.asgi import while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.translation.choice import translator
from meltcore.serve.tasks.translation.forms import MAX_SENTENCES, TranslateRequest

PATHS = ("/v1/translate", "/translate")


class TranslateEndpoint(Endpoint):
    """Reads a request, and waits for its translations within the time limit."""

    paths = dwani_paths = PATHS
    is_by_language = True
    operations = (
        Operation(
            *("post", PATHS[0], "Translate sentences", TranslateRequest),
            example={"sentences": ["the cat sees the dog"], "src_lang": "eng_Latn", "tgt_lang": "guj_Gujr"},
            tag=DWANI,
        ),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        request = await self.read(exchange, TranslateRequest)
        if not 1 <= len(request.sentences) <= MAX_SENTENCES:
            raise RequestError(
                f"sentences must have 1 to {MAX_SENTENCES} texts; got {len(request.sentences)}", param="sentences"
            )
        backend, request = translator(self.choices, request)
        exchange.fields |= {"model": backend.names[0], "sentences": len(request.sentences)}
        async with exchange.timeout(self._config.timeouts.request_s):
            work = backend.translate(request)
            translated = await while_connected(exchange.scope, work)
        usage = {
            "prompt_tokens": translated.prompt_tokens,
            "completion_tokens": translated.completion_tokens,
            "total_tokens": translated.prompt_tokens + translated.completion_tokens,
        }
        await exchange.answer_json({"translations": translated.texts, "usage": usage})
