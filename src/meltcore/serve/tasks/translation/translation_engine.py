"""The backend of a translation model whose engines run on this machine, as one API server process sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meltcore.protocol.translation import TranslationReady
from meltcore.serve.engines.batch_backend import BatchBackend
from meltcore.serve.requests.admission import CHARS
from meltcore.serve.tasks.generation.text_model import find_checkpoint
from meltcore.serve.tasks.translation.forms import TranslatedTexts, TranslateRequest

if TYPE_CHECKING:
    from meltcore.serve.tasks.translation.translations import Translations, TranslationText


class TranslationEngine(BatchBackend):
    """Holds the open translations of a model, once it is loaded."""

    purpose = "translates, with POST /v1/translate; it generates no text"
    unit = CHARS
    tickets: Translations | None = None

    def load(self) -> TranslationText:
        """Return the tokenizer. Raises ConfigError."""
        from meltcore.serve.tasks.translation.translations import load_translation_text  # needs meltcore[translate]

        return load_translation_text(self.config, find_checkpoint(self.config))

    def open(self, text: TranslationText, engine: TranslationReady, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        from meltcore.serve.tasks.translation.translations import Translations  # needs meltcore[translate]

        self._ready, self._created = engine, created
        self.tickets = Translations(
            self._new_queue(engine.slots),
            *(self.config, text, engine, self.stats, self._send, self._live_replicas),
            request_timeout_s=self._limit_s,
        )

    def _loaded(self) -> Translations:
        return self._when_ready(self.tickets)

    @property
    def translates(self) -> bool:
        """Whether the model is loaded."""
        return self.tickets is not None

    def has_pair(self, request: TranslateRequest) -> bool:
        """Return whether the model is loaded and translates between the request's languages."""
        return self.tickets is not None and self.tickets.has_pair(request)

    async def translate(self, request: TranslateRequest, request_id: str, arrived_s: float) -> TranslatedTexts:
        """Return the translation of each text. Cancelling the call ends the work.

        Raises RequestError (400, 429, 500, 503).
        """
        return await self._loaded().translate(request, request_id, arrived_s)

    def facts(self, ready: TranslationReady) -> dict[str, Any]:
        """Return the facts that a measurement must record."""
        text = self._loaded().text
        sources, targets = text.languages
        return {
            "direction": text.direction,
            "source_languages": sources,
            "target_languages": targets,
            "num_beams": ready.num_beams,
            "tokenizer": ready.tokens,
            "output_lengths": ready.output_lengths,
        }
