"""Converts token ids to text as they arrive. Incomplete characters and possible stop strings are held back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from meltcore.protocol.sampling_params import SamplingParams
from meltcore.text.answer_format import AnswerFormat
from meltcore.text.answer_parser import AnswerParser
from meltcore.text.call_scanners import ToolSet
from meltcore.text.stop_strings import StopStrings
from meltcore.text.tokenizer import Tokenizer

REPLACEMENT_CHAR = "\ufffd"
MAX_UNFINISHED_BYTES = 3  # of a character of four
MAX_WINDOW_TOKENS = 8  # a character takes at most 4 byte tokens; more unfinished ones than this are no character


class IncrementalDecoder(Protocol):
    """Converts token ids to text one by one. The joined results are the text of all ids."""

    def add(self, token_id: int) -> str:
        """Return the text that this token completes."""

    def flush(self) -> str:
        """Return the remaining text, of tokens whose characters are incomplete."""


class _ByteDecoder:
    """Decodes byte-level vocabularies: each token is a sequence of bytes, and UTF-8 decoding is the only state."""

    def __init__(self, tokenizer: Tokenizer, context: UnfinishedContext) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._decode(context.unfinished)

    def add(self, token_id: int) -> str:
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", final=True)


class _WindowDecoder:
    """Decodes any other vocabulary, in which the text of a token depends on its neighbors.

    A short window of tokens is decoded twice, without and with the new token. The difference is the new text. It is
    held back while it ends in an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: UnfinishedContext) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Their text has been returned. Before an unfinished character none is needed, which is no space to be dropped.
        self._decoded_ids = [] if context.unfinished else self._last_tokens(context.finished_ids)
        self._pending_ids = list(context.unfinished_ids)  # their text has not

    def add(self, token_id: int) -> str:
        self._pending_ids.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT_CHAR) and len(self._pending_ids) < MAX_WINDOW_TOKENS):
            return ""
        self._decoded_ids, self._pending_ids = self._pending_ids, []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._pending_ids = []
        return text

    def _last_tokens(self, context: Sequence[int]) -> list[int]:
        """Return the last tokens of a context that together have text, so that a decoder drops no space after them.

        Bytes that are no character are left out: a decoder judges neighboring byte tokens together, as valid or not.
        """
        for length in range(1, min(len(context), MAX_WINDOW_TOKENS) + 1):
            if self._is_text(context[-length:]):
                return list(context[-length:])
        for token_id in reversed(context):
            if self._is_text([token_id]):
                return [token_id]
        return list(context)

    def _is_text(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens)
        return bool(text) and REPLACEMENT_CHAR not in text

    def _new_text(self) -> str:
        decoded_text = self._tokenizer.decode(self._decoded_ids, skip_special_tokens=self._skip_special_tokens)
        full_text = self._tokenizer.decode(
            self._decoded_ids + self._pending_ids, skip_special_tokens=self._skip_special_tokens
        )
        return full_text[len(decoded_text) :]


class UnfinishedContext(NamedTuple):
    """The tokens that a text continues, divided at a character that they leave unfinished.

    Args:
        finished_ids: The tokens before the first byte of the unfinished character.
        unfinished_ids: The tokens with bytes of the unfinished character: at most three, and hidden tokens among them.
        unfinished: The bytes of the unfinished character, which the next tokens complete. Empty if all characters are
            finished.
    """

    finished_ids: Sequence[int]
    unfinished_ids: Sequence[int]
    unfinished: bytes


