"""From a request's messages or prompt to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from meltcore.errors import RequestError
from meltcore.server.protocol import ChatMessage, CompletionRequest
from meltcore.text.chat_template import ChatTemplate, render_chat
from meltcore.text.tokenizer import Tokenizer

# Longer text is tokenised on a thread (the library lets go of the GIL): about 10 ms here, the most one request may
# hold up every other stream.
INLINE_CHARS = 16_384


async def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate | None, messages: list[ChatMessage], kwargs: dict[str, Any] | None
) -> list[int]:
    """Token ids of a chat, ending where the answer begins. Raises RequestError (400)."""
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    text = render_chat(template, [_plain(message) for message in messages], kwargs)
    return _not_empty(await encode(tokenizer, text, add_special_tokens=False), "messages")


async def completion_prompts(tokenizer: Tokenizer, vocab_size: int, request: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt: one text, several texts, one list of ids, or several lists of ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise RequestError("prompt is empty", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes texts, token ids or lists; give one kind", param="prompt")
    kind = kinds.pop()
    if kind is str:
        texts = [item for item in prompt if isinstance(item, str)]
        return [_not_empty(await encode(tokenizer, text, add_special_tokens=True), "prompt") for text in texts]
    token_lists = [prompt] if kind is int else prompt
    return [_checked_ids(ids, vocab_size, "prompt") for ids in token_lists if isinstance(ids, list)]


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenise `text`; a long one on a thread, so that the event loop goes on serving."""
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _checked_ids(ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {vocab_size} ids", param=param)
    return _not_empty(list(ids), param)


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise RequestError("the prompt has no tokens; a model needs at least one to continue from", param=param)
    return ids


def _plain(message: ChatMessage) -> dict[str, str]:
    """What a template sees. "developer" is OpenAI's newer word for "system", and the only one templates know."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
