"""Sends prompts to a language model of this server, for routes whose form is not OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from meltcore.common.errors import RequestError
from meltcore.serve.requests.backend import Backend
from meltcore.serve.requests.protocol import ChatMessage, ChatRequest
from meltcore.serve.tasks.generation.generation_ticket import GenerationTicket
from meltcore.serve.tasks.generation.local_engine import local_engine
from meltcore.serve.tasks.generation.upstream_chat import ask_upstream
from meltcore.serve.upstream.http_backend import HttpBackend

# An answer that has this many is ended, since these routes have no field for it.
MAX_ANSWER_TOKENS = 2048


class ChatAnswer(NamedTuple):
    """The text of a complete answer without its reasoning, and the numbers of prompt tokens and generated tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int


async def ask(backend: Backend, system: str, prompt: str, *, stop: Sequence[str] = ()) -> ChatAnswer:
    """Return a model's answer to a prompt. Cancelling the call ends the work in the engine.

    `system` contains instructions that precede the prompt, or is "". The answer ends before any text of `stop`. Raises
    RequestError (400, 429, 500, 503, 504).
    """
    messages = [ChatMessage("system", system)] if system else []
    messages.append(ChatMessage("user", prompt))
    if isinstance(backend, HttpBackend):
        fields: dict[str, Any] = {"model": backend.names[0], "messages": messages}
        fields |= {"stop": list(stop)} if stop else {}
        text, *tokens = await ask_upstream(backend, fields)
        return ChatAnswer(text.strip(), *tokens)
    # The text is taken at the end: until then the request can be retried on another replica.
    ticket = GenerationTicket(arrived_s=time.monotonic(), streaming=True, every_token=True)
    request = ChatRequest(model=backend.names[0], messages=messages, stop=list(stop) or None)
    model = local_engine(backend)
    await model.submit(request, ticket)
    try:
        (choice,) = ticket.choices
        while ticket.open_children and choice.output_tokens < MAX_ANSWER_TOKENS:
            await ticket.wait_for_change()
            if ticket.error is not None:
                raise ticket.error
        return ChatAnswer(choice.take_text().strip(), ticket.prompt_tokens, ticket.output_tokens)
    finally:
        model.release(ticket)
        ticket.choices.clear()  # they refer to it: a cycle would keep the answer until the next collection


def check_mode(mode: str) -> None:
    """Raise RequestError (501) for a mode of dwani.ai's API that needs more than a language model."""
    if mode != "llm":
        raise RequestError("mode agent is not supported: this server has no agents", param="mode", status=501)