def divide_context(tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> UnfinishedContext:
    """Return the end of the context that a text continues. A prompt of token ids may also end within a character."""
    hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
    tail, starts = b"", list[tuple[int, int]]()  # of each visible token: its index, and the length of the tail with it
    for index in range(len(context) - 1, -1, -1):
        if context[index] not in hidden_ids:
            tail = tokenizer.token_bytes(context[index]) + tail
            starts.append((index, len(tail)))
        if len(tail) >= MAX_UNFINISHED_BYTES:
            break
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(tail)
    unfinished = decoder.getstate()[0]
    if not unfinished:
        return UnfinishedContext(context, (), b"")
    start = next(index for index, length in starts if length >= len(unfinished))
    return UnfinishedContext(context[:start], context[start:], unfinished)


def text_to_continue(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> str:
    """Return the text of a prompt without its unfinished character, which begins the text of the answer."""
    context = divide_context(tokenizer, skip_special_tokens, token_ids)
    if not context.unfinished:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    if tokenizer.is_byte_level:  # a token may end one character and begin the next
        text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text.removesuffix(REPLACEMENT_CHAR)
    return tokenizer.decode(list(context.finished_ids), skip_special_tokens=skip_special_tokens)


def incremental_decoder(
    tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int] = ()
) -> IncrementalDecoder:
    """Return the cheapest decoder that is correct for the tokenizer's vocabulary.

    `context` holds the tokens that the text continues. If they leave a character unfinished, the first text completes
    the character. Some vocabularies drop the space at the beginning of a text, but not if the text continues another
    one.
    """
    divided = divide_context(tokenizer, skip_special_tokens, context)
    if tokenizer.is_byte_level:
        return _ByteDecoder(tokenizer, divided)
    return _WindowDecoder(tokenizer, skip_special_tokens, divided)


class Detokenizer:
    """Converts the tokens of one answer to text, at a constant cost per token.

    The joined results of `add` and `flush` are the text of all ids. After a stop string no more text is returned, and
    `token_count` counts the tokens up to and including the token that completed the stop string.

    With an `answer_format`, its parser separates reasoning and calls, which wait in `parser`. They are not searched for
    stop strings. `prompt` decides whether the text starts with reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        answer_format: AnswerFormat | None = None,
        prompt: Sequence[int] = (),
        *,
        tools: ToolSet | None = None,
        continues_prompt: bool = False,
    ) -> None:
        """Create a detokenizer.

        Without `tools` calls are text. With `continues_prompt` the text continues the prompt's text, as in the
        completions API.
        """
        context = prompt if continues_prompt else ()
        self._decoder = incremental_decoder(tokenizer, params.skip_special_tokens, context)
        self._hidden_ids = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self.parser: AnswerParser | None = None
        if answer_format is not None and (answer_format.reasoning_ids is not None or tools is not None):
            self.parser = AnswerParser(answer_format, tools, prompt)
            self._hidden_ids |= self.parser.hidden_ids
        self._stop_strings = (
            StopStrings(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None
        )
        self._min_tokens = params.min_tokens
        self.token_count = 0
        self.reasoning_tokens = 0  # without the tokens around reasoning
        self.matched_stop: str | None = None

    def add(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """Return the new text of the answer, and the stop string that ended the answer or None.

        A stop string that one of the first `min_tokens` tokens completes does not end the answer.
        """
        if self.matched_stop is not None:
            return "", self.matched_stop
        visible_text = ""
        for token_id in token_ids:
            self.token_count += 1
            if token_id in self._hidden_ids:
                text = self._on_hidden_token(token_id)
            else:
                text = self._decoder.add(token_id)
                if self.parser is not None:
                    text = self.parser.feed(text)
                    self.reasoning_tokens += self.parser.is_in_reasoning
            if self._stop_strings is None:
                visible_text += text
                continue
            counts = self.token_count > self._min_tokens
            released_text, self.matched_stop = self._stop_strings.feed(text, counts=counts)
            visible_text += released_text
            if self.matched_stop is not None:
                break
        return visible_text, self.matched_stop

    def is_hidden(self, token_id: int) -> bool:
        """Return whether a token has no text in the answer."""
        return token_id in self._hidden_ids

    def flush(self) -> str:
        """Return the text that is still held back, after the answer has ended without a stop string.

        A call that was cut may be text, but is not searched: the answer went on where it had a stop string.
        """
        if self.matched_stop is not None:
            return ""
        text, cut_call = self._decoder.flush(), ""
        if self.parser is not None:
            text = self.parser.feed(text)
            if self.parser.is_in_call:
                cut_call = self.parser.end()
            else:
                text += self.parser.end()
        if self._stop_strings is None:
            return text + cut_call
        counts = self.token_count > self._min_tokens
        released_text, self.matched_stop = self._stop_strings.feed(text, counts=counts)
        if self.matched_stop is not None:
            return released_text
        return released_text + self._stop_strings.release() + cut_call

    def _on_hidden_token(self, token_id: int) -> str:
        """Return the text that precedes a hidden token. The parser reads the token if it is a mark."""
        if self.parser is None or token_id not in self.parser.hidden_ids:
            return ""
        return self.parser.feed(self._decoder.flush()) + self.parser.mark(token_id)
