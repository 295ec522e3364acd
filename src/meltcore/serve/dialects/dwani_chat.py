"""dwani.ai's chats: /v1/indic_chat, /v1/chat_direct and /v1/chat. One JSON request, one JSON answer."""

from __future__ import annotations

import time

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.http.http import while_connected
from meltcore.serve.requests.protocol import (
    DirectChatRequest,
    IndicChatRequest,
    TalkRequest,
    TranslateRequest,
    decode_request,
)
from meltcore.serve.tasks.chat import ask
from meltcore.serve.tasks.exchange import Endpoint, Exchange
from meltcore.serve.tasks.model_choice import ModelChoice
from meltcore.text.languages import english_name
from meltcore.text.visible import is_visible

INDIC_CHAT, CHAT_DIRECT, CHAT = "/v1/indic_chat", "/v1/chat_direct", "/v1/chat"
# dwani.ai's limits in characters.
MAX_PROMPT, MAX_TALK = 10_000, 4_000


class DwaniChatEndpoint(Endpoint):
    """Reads one of the three requests, and answers with a language model's text."""

    paths = dwani_paths = (INDIC_CHAT, CHAT_DIRECT, CHAT)

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        body, _ = await exchange.body(self._config.max_body_bytes)
        handlers = {INDIC_CHAT: self._indic_chat, CHAT_DIRECT: self._chat_direct, CHAT: self._chat}
        response = await while_connected(exchange.scope, handlers[exchange.scope["path"]](exchange, body))
        await exchange.answer(msgspec.json.encode(response), b"application/json")

    async def _indic_chat(self, exchange: Exchange, body: bytes) -> dict[str, str]:
        request = decode_request(body, IndicChatRequest)
        _check(request.prompt, "prompt", MAX_PROMPT)
        exchange.fields["model"] = request.model
        languages = (request.src_lang, request.tgt_lang)
        return {"response": await answer_in(self.choices, exchange, request.prompt, languages)}

    async def _chat_direct(self, exchange: Exchange, body: bytes) -> dict[str, str]:
        request = decode_request(body, DirectChatRequest)
        _check(request.prompt, "prompt", MAX_PROMPT)
        backend = self.choices.chat_model(request.model)
        exchange.fields["model"] = backend.names[0]
        answer = await ask(backend, request.system_prompt, request.prompt, exchange.identity)
        return {"response": answer.text}

    async def _chat(self, exchange: Exchange, body: bytes) -> dict[str, str]:
        request = decode_request(body, TalkRequest)
        _check(request.text, "text", MAX_TALK)
        check_mode(request.mode)
        backend = self.choices.chat_model()
        exchange.fields["model"] = backend.names[0]
        return {"user": request.text, "reply": (await ask(backend, "", request.text, exchange.identity)).text}


async def answer_in(choices: ModelChoice, exchange: Exchange, prompt: str, languages: tuple[str, str]) -> str:
    """Return a language model's answer to a prompt. languages: of the prompt, and of the answer.

    `fields["model"]` of the exchange names the model, None the first. The model is asked in its own language where one
    is configured: prompt and answer are translated then. Raises RequestError (400, 404, 429, 500, 503, 504).
    """
    source, target = (
        english_name(language, name) for language, name in zip(languages, ("src_lang", "tgt_lang"), strict=True)
    )
    backend, config = choices.chat_model(exchange.fields["model"]), choices.config
    exchange.fields["model"] = backend.names[0]
    own = config.chat_language
    own_name = target if own is None else english_name(own, "chat_language")

    async def translated(text: str, source: str, target: str) -> str:
        translator, request = choices.translator(TranslateRequest([text], source, target))
        return (await translator.translate(request, exchange.identity, time.monotonic())).texts[0]

    if own is not None and source != own_name:
        prompt = await translated(prompt, languages[0], own)
    answer = (await ask(backend, config.chat_prompt.format(language=own_name), prompt, exchange.identity)).text
    if own is not None and target != own_name:
        answer = await translated(answer, own, languages[1])
    return answer


def check_mode(mode: str) -> None:
    """Raise RequestError (501) unless a language model alone is to answer."""
    if mode != "llm":
        raise RequestError("mode agent is not supported: this server has no agents", param="mode", status=501)


def _check(text: str, name: str, limit: int) -> None:
    if not is_visible(text):
        raise RequestError(f"{name} is empty", param=name)
    if len(text) > limit:
        raise RequestError(f"{name} has {len(text):,} characters; the limit is {limit:,}", param=name)
