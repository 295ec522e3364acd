"""The backend of a translation model whose engines Meltcore runs, as one API server process uses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meltcore.common.errors import RequestError
from meltcore.protocol.translation import Translate, TranslationReady
from meltcore.serve.engines.batch_backend import BatchBackend, BatchPart, BatchTicket
from meltcore.serve.requests.admission import CHARS
from meltcore.serve.tasks.generation.text_model import find_checkpoint
from meltcore.serve.tasks.translation.forms import TranslatedTexts, TranslateRequest

if TYPE_CHECKING:
    from meltcore.serve.tasks.translation.translations import TranslationText
    from meltcore.text.languages import Language
    from meltcore.text.translation.document import Document

# Of a request, of all texts together: about a second of one core for their preparation.
MAX_REQUEST_CHARS = 262_144
# Prepared by one call of the thread: 50 ms. Then other requests have their turn, and a client may have left.
_BATCH_CHARS = 8_192


class TranslationEngine(BatchBackend):
    """Splits texts into sentences, sends these to the replicas, and joins the translations."""

    purpose = "translates, with POST /v1/translate; it generates no text"
    unit = CHARS

    def load(self) -> TranslationText:
        """Return the tokenizer. Raises ConfigError if its files are missing or invalid."""
        from meltcore.serve.tasks.translation.translations import load_translation_text  # needs meltcore[translate]

        return load_translation_text(self.config, find_checkpoint(self.config))

    def open(self, text: TranslationText, engine: TranslationReady, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        self.slots = engine.slots
        self._preparing = asyncio.Lock()  # held by the request whose texts are prepared
        super().open(text, engine, created)

    @property
    def translates(self) -> bool:
        """Whether the model is loaded."""
        return self.tickets is not None

    def has_pair(self, request: TranslateRequest) -> bool:
        """Return whether the model is loaded and translates the request's source language into its target language."""
        try:
            return self.translates and bool(self._text.pair(request, self.names[0]))
        except RequestError:
            return False

    async def translate(self, request: TranslateRequest) -> TranslatedTexts:
        """Return one translation per text, in order. Cancelling the call ends the work in the engines.

        Raises RequestError (400, 429, 500, 503).
        """
        arrived_s, ready = time.monotonic(), self._loaded()
        source, target = self._text.pair(request, self.names[0])
        num_chars = sum(map(len, request.sentences))
        if num_chars > MAX_REQUEST_CHARS:
            raise RequestError(
                f"sentences have {num_chars:,} characters; the limit is {MAX_REQUEST_CHARS:,}: send several requests",
                param="sentences",
            )
        self._live_replicas()  # before any work
        documents = await self._documents(request.sentences, source, target)
        sentences = [sentence for document in documents for sentence in document.sentences]
        self._live_replicas()
        ticket = BatchTicket(arrived_s)
        for sentence in sentences:
            num_tokens, message = len(sentence.token_ids), partial(Translate, token_ids=sentence.token_ids)
            BatchPart(ticket, message, num_tokens + ready.max_new_tokens, num_tokens)
        assert self.tickets is not None
        results = await self.tickets.results(ticket, self.config.priority, units=num_chars, cost=num_chars)
        outputs = [list(result.token_ids) for result in results]
        texts = await asyncio.to_thread(self._text.finish, documents, outputs, target)
        num_source_tokens = sum(len(sentence.token_ids) for sentence in sentences)
        num_output_tokens = sum(map(len, outputs))
        ticket.exchange.charge(num_source_tokens + num_output_tokens)
        return TranslatedTexts(texts, num_source_tokens, num_output_tokens)

    async def _documents(self, texts: Sequence[str], source: Language, target: Language) -> list[Document]:
        """Split texts into tokenized sentences on a thread. Return one document per text, in order.

        Only one thread runs at a time, because each additional thread takes a share of the event loop's time. Raises
        RequestError (400) for a text that cannot be translated.
        """
        limit, normalizer = self._ready.max_source, self.config.normalizer
        documents: list[Document] = []
        while len(documents) < len(texts):
            end, num_chars = len(documents), 0
            while end < len(texts) and (num_chars == 0 or num_chars + len(texts[end]) <= _BATCH_CHARS):
                num_chars += len(texts[end])
                end += 1
            batch = texts[len(documents) : end]
            async with self._preparing:
                work = asyncio.create_task(
                    asyncio.to_thread(self._text.prepare, batch, source, target, limit, normalizer)
                )
                work.add_done_callback(lambda done: done.cancelled() or done.exception())  # of one that has left
                try:
                    documents += await asyncio.shield(work)
                finally:  # a thread cannot be cancelled: the next turn is after its end
                    if not work.done():
                        await asyncio.wait({work})
        return documents

    def facts(self, ready: TranslationReady) -> dict[str, Any]:
        """Return the fields for the model card that a measurement records."""
        sources, targets = self._text.languages
        return {
            "direction": self._text.direction,
            "source_languages": sources,
            "target_languages": targets,
            "num_beams": ready.num_beams,
            "tokenizer": ready.tokens,
            "output_lengths": ready.output_lengths,
        }
