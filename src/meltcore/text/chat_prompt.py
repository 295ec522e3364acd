"""Renders chats and encodes them: control tokens of the chat template are tokens, the messages are plain text.

A template may trim a message, split it, repeat it, or test its beginning, which cannot be traced. So the chat is
rendered a second time. In the second rendering, stand-ins replace the characters that begin or end control tokens, in
the messages and in the request's variables such as `documents`. The control tokens of the second prompt are therefore
the template's own. If the first prompt has the same control tokens, it is encoded as it is. Otherwise the second prompt
is encoded, in which stand-ins mark the text. Strings with which the template itself compares, such as "</think>", are
not replaced, so that the template treats both renderings alike.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

from meltcore.common.errors import RequestError
from meltcore.text.chat_template import ChatTemplate, Message, MissingTemplate
from meltcore.text.control_tokens import ControlTokens, Match
from meltcore.text.tokenizer import Tokenizer

# Characters that no one has given a meaning, the rarest first.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
_MIN_KEPT_CHARS = 3


class ChatPrompt(NamedTuple):
    """The text of a rendered chat.

    Args:
        text: The text that the model reads, including special tokens.
        special_tokens: The control tokens of the template in the text. None means all control tokens that the tokenizer
            finds.
        controls: All control tokens of the tokenizer and the template.
    """

    text: str
    special_tokens: list[Match] | None = None
    controls: ControlTokens | None = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids."""
        if self.special_tokens is None or self.controls is None:
            return tokenizer.encode(self.text, add_special_tokens=False)
        return self.controls.encode(self.text, self.special_tokens)

    def up_to(self, end: int) -> ChatPrompt:
        """Return the first `end` characters of the prompt."""
        inside = None if self.special_tokens is None else [each for each in self.special_tokens if each.end <= end]
        return self._replace(text=self.text[:end], special_tokens=inside)

    def pieces(self, characters: int) -> Iterator[ChatPrompt]:
        """Yield the prompt in pieces of `characters` characters, or a few more if a control token would be cut."""
        matches = deque(self.special_tokens or ())
        start = 0
        while start < len(self.text):
            end, inside = start + characters, []
            while matches and matches[0].start < end:
                match = matches.popleft()
                inside.append(Match(match.token, match.start - start, match.end - start))
                end = max(end, match.end)
            special_tokens = None if self.special_tokens is None else inside
            yield ChatPrompt(self.text[start:end], special_tokens, self.controls)
            start = end


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | MissingTemplate,
    messages: list[Message],
    kwargs: dict[str, Any] | None = None,
    *,
    special_tokens_in_messages: bool = False,
    check_text: Callable[[str], None] | None = None,
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """Return the prompt of a chat, up to the position at which the answer begins.

    Without `add_generation_prompt` it ends after the last message. With `special_tokens_in_messages`, control tokens in
    the text of messages are tokens too. `check_text` is called with the prompt's text before stand-ins are made,
    because that takes long for a long text.

    Raises RequestError (400) if the template rejects the messages.
    """
    render = partial(template.render, add_generation_prompt=add_generation_prompt)
    text = render(messages, kwargs)
    if check_text is not None:
        check_text(text)
    if special_tokens_in_messages:
        return ChatPrompt(text)
    assert isinstance(template, ChatTemplate)  # the other one renders nothing
    controls = tokenizer.control_tokens.for_template(template.written, template.sought)
    edges = controls.first_characters | controls.last_characters
    strings = list(_message_strings([messages, kwargs or {}]))
    if not any(edge in string for string in strings for edge in edges):
        return ChatPrompt(text)
    stand_ins = _stand_ins(edges, [*strings, text, *controls.texts])
    kept = _kept_strings(template.constants, controls)
    pattern = re.compile("|".join(map(re.escape, (*kept, *stand_ins))))
    shadow = render(*(_replace_characters(each, stand_ins, pattern) for each in (messages, kwargs)))
    own, found = controls.find(shadow), controls.find(text)
    as_text = shadow.translate({ord(stand_in): char for char, stand_in in stand_ins.items()})
    if as_text == text:
        is_same = own == found
    else:  # the template has seen a difference, which matters only where a message has a control token
        has_same_tokens = [match.token for match in own] == [match.token for match in found]
        is_same = has_same_tokens and not any(map(controls.occur_in, strings))
    return ChatPrompt(text) if is_same else ChatPrompt(as_text, own, controls)


def render_continued(
    tokenizer: Tokenizer,
    template: ChatTemplate | MissingTemplate,
    messages: list[Message],
    kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> ChatPrompt:
    """Return the prompt of a chat, up to the end of the text of its last message.

    A character that is nowhere else marks this end, since the text may occur in the template. `settings` are the
    further parameters of `render_chat`. Raises RequestError (400), also if the template leaves the last message out.
    """
    [mark] = _stand_ins({""}, list(_message_strings([messages, kwargs or {}]))).values()
    last = {**messages[-1], "content": messages[-1]["content"] + mark}
    prompt = render_chat(tokenizer, template, [*messages[:-1], last], kwargs, add_generation_prompt=False, **settings)
    end = prompt.text.rfind(mark)
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template of this model does not write the last message",
            param="continue_final_message",
        )
    return prompt.up_to(end)


def _message_strings(value: Any) -> Iterator[str]:
    """Yield all texts in messages or variables of a template, apart from names of fields.

    A field name that is no identifier is yielded too, since no template can expect it and so may write it out.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not str(key).isidentifier():
                yield str(key)
            yield from _message_strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _message_strings(each)


def _stand_ins(characters: Collection[str], strings: list[str]) -> dict[str, str]:
    """Return a private-use character for each character. The stand-ins occur in none of `strings`.

    Raises RequestError (400) if too few private-use characters are left.
    """
    used = set(chain(*strings))
    unused = (char for char in map(chr, chain(*_PRIVATE_USE)) if char not in used)
    chosen = list(islice(unused, len(characters)))
    if len(chosen) < len(characters):
        raise RequestError(
            f"the messages must leave {len(characters)} of Unicode's {sum(map(len, _PRIVATE_USE)):,} private-use "
            f"characters unused, to tell their text from control tokens; they leave {len(chosen)}",
            param="messages",
        )
    return dict(zip(sorted(characters), chosen, strict=True))


def _replace_characters(value: Any, stand_ins: dict[str, str], pattern: re.Pattern[str]) -> Any:
    """Return messages or variables in which stand-ins replace characters.

    `pattern` matches the strings to keep first, then the characters to replace.
    """
    if isinstance(value, str):
        return pattern.sub(lambda found: stand_ins.get(found[0], found[0]), value)
    if isinstance(value, Mapping):
        return {
            _replace_characters(key, stand_ins, pattern) if not str(key).isidentifier() else key: _replace_characters(
                each, stand_ins, pattern
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_characters(each, stand_ins, pattern) for each in value]
    return value


@lru_cache(maxsize=8)
def _kept_strings(constants: frozenset[str], controls: ControlTokens) -> tuple[str, ...]:
    """Return the strings of a template that no control token overlaps, the longest first."""
    strings = (string for string in constants if len(string) >= _MIN_KEPT_CHARS)
    return tuple(sorted((string for string in strings if not controls.overlaps(string)), key=len, reverse=True))
