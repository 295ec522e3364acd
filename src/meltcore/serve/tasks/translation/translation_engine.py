"""The backend of a translation model whose engines run on this machine, as one API server process sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meltcore.protocol.engines import FromEngine
from meltcore.protocol.shell import ProfileDone
from meltcore.protocol.translation import TranslationOutputs, TranslationReady
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.protocol import TranslateRequest
from meltcore.serve.requests.request_queue import EQUAL_SHARES
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.task_backends import TranslatedTexts
from meltcore.settings.config import ModelConfig

if TYPE_CHECKING:
    from meltcore.serve.tasks.translation.translations import Translations, TranslationText


class TranslationEngine(EngineBackend):
    """Holds the open translations of a model, once it is loaded."""

    purpose = "translates, with POST /v1/translate; it generates no text"
    paths: Sequence[str] = ("/v1/translate",)
    chats = False
    tickets: Translations | None = None

    def __init__(
        self,
        config: ModelConfig,
        server: ServerStats,
        stats: ModelStats,
        *,
        request_timeout_s: float,
        class_shares: Sequence[int] = EQUAL_SHARES,
    ) -> None:
        super().__init__(config, server, stats)
        self._limit_s = request_timeout_s
        self._class_shares = class_shares

    def open(self, text: TranslationText, engine: TranslationReady, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        from meltcore.serve.tasks.translation.translations import Translations  # needs meltcore[translate]

        self._created = created
        self.tickets = Translations(
            *(self.config, text, engine, self.stats, self._send, self._live_replicas),
            request_timeout_s=self._limit_s,
            class_shares=self._class_shares,
        )

    def on_message(self, replica: int, message: FromEngine) -> None:
        """Handle a message of a replica's engine to this process."""
        if isinstance(message, TranslationOutputs) and self.tickets is not None:
            self._server_stats.record_cpu_time()
            self.tickets.on_step(message, replica)
        elif isinstance(message, ProfileDone):
            self._on_profile_done(replica, message)

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""
        self._when_ready(self.tickets)

    @property
    def translates(self) -> bool:
        """Whether the model is loaded."""
        return self.tickets is not None

    def has_pair(self, request: TranslateRequest) -> bool:
        """Return whether the model is loaded and translates between the request's languages."""
        return self.tickets is not None and self.tickets.has_pair(request)

    async def translate(self, request: TranslateRequest, request_id: str, arrived_s: float) -> TranslatedTexts:
        """Return the translation of each text. Cancelling it ends the work.

        Raises RequestError (400, 429, 500, 503, 504).
        """
        return await self._when_ready(self.tickets).translate(request, request_id, arrived_s)

    def model_card(self, name: str) -> dict[str, Any]:
        """Return OpenAI's model card with the facts that a measurement must record."""
        translations = self._when_ready(self.tickets)
        engine, (sources, targets) = translations.engine, translations.text.languages
        facts: dict[str, Any] = {
            "task": engine.task,
            "direction": translations.text.direction,
            "source_languages": sources,
            "target_languages": targets,
            "num_beams": engine.num_beams,
            "tokenizer": engine.tokens,
            "output_lengths": engine.output_lengths,
        }
        return self._card(name, engine, facts)
