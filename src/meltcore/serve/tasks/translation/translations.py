"""The open translations of a model whose engines run on this machine, as one API server process sees them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from meltcore.common.errors import RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.config_fields import Fields
from meltcore.protocol.engines import ToEngine
from meltcore.protocol.translation import Translate, Translated, TranslationReady
from meltcore.serve.engines.batch_backend import BatchPart, BatchTicket, BatchTickets
from meltcore.serve.requests.request_queue import RequestQueue
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.tasks.translation.forms import TranslatedTexts, TranslateRequest
from meltcore.settings.server_config import ModelConfig
from meltcore.text.languages import LANGUAGES, Language
from meltcore.text.translation.document import Document, finish, prepare
from meltcore.text.translation.languages import find_direction, find_language, needed_direction
from meltcore.text.translation.tokenizer import (
    SentencePieceTokenizer,
    SyntheticTokenizer,
    TranslationTokenizer,
    check_tags,
)

# Of a request, of all texts together: about a second of one core for their preparation.
MAX_REQUEST_CHARS = 262_144
# Prepared by one call of the thread: 50 ms. Then other requests have their turn, and a client may have left.
_TURN_CHARS = 8_192


@dataclass(frozen=True)
class TranslationText:
    """The tokenizer of a translation checkpoint, and the direction that its name states."""

    tokenizer: TranslationTokenizer
    is_synthetic: bool
    direction: str | None

    @property
    def languages(self) -> tuple[list[str], list[str]]:
        """The FLORES codes that texts and translations may have, by vocabulary and direction."""
        codes = [each.code for each in LANGUAGES if each.code in self.tokenizer.tags]
        indic = [code for code in codes if code != "eng_Latn"]
        source, _, target = (self.direction or "").partition("-")
        sides = {"en": ["eng_Latn"], "indic": indic}
        return sides.get(source, codes), sides.get(target, codes)


def load_translation_text(config: ModelConfig, checkpoint: Checkpoint) -> TranslationText:
    """Load the tokenizer. Raises ConfigError if files are missing or broken."""
    sizes = Fields(checkpoint.config).required("encoder_vocab_size", "decoder_vocab_size")
    is_synthetic = config.engine.load_format == "dummy" and not checkpoint.has_sentencepiece
    tokenizer: TranslationTokenizer = (
        SyntheticTokenizer(sizes["encoder_vocab_size"])
        if is_synthetic
        else SentencePieceTokenizer(checkpoint.folder, sizes["encoder_vocab_size"], sizes["decoder_vocab_size"])
    )
    return TranslationText(tokenizer, is_synthetic, find_direction(config.engine.model))


class Translations(BatchTickets):
    """Prepares texts, sends their sentences to the replicas, and joins the translations."""

    def __init__(
        self,
        queue: RequestQueue,
        config: ModelConfig,
        text: TranslationText,
        engine: TranslationReady,
        stats: ModelStats,
        send: Callable[[ToEngine, int], None],
        live_replicas: Callable[[], list[int]],
        *,
        request_timeout_s: float,
    ) -> None:
        """Serve a loaded model.

        `send(message, replica)` sends a message to an engine. `live_replicas()` raises RequestError if no replica
        lives.
        """
        super().__init__(stats, send, queue, request_timeout_s)
        self.text, self.engine = text, engine
        self._names = config.names
        self._normalizer = config.normalizer
        self._live_replicas = live_replicas
        self._priority_class = config.priority_class
        self._preparing = asyncio.Lock()  # held by the request whose texts are prepared

    def has_pair(self, request: TranslateRequest) -> bool:
        """Return whether the checkpoint translates between the request's languages."""
        try:
            self._languages(request)
        except RequestError:
            return False
        return True

    async def translate(self, request: TranslateRequest, request_id: str, arrived_s: float) -> TranslatedTexts:
        """Return the translation of each text. Cancelling the call ends the work in the engines.

        Raises RequestError (400, 429, 500, 503).
        """
        source, target = self._languages(request)
        num_chars = sum(map(len, request.sentences))
        if num_chars > MAX_REQUEST_CHARS:
            raise RequestError(
                f"sentences have {num_chars:,} characters; the limit is {MAX_REQUEST_CHARS:,}: send several requests",
                param="sentences",
            )
        self._live_replicas()  # before any work
        documents = await self._documents(request.sentences, source, target)
        tokenizer = self.text.tokenizer
        sentences = [sentence for document in documents for sentence in document.sentences]
        if not sentences:
            return TranslatedTexts([finish(document, [], tokenizer, target) for document in documents])
        self._live_replicas()
        ticket = BatchTicket(arrived_s)
        for sentence in sentences:
            num_tokens, message = len(sentence.token_ids), partial(Translate, token_ids=sentence.token_ids)
            part = BatchPart(ticket, message, num_tokens + self.engine.max_new_tokens, num_tokens)
            part.request_id = f"{request_id}-{part.request_id}"
        results = await self.results(ticket, self._priority_class, units=num_chars, cost=num_chars)
        outputs = [list(result.token_ids) for result in results]
        texts = await asyncio.to_thread(lambda: list(self._texts(documents, outputs, target)))
        num_source_tokens = sum(len(sentence.token_ids) for sentence in sentences)
        num_output_tokens = sum(map(len, outputs))
        ticket.exchange.charge(num_source_tokens + num_output_tokens)
        return TranslatedTexts(texts, num_source_tokens, num_output_tokens)

    async def _documents(self, texts: Sequence[str], source: Language, target: Language) -> list[Document]:
        """Prepare texts in a thread, one request after another. Raises RequestError.

        Only one thread runs at a time, because each additional thread takes a share of the event loop's time.
        """
        tokenizer, limit, normalizer = self.text.tokenizer, self.engine.max_source, self._normalizer

        def prepare_all(turn: Sequence[str]) -> list[Document]:
            return [prepare(text, tokenizer, source, target, limit, normalizer) for text in turn]

        documents: list[Document] = []
        while len(documents) < len(texts):
            end, num_chars = len(documents), 0
            while end < len(texts) and (num_chars == 0 or num_chars + len(texts[end]) <= _TURN_CHARS):
                num_chars += len(texts[end])
                end += 1
            turn = texts[len(documents) : end]
            async with self._preparing:
                work = asyncio.create_task(asyncio.to_thread(prepare_all, turn))
                work.add_done_callback(lambda done: done.cancelled() or done.exception())  # of one that has left
                try:
                    documents += await asyncio.shield(work)
                finally:  # a thread cannot be cancelled: the next turn is after its end
                    if not work.done():
                        await asyncio.wait({work})
        return documents

    def num_output_tokens(self, output: Translated) -> int:
        """Return the tokens of a translation."""
        return len(output.token_ids)

    def _languages(self, request: TranslateRequest) -> tuple[Language, Language]:
        source, target = find_language(request.src_lang, "src_lang"), find_language(request.tgt_lang, "tgt_lang")
        if source == target:
            raise RequestError(f"src_lang and tgt_lang are both {source.code}", param="tgt_lang")
        direction = needed_direction(source, target)
        if self.text.direction not in (direction, None):
            raise RequestError(
                f"{self._names[0]} translates {self.text.direction}; {source.code} to {target.code} is {direction}",
                param="tgt_lang",
            )
        check_tags(self.text.tokenizer.tags, source, target)
        return source, target

    def _texts(self, documents: list[Document], outputs: list[list[int]], target: Language) -> Iterator[str]:
        remaining = iter(outputs)
        for document in documents:
            tokens = list(itertools.islice(remaining, len(document.sentences)))
            yield finish(document, tokens, self.text.tokenizer, target)
