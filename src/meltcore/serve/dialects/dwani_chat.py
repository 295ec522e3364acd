"""Serves dwani.ai's chat routes: /v1/indic_chat, /v1/chat_direct and /v1/chat. Requests and answers are JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from meltcore.common.errors import RequestError
from meltcore.common.visible import is_visible
from meltcore.serve.http.operation import DWANI, Operation
from meltcore.serve.requests.asgi import while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.generation.chat import ask, check_mode
from meltcore.serve.tasks.translation.translated_chat import answer_in

INDIC_CHAT, CHAT_DIRECT, CHAT = "/v1/indic_chat", "/v1/chat_direct", "/v1/chat"
# dwani.ai's limits in characters.
MAX_PROMPT, MAX_TALK = 10_000, 4_000


class IndicChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/indic_chat. It has a prompt in one language and names the language of the answer."""

    prompt: str
    src_lang: str
    tgt_lang: str
    model: str | None = None


class DirectChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/chat_direct."""

    prompt: str
    model: str | None = None
    system_prompt: str = ""


class TalkRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/chat."""

    text: str
    mode: Literal["llm", "agent"] = "llm"
    agent_name: str | None = None


class DwaniChatEndpoint(Endpoint):
    """Reads a request of one of the three forms, and answers with the text of a language model."""

    paths = dwani_paths = (INDIC_CHAT, CHAT_DIRECT, CHAT)
    operations = (
        Operation(
            *("post", INDIC_CHAT, "Answer a prompt in a language", IndicChatRequest),
            example={"prompt": "What is 7 * 8?", "src_lang": "eng_Latn", "tgt_lang": "guj_Gujr"},
            tag=DWANI,
        ),
        Operation(
            *("post", CHAT_DIRECT, "Answer a prompt", DirectChatRequest),
            example={"prompt": "What is 7 * 8?"},
            tag=DWANI,
        ),
        Operation("post", CHAT, "Answer a text", TalkRequest, example={"text": "What is 7 * 8?"}, tag=DWANI),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        handlers = {INDIC_CHAT: self._indic_chat, CHAT_DIRECT: self._chat_direct, CHAT: self._chat}
        await exchange.answer_json(await handlers[exchange.scope["path"]](exchange))

    async def _indic_chat(self, exchange: Exchange) -> dict[str, str]:
        request = await self.read(exchange, IndicChatRequest)
        _check(request.prompt, "prompt", MAX_PROMPT)
        exchange.fields["model"] = request.model
        languages = (request.src_lang, request.tgt_lang)
        work = answer_in(self.choices, exchange, request.prompt, languages)
        return {"response": await while_connected(exchange.scope, work)}

    async def _chat_direct(self, exchange: Exchange) -> dict[str, str]:
        request = await self.read(exchange, DirectChatRequest)
        _check(request.prompt, "prompt", MAX_PROMPT)
        return {"response": await self._ask(exchange, request.prompt, request.model, request.system_prompt)}

    async def _chat(self, exchange: Exchange) -> dict[str, str]:
        request = await self.read(exchange, TalkRequest)
        _check(request.text, "text", MAX_TALK)
        check_mode(request.mode)
        return {"user": request.text, "reply": await self._ask(exchange, request.text)}

    async def _ask(self, exchange: Exchange, prompt: str, model: str | None = None, system: str = "") -> str:
        """Return the answer of a language model to a prompt. `model` names the model; None chooses one."""
        backend = self.choices.chat_model(model)
        exchange.fields["model"] = backend.names[0]
        return (await while_connected(exchange.scope, ask(backend, system, prompt))).text


def _check(text: str, name: str, limit: int) -> None:
    if not is_visible(text):
        raise RequestError(f"{name} is empty", param=name)
    if len(text) > limit:
        raise RequestError(f"{name} has {len(text):,} characters; the limit is {limit:,}", param=name)
