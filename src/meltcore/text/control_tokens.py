"""Finds control tokens in text, and encodes a text in which only some of them are tokens.

A tokenizer turns the text of a control token into the token wherever it occurs. In a prompt, only the control tokens
that the chat template has written may be tokens; the same characters in a message are text.

Control tokens are the special tokens of a vocabulary, and other added tokens that steer a chat. DeepSeek-R1's distilled
models, among others, publish the tokens of their turns as text (`"special": false`). Such a token is recognized by its
text, or because the chat template writes it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, models

from meltcore.models.configs.turn_tokens import TURN_TOKENS

_UNMATCHED_TOKEN = "\0"  # the scanner's token for all text between added tokens
# Templates also write added tokens that are whitespace, words or quotes, which are common in messages.
_BRACKETS = frozenset("<>[]{}()|｜")
_MIN_BRACKETED_CHARS = 3
_PIECE_CHARS = 16_384


class Match(NamedTuple):
    """A control token in a text: its content, and the characters that it covers."""

    token: str
    start: int
    end: int


class ControlTokens:
    """The special tokens of a vocabulary, its turn tokens, and the added tokens `written` by a chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, written: frozenset[str] = frozenset()) -> None:
        self._backend = backend
        self._of_templates: dict[tuple[frozenset[str], frozenset[str]], ControlTokens] = {}
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        special_texts = TURN_TOKENS | written
        self._ids = {token.content: i for i, token in added.items() if token.special or token.content in special_texts}
        self._added = [self._to_special(token) for _, token in sorted(added.items())]
        # A vocabulary of one word: it finds added tokens as the tokenizer does, and takes all else as a whole.
        self._scanner = tokenizers.Tokenizer(models.WordLevel({_UNMATCHED_TOKEN: 0}, unk_token=_UNMATCHED_TOKEN))
        self._scanner.add_tokens(self._added)
        self.texts = frozenset(self._ids)
        self.first_characters = frozenset(text[0] for text in self.texts)
        self.last_characters = frozenset(text[-1] for text in self.texts)

    def for_template(self, written: frozenset[str], sought: frozenset[str]) -> ControlTokens:
        """Return these tokens together with the added tokens in brackets that a chat template writes.

        Args:
            written: The strings that the template may write.
            sought: The strings that the template searches for in messages. A token in such a string is not added, since
                messages may contain it: `</think>` ends the reasoning of an earlier answer.
        """
        key = written, sought
        found = self._of_templates.get(key)
        if found is None:
            texts = (token.content for token in self._added if not token.special and _is_in_brackets(token.content))
            more = frozenset(
                text
                for text in texts
                if any(text in each for each in written) and not any(text in each for each in sought)
            )
            found = self._of_templates[key] = ControlTokens(self._backend, more) if more else self
        return found

    def _to_special(self, token: AddedToken) -> AddedToken:
        """Return an added token, marked as special if it is a control token.

        The text encoder reads special tokens as text.
        """
        if token.special or token.content not in self._ids:
            return token
        sides = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
        return AddedToken(token.content, normalized=token.normalized, special=True, **sides)

    def find(self, text: str) -> list[Match]:
        """Return the control tokens that encoding `text` as a whole would find."""
        if not self._ids:
            return []
        # `encode` would hold the GIL throughout. `encode_batch_fast` gives no offsets of characters.
        [found] = self._scanner.encode_batch([text], add_special_tokens=False)
        # By id: where a token takes the whitespace beside it, its text in an encoding has the whitespace too.
        tokens = map(self._scanner.id_to_token, found.ids)
        return [
            Match(token, *offsets)
            for token, offsets in zip(tokens, found.offsets, strict=True)
            if token is not None and token in self._ids
        ]

    def occur_in(self, text: str) -> bool:
        """Return whether encoding `text` as a whole would find a control token.

        The text is searched piece by piece, since each token that is found takes a kilobyte of memory.
        """
        overlap = max(map(len, self.texts), default=1)
        return any(self.find(text[at : at + _PIECE_CHARS + overlap]) for at in range(0, len(text), _PIECE_CHARS))

    def overlaps(self, string: str) -> bool:
        """Return whether a string contains a control token, or begins or ends in the middle of a control token."""
        starts, ends = self._ends_and_beginnings
        lengths = range(1, len(string) + 1)
        is_part = any(string[-length:] in starts or string[:length] in ends for length in lengths)
        return is_part or bool(self.find(string))

    @cached_property
    def _ends_and_beginnings(self) -> tuple[set[str], set[str]]:
        """The proper prefixes and the proper suffixes of control tokens."""
        cuts = [(text, length) for text in self.texts for length in range(1, len(text))]
        return {text[:length] for text, length in cuts}, {text[length:] for text, length in cuts}

    def encode(self, text: str, matches: Sequence[Match]) -> list[int]:
        """Return the token ids of `text`. Only the characters of `matches`, in order, become control tokens."""
        backend, marks = self._text_encoder
        parts, end = [], 0
        for match in matches:
            parts += [text[end : match.start], marks[match.token]]
            end = match.end
        encoded = backend.encode_batch_fast(["".join([*parts, text[end:]])], add_special_tokens=False)[0].ids
        ids: list[int] = []
        for token_id in encoded:
            ids += self._replacements.get(token_id, (token_id,))
        return ids

    @cached_property
    def _text_encoder(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """A tokenizer that reads control tokens as text, and the mark that stands for each control token in its input.

        The tokenizer shares the vocabulary. Marks are not known outside, so no message can contain one.
        """
        backend = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self._backend.pre_tokenizer
        backend.add_tokens(self._added)
        if backend.get_added_tokens_decoder().keys() != self._backend.get_added_tokens_decoder().keys():
            state = json.loads(self._backend.to_str())  # ids with gaps, which only a copy keeps
            for token in state["added_tokens"]:
                token["special"] = token["special"] or token["content"] in self._ids
            backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        backend.encode_special_tokens = True
        secret = secrets.token_hex(8)
        marks = {text: f"\U0010fffd{secret}:{token_id}:" for text, token_id in self._ids.items()}
        backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks.values()])
        return backend, marks

    @cached_property
    def _replacements(self) -> dict[int, list[int]]:
        """The ids that replace an id of the text encoder, which is the id of a mark or of a control token's text.

        A vocabulary may contain the text of a control token as a word. The characters of this word are encoded one by
        one.
        """
        backend, marks = self._text_encoder
        replacements: dict[int, list[int]] = {
            mark_id: [self._ids[text]]
            for text, mark in marks.items()
            if (mark_id := backend.token_to_id(mark)) is not None
        }
        for text, token_id in self._ids.items():
            if len(text) > 1 and backend.encode(text, add_special_tokens=False).ids == [token_id]:
                encodings = backend.encode_batch_fast(list(text), add_special_tokens=False)
                replacements[token_id] = [each for encoding in encodings for each in encoding.ids]
        return replacements


def _is_in_brackets(text: str) -> bool:
    return len(text) >= _MIN_BRACKETED_CHARS and text[0] in _BRACKETS and text[-1] in _BRACKETS
