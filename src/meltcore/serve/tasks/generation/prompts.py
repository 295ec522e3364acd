"""Converts a request's messages or prompt to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import takewhile
from threading import Event
from typing import Any, TypeVar

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import ChatMessage, CompletionRequest
from meltcore.serve.tasks.generation.tools import template_calls
from meltcore.text.chat_prompt import ChatPrompt, render_chat, render_continued
from meltcore.text.chat_template import ChatTemplate, MissingTemplate
from meltcore.text.detokenizer import text_to_continue
from meltcore.text.tokenizer import Tokenizer

# Longer text is tokenized on a thread, without the GIL. This much takes about 10 ms, the longest that one request may
# delay the streams of others.
INLINE_CHARS = 16_384
MAX_PROMPTS = 1024  # in one completion request
# The tokens of a text with more than _LONG_BYTES bytes per token of the context are counted first, piece by piece. Most
# languages have three to nine bytes per token. Megabytes of text would take seconds, and 150 bytes per token. When the
# pieces so far have _TOO_LONG times the context, the whole is too long, wherever they were cut.
_LONG_BYTES, _TOO_LONG = 16, 2
_PIECE_CHARS = 16_384
_END_CHARS = 1024  # of a text that is cut, which decide on its last token
MAX_COUNTED_TOKENS = 2**18  # of a text that is only tokenized, where the context is not longer
# An API server process tokenizes four long texts concurrently, and others wait: this bounds the memory that they take.
_THREADS = ThreadPoolExecutor(4, thread_name_prefix="tokenizer")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


async def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate | MissingTemplate,
    messages: list[ChatMessage],
    kwargs: dict[str, Any] | None,
    context: int | None = None,
    *,
    special_tokens_in_messages: bool = False,
    is_only_counted: bool = False,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> list[int]:
    """Return the token ids of a chat, up to the beginning of the answer. Raises RequestError (400) for an invalid chat.

    The answer begins a message of its own, unless `add_generation_prompt` is False. With `continue_final_message` it
    continues the last message. `context` and `is_only_counted` limit the length, as in `encode_all`.
    `special_tokens_in_messages` says how the chat template treats text that looks like a special token, as in
    `render_chat`.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    template_messages = [_template_message(index, each, template, names) for index, each in enumerate(messages)]

    def check(prompt: ChatPrompt) -> None:
        _check_length(tokenizer, prompt, "messages", context, is_only_counted=is_only_counted)

    render: Callable[..., ChatPrompt] = partial(render_chat, add_generation_prompt=add_generation_prompt is not False)
    if continue_final_message:
        _check_continuable(messages[-1], add_generation_prompt)
        render = render_continued

    def work() -> list[int]:
        prompt = render(
            tokenizer,
            template,
            template_messages,
            kwargs,
            special_tokens_in_messages=special_tokens_in_messages,
            check_text=lambda text: check(ChatPrompt(text)),
        )
        if prompt.special_tokens is not None:  # control tokens in messages are text, which has more tokens
            check(prompt)
        return prompt.encode(tokenizer)

    # The template may write any of it, such as retrieved documents.
    characters = sum(len(str(value)) for message in template_messages for value in message.values()) + len(str(kwargs))
    ids = work() if characters <= INLINE_CHARS else await _on_thread(work)
    return _require_tokens(ids, "messages")


