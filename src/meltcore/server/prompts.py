"""From a request's messages or prompt to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from meltcore.errors import RequestError
from meltcore.server.protocol import ChatMessage, CompletionRequest
from meltcore.text.chat_template import ChatTemplate, render_chat
from meltcore.text.tokenizer import Tokenizer

# Longer text is tokenised on a thread, without the GIL. This much takes about 10 ms, the most that one request may hold
# up every other stream.
INLINE_CHARS = 16_384
MAX_PROMPTS = 1024  # in one completion request
# Of text with more characters than so many for each token of the context, that much is tokenised first: most languages
# have four a token, and megabytes that are refused in the end would take seconds. Where that is twice too long, so is
# the whole, wherever the cut was.
_HEAD_CHARS, _SURELY_TOO_LONG = 16, 2


async def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: list[ChatMessage],
    kwargs: dict[str, Any] | None,
    context: int | None = None,
) -> list[int]:
    """Token ids of a chat, ending where the answer begins. `context`: see `encode_all`. Raises RequestError (400)."""
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    text = render_chat(template, [_plain(message) for message in messages], kwargs)
    (ids,) = await encode_all(tokenizer, [text], "messages", add_special_tokens=False, context=context)
    return _not_empty(ids, "messages")


async def completion_prompts(
    tokenizer: Tokenizer, vocab_size: int, request: CompletionRequest, context: int | None = None
) -> list[list[int]]:
    """Token ids of each prompt: one text, several texts, one list of ids, or several lists of ids.

    `context`: see `encode_all`. Raises RequestError (400).
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise RequestError("prompt is empty", param="prompt")
    if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise RequestError(f"prompt holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes texts, token ids or lists; give one kind", param="prompt")
    kind = kinds.pop()
    if kind is str:
        texts = [item for item in prompt if isinstance(item, str)]
        encoded = await encode_all(tokenizer, texts, "prompt", add_special_tokens=True, context=context)
        return [_not_empty(ids, "prompt") for ids in encoded]
    token_lists = [prompt] if kind is int else prompt
    return [_checked_ids(ids, vocab_size, "prompt") for ids in token_lists if isinstance(ids, list)]


async def encode_all(
    tokenizer: Tokenizer, texts: list[str], param: str, *, add_special_tokens: bool, context: int | None = None
) -> list[list[int]]:
    """Tokenise `texts`; much text on a thread, so that the event loop goes on serving.

    context: the most tokens that can be of use. Raises RequestError (400) naming `param` for a text that is found to
    have many more, before all of it is tokenised; one that is a little too long is returned.
    """

    def work() -> list[list[int]]:
        encoded = []
        for text in texts:
            if context is not None:
                _check_head(tokenizer, text, param, context)
            encoded.append(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return encoded

    if sum(map(len, texts)) <= INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)


def _check_head(tokenizer: Tokenizer, text: str, param: str, context: int) -> None:
    head = text[: _HEAD_CHARS * context]
    if len(head) == len(text):
        return
    tokens = len(tokenizer.encode(head, add_special_tokens=False))
    if tokens > _SURELY_TOO_LONG * context:
        raise RequestError(
            f"the first {len(head)} of the prompt's {len(text)} characters are {tokens} tokens already; "
            f"the context is {context} tokens, so a prompt may have at most {context - 1}",
            param=param,
            code="context_length_exceeded",
        )


async def decode(tokenizer: Tokenizer, ids: list[int], vocab_size: int) -> str:
    """The text of `ids`, special tokens included. Raises RequestError (400) for ids outside the vocabulary."""
    _check_ids(ids, vocab_size, "tokens")
    if len(ids) <= INLINE_CHARS:
        return tokenizer.decode(ids, skip_special_tokens=False)
    return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)


def _check_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Raise RequestError (400) for an id outside the vocabulary."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {vocab_size} ids", param=param)


def _checked_ids(ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    _check_ids(ids, vocab_size, param)
    return _not_empty(list(ids), param)


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise RequestError("the prompt has no tokens; a model needs at least one to continue from", param=param)
    return ids


def _plain(message: ChatMessage) -> dict[str, str]:
    """What a template sees. "developer" is OpenAI's newer word for "system", and the only one templates know."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain
