"""Token ids to text as they come: never half a character, and no text that may turn out to begin a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from meltcore.engine.sampling_params import SamplingParams
from meltcore.text.stop_strings import StopStrings
from meltcore.text.thinking import ThoughtMarks
from meltcore.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW_TOKENS = 8  # a character takes at most 4 byte tokens; more unfinished ones than this are no character


class _IncrementalDecoder(Protocol):
    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """For byte-level vocabularies: each token is a run of bytes, and UTF-8 decoding is the only state."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def add(self, token_id: int) -> str:
        return self._decode(self._piece(token_id))

    def flush(self) -> str:
        return self._decode(b"", final=True)


class _WindowDecoder:
    """For any other vocabulary: the text of a token depends on its neighbours, so a short window is decoded twice.

    New text is what the window's text gains by the token; it is held while it ends in an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._known: list[int] = []  # already given out; context for what follows
        self._fresh: list[int] = []  # not given out yet

    def add(self, token_id: int) -> str:
        self._fresh.append(token_id)
        text = self._gain()
        if not text or (text.endswith(REPLACEMENT) and len(self._fresh) < WINDOW_TOKENS):
            return ""
        self._known, self._fresh = self._fresh, []
        return text

    def flush(self) -> str:
        text = self._gain()
        self._fresh = []
        return text

    def _gain(self) -> str:
        before = self._tokenizer.decode(self._known, skip_special_tokens=self._skip)
        both = self._tokenizer.decode(self._known + self._fresh, skip_special_tokens=self._skip)
        return both[len(before) :]


class Detokenizer:
    """The text of one answer, token by token, at a constant cost a token.

    The pieces that `add` and `flush` return, joined, are the text of all ids. After a stop string nothing more comes:
    `token_count` then counts the tokens up to and including the one that completed it.

    With `marks`, text between them is not returned but appended to `thoughts`, and is not searched for stop strings;
    blanks at the beginning of what follows are dropped. `thinking`: the prompt has begun thoughts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        marks: ThoughtMarks | None = None,
        *,
        thinking: bool = False,
    ) -> None:
        self._decoder: _IncrementalDecoder
        if tokenizer.is_byte_level:
            self._decoder = _ByteDecoder(tokenizer)
        else:
            self._decoder = _WindowDecoder(tokenizer, params.skip_special_tokens)
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._marks = marks
        if marks is not None:
            self._hidden |= set(marks)
        self._thinking, self._after_thoughts = thinking, False
        self.thoughts: list[str] = []  # whoever shows them takes them from here
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self.token_count = 0
        self.stopped: str | None = None

    def add(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """New text to show, and the stop string that ended the answer, if one did.

        Text of the first `min_tokens` tokens is not searched for stop strings.
        """
        if self.stopped is not None:
            return "", self.stopped
        shown = ""
        for token_id in token_ids:
            self.token_count += 1
            text = self._hide(token_id) if token_id in self._hidden else self._decoder.add(token_id)
            if self._thinking or self._after_thoughts:
                text = self._apart(text)
            if self._stops is None or self.token_count <= self._min_tokens:
                shown += text
                continue
            released, self.stopped = self._stops.feed(text)
            shown += released
            if self.stopped is not None:
                break
        return shown, self.stopped

    def flush(self) -> str:
        """The text still held back, once the answer has ended for another reason than a stop string."""
        if self.stopped is not None:
            return ""
        text = self._decoder.flush()
        if self._thinking:
            text = self._apart(text)
        if self._stops is None:
            return text
        released, self.stopped = self._stops.feed(text)
        return released if self.stopped is not None else released + self._stops.release()

    def _hide(self, token_id: int) -> str:
        """A token without a text of its own; a mark ends one text and begins another."""
        if self._marks is None or token_id not in self._marks:
            return ""
        text = self._decoder.flush()
        if self._thinking:
            text = self._apart(text)
        self._thinking = token_id == self._marks.begin
        self._after_thoughts = token_id == self._marks.end
        return text

    def _apart(self, text: str) -> str:
        """Of new text, what belongs to the answer."""
        if self._thinking:
            if text:
                self.thoughts.append(text)
            return ""
        text = text.lstrip()
        self._after_thoughts = not text
        return text
