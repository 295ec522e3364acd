"""Defines the form of a request for translations, and the interface of the backends that answer it."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

MAX_SENTENCES = 1024


class TranslateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/translate. Languages are FLORES codes, English names or ISO 639 codes."""

    sentences: list[str]
    src_lang: str
    tgt_lang: str
    model: str | None = None


class TranslatedTexts(NamedTuple):
    """One translation per text of a request, and the numbers of input and output tokens of all sentences.

    The numbers include the tokens that a model adds to a sentence: language tags and the end token.
    """

    texts: list[str]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@runtime_checkable
class TranslationBackend(Protocol):
    """The interface of a backend whose model can translate. The backend may be used if `translates` is true."""

    names: tuple[str, ...]

    @property
    def translates(self) -> bool:
        """Whether the model is loaded and is a translation model."""

    def has_pair(self, request: TranslateRequest) -> bool:
        """Return whether the model translates from the source language of the request to its target language."""

    async def translate(self, request: TranslateRequest) -> TranslatedTexts:
        """Return one translation per text, in order. Cancelling the call ends the work.

        Raises RequestError (400, 429, 500, 503).
        """
