"""The form of a request for translations, and what answers it."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

MAX_SENTENCES = 1024


class TranslateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/translate. Languages: FLORES codes, English names or ISO 639 codes."""

    sentences: list[str]
    src_lang: str
    tgt_lang: str
    model: str | None = None


class TranslatedTexts(NamedTuple):
    """The translation of each text of a request, and the tokens of its sentences: those read, and those written.

    The tokens include what a model adds to a sentence: its language tags and the end token.
    """

    texts: list[str]
    prompt_tokens: int = 0
    completion_tokens: int = 0


@runtime_checkable
class TranslationBackend(Protocol):
    """A backend whose model may translate."""

    names: tuple[str, ...]

    @property
    def translates(self) -> bool:
        """Whether the model is loaded and translates."""

    def has_pair(self, request: TranslateRequest) -> bool:
        """Return whether it translates between the request's languages."""

    async def translate(self, request: TranslateRequest, request_id: str, arrived_s: float) -> TranslatedTexts:
        """Return the translation of each text. Cancelling it ends the work.

        Raises RequestError (400, 429, 500, 503).
        """