async def encode_prompts(
    tokenizer: Tokenizer,
    vocab_size: int,
    prompt: str | list[str | int | list[int]],
    param: str = "prompt",
    *,
    context: int | None = None,
    num_kept: int | None = None,
    most: int = MAX_PROMPTS,
) -> list[list[int]]:
    """Return one list of token ids per prompt. Raises RequestError (400) that names the field `param`.

    `prompt` is one text, several texts, one list of token ids, or several lists, at most `most`. `context` is the
    model's context in tokens. None accepts a prompt of any length. `num_kept` is as in `encode_all`.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise RequestError(f"{param} is empty", param=param)
    if len(prompt) > most and not isinstance(prompt[0], int):
        raise RequestError(f"{param} holds {len(prompt)} prompts; the limit is {most}", param=param)
    part_types = {type(prompt_part) for prompt_part in prompt}
    if len(part_types) > 1:
        raise RequestError(f"{param} mixes texts, token ids or lists; give one kind", param=param)
    part_type = part_types.pop()
    if part_type is str:
        texts = [prompt_part for prompt_part in prompt if isinstance(prompt_part, str)]
        encoded = await encode_all(tokenizer, texts, param, add_special_tokens=True, context=context, num_kept=num_kept)
        return [_require_tokens(ids, param) for ids in encoded]
    token_lists = [prompt] if part_type is int else prompt
    return [_checked_ids(ids, vocab_size, param) for ids in token_lists if isinstance(ids, list)]


async def prompt_texts(tokenizer: Tokenizer, request: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    """Return the text of each prompt for `echo`. A prompt of token ids is decoded.

    The last token may end within a character. The bytes of this character then belong to the answer.
    """
    prompt_list = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = [text for text in prompt_list if isinstance(text, str)]
    if texts:
        return texts
    skip = request.skip_special_tokens is not False

    def work() -> list[str]:
        return [text_to_continue(tokenizer, ids, skip_special_tokens=skip) for ids in prompts]

    return work() if sum(map(len, prompts)) <= INLINE_CHARS else await _on_thread(work)


async def encode_all(
    tokenizer: Tokenizer,
    texts: list[str],
    param: str,
    *,
    add_special_tokens: bool,
    context: int | None = None,
    num_kept: int | None = None,
    is_only_counted: bool = False,
) -> list[list[int]]:
    """Tokenize `texts`. Much text is tokenized on a thread, so that the event loop continues to serve.

    Raises RequestError (400) for a text that has many more tokens than the context, before the whole text is tokenized.
    The ids of a text that is only slightly too long are returned.

    Args:
        tokenizer: the tokenizer.
        texts: the texts.
        param: name of the request's field, for errors.
        add_special_tokens: whether the tokenizer adds its special tokens.
        context: the model's context in tokens. None accepts a text of any length.
        num_kept: the number of tokens to which the caller cuts each text. The middle of a far longer text is left out.
        is_only_counted: whether no answer follows. MAX_COUNTED_TOKENS are accepted then, even if the context is
            shorter.
    """

    def encode(text: str) -> list[int]:
        _check_length(tokenizer, ChatPrompt(text), param, context, is_only_counted=is_only_counted)
        kept = without_middle(tokenizer, text, num_kept)
        return tokenizer.encode(kept, add_special_tokens=add_special_tokens)

    return await encode_each(encode, texts, sum(map(len, texts)))


async def encode_each(encode: Callable[[_Item], _Result], items: Sequence[_Item], num_chars: int) -> list[_Result]:
    """Tokenize each item, on a thread if the items have many characters.

    If the caller is cancelled, the thread ends after the item that it has begun.
    """
    if num_chars <= INLINE_CHARS:
        return [encode(item) for item in items]
    is_left = Event()
    try:
        return await _on_thread(lambda: [encode(item) for item in takewhile(lambda _: not is_left.is_set(), items)])
    finally:
        is_left.set()


def without_middle(tokenizer: Tokenizer, text: str, num_kept: int | None) -> str:
    """Return a text that has the first `num_kept` tokens of `text` and its last token. None keeps the whole text.

    Of a far longer text, a beginning with more than _TOO_LONG times as many tokens is kept, and the last characters.
    The tokenizer decides on a token by the text around it, so that the missing middle changes no token that is used.
    """
    if num_kept is None:
        return text
    size = _LONG_BYTES * num_kept
    while size + _END_CHARS < len(text):
        if len(tokenizer.encode(text[:size], add_special_tokens=False)) > _TOO_LONG * num_kept:
            return text[:size] + text[-_END_CHARS:]
        size *= 4
    return text


def _check_length(
    tokenizer: Tokenizer, prompt: ChatPrompt, param: str, context: int | None, *, is_only_counted: bool
) -> None:
    """Raise RequestError (400) if a prompt is far too long. Only as much of the prompt as this takes is tokenized."""
    if context is None:
        return
    unchecked, limit = _LONG_BYTES * context, _TOO_LONG * context
    if is_only_counted:
        unchecked = limit = max(MAX_COUNTED_TOKENS, limit)
    if len(prompt.text.encode(errors="replace")) <= unchecked:
        return
    characters = tokens = 0
    for piece in prompt.pieces(_PIECE_CHARS):
        characters += len(piece.text)
        tokens += len(piece.encode(tokenizer))
        if tokens > limit:
            break
    else:
        return
    found = f"the first {characters} of this prompt's {len(prompt.text)} characters are {tokens} tokens already"
    if is_only_counted:
        raise RequestError(
            f"at most {limit} tokens are counted for one request; {found}; send it in parts", param=param
        )
    raise RequestError(
        f"this model's maximum context length is {context} tokens, so a prompt may have at most {context - 1}; {found}",
        param=param,
        code="context_length_exceeded",
    )


async def _on_thread(work: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, copy_context().run, work)


async def decode(tokenizer: Tokenizer, ids: list[int], vocab_size: int) -> str:
    """Return the text of the token `ids`, including special tokens.

    Raises RequestError (400) if an id is not in the vocabulary.
    """
    _check_ids(ids, vocab_size, "tokens")
    if len(ids) <= INLINE_CHARS:
        return tokenizer.decode(ids, skip_special_tokens=False)
    return await _on_thread(lambda: tokenizer.decode(ids, skip_special_tokens=False))


def _check_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Raise RequestError (400) if an id is not in the vocabulary."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {vocab_size} ids", param=param)


def _checked_ids(ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    _check_ids(ids, vocab_size, param)
    return _require_tokens(list(ids), param)


def _require_tokens(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise RequestError(f"{param} has no tokens; a model needs at least one", param=param)
    return ids


def _check_continuable(message: ChatMessage, add_generation_prompt: bool | None) -> None:
    """Raise RequestError (400) if an answer cannot continue the last message of a chat."""
    fault = None
    if add_generation_prompt:
        fault = "add_generation_prompt begins another message; give one of both"
    elif message.role != "assistant" or message.tool_calls:
        calls = " with tool_calls" if message.tool_calls else ""
        fault = f"the last message must be a text of the assistant; it is one of the role {message.role}{calls}"
    if fault is not None:
        raise RequestError(f"continue_final_message: {fault}", param="continue_final_message")


def _template_message(
    index: int, message: ChatMessage, template: ChatTemplate | MissingTemplate, names: dict[str, str]
) -> dict[str, Any]:
    """Return a message in the form that templates expect: the role "developer" becomes "system", its older name.

    The result of a call gets the function's name from `names`, by the id of the call, since some templates write it.
    Raises RequestError (400) if the message lacks what its role needs.
    """
    content, where = message.content, f"messages[{index}]"
    if content is None and not message.tool_calls:
        raise RequestError(f"{where}.content: only an assistant's message with tool_calls may have none",
                           param=f"{where}.content")  # fmt: skip
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where}.tool_calls: only an assistant's message has calls", param=f"{where}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(
            f"{where}.tool_call_id: a message of the role tool needs the id of the call that it answers",
            param=f"{where}.tool_call_id",
        )
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        found["tool_calls"] = template_calls(message.tool_calls, f"{where}.tool_calls", template)
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
        found |= {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
    return found
