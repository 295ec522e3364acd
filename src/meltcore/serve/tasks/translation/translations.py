"""The open translations of a model whose engines run on this machine, as one API server process sees them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meltcore.common.errors import RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.config_fields import Fields
from meltcore.protocol.engines import ToEngine
from meltcore.protocol.translation import Translate, Translated, TranslationReady
from meltcore.serve.requests.request_queue import RequestQueue
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.requests.ticket import Child, OpenTickets, Ticket
from meltcore.serve.tasks.translation.forms import TranslatedTexts, TranslateRequest
from meltcore.settings.server_config import ModelConfig
from meltcore.text.languages import LANGUAGES, Language
from meltcore.text.translation.document import Document, finish, prepare
from meltcore.text.translation.languages import direction_of, find_language, needed_direction
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
_ENDED = {"deadline": (504, "request_timeout"), "error": (500, None), "abort": (500, None)}


@dataclass(frozen=True)
class TranslationText:
    """The tokenizer of a translation checkpoint, and the direction in its name."""

    tokenizer: TranslationTokenizer
    is_synthetic: bool
    direction: str | None

    @property
    def languages(self) -> tuple[list[str], list[str]]:
        """The FLORES codes that texts may have, and translations: those of the vocabulary and the direction."""
        codes = [each.code for each in LANGUAGES if each.code in self.tokenizer.tags]
        indic = [code for code in codes if code != "eng_Latn"]
        source, _, target = (self.direction or "").partition("-")
        sides = {"en": ["eng_Latn"], "indic": indic}
        return sides.get(source, codes), sides.get(target, codes)


def load_translation_text(config: ModelConfig, checkpoint: Checkpoint) -> TranslationText:
    """Load the tokenizer. Raises ConfigError for missing and broken files."""
    sizes = Fields(checkpoint.config).required("encoder_vocab_size", "decoder_vocab_size")
    is_synthetic = config.engine.load_format == "dummy" and not checkpoint.has_sentencepiece
    tokenizer: TranslationTokenizer = (
        SyntheticTokenizer(sizes["encoder_vocab_size"])
        if is_synthetic
        else SentencePieceTokenizer(checkpoint.folder, sizes["encoder_vocab_size"], sizes["decoder_vocab_size"])
    )
    return TranslationText(tokenizer, is_synthetic, direction_of(config.engine.model))


class _Sentence(Child):
    """A sentence of a request."""

    ticket: _Job

    def __init__(self, job: _Job, request_id: str, token_ids: list[int], max_new_tokens: int) -> None:
        super().__init__(job, len(token_ids) + max_new_tokens, len(token_ids))
        self.request_id = f"{request_id}-{self.request_id}"
        self.token_ids = token_ids
        self.output: list[int] = []

    def messages(self) -> Sequence[Translate]:
        """Return the sentence."""
        job = self.ticket
        return [
            Translate(
                request_id=self.request_id, token_ids=self.token_ids, priority=job.priority, arrived_s=job.arrived_s
            )
        ]

    def open_ids(self) -> Sequence[str]:
        """Return its id."""
        return [self.request_id]


class _Job(Ticket[_Sentence]):
    """One request, and the future that the last output of its sentences resolves."""

    def __init__(self, arrived_s: float) -> None:
        super().__init__(arrived_s)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Translations(OpenTickets[_Sentence]):
    """Prepares texts, sends their sentences to the replicas, and puts the translations together."""

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

        send(message, replica): sends to one of its engines; live_replicas(): raises RequestError where there is none.
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
        """Return the translation of each text. Cancelling it ends the work in the engines.

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
        job = _Job(arrived_s)
        work = [_Sentence(job, request_id, each.token_ids, self.engine.max_new_tokens) for each in sentences]
        async with self.admitted(job, self._priority_class, units=num_chars, cost=num_chars):
            await job.done
        texts = await asyncio.to_thread(lambda: list(self._texts(documents, work, target)))
        num_source_tokens = sum(len(sentence.token_ids) for sentence in work)
        num_output_tokens = sum(len(sentence.output) for sentence in work)
        job.terms.charge(num_source_tokens + num_output_tokens)
        return TranslatedTexts(texts, num_source_tokens, num_output_tokens)

    async def _documents(self, texts: Sequence[str], source: Language, target: Language) -> list[Document]:
        """Prepare texts in a thread, in turns with other requests. Raises RequestError.

        One thread at a time: each further one takes a share of the event loop's time.
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

    def on_output(self, replica: int, output: Translated) -> None:
        """Give a request its new translation."""
        sentence = self.find(output.request_id, replica)
        if sentence is not None and output.finish_reason is not None:
            self._on_output(sentence, output)

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

    def _on_output(self, sentence: _Sentence, output: Translated) -> None:
        job, stats = sentence.ticket, self._stats
        if output.finish_reason != "stop":
            status, code = _ENDED[output.finish_reason or "error"]
            error = RequestError(output.error or "the engine ended the request", status=status, code=code)
            self.close(sentence, "failed")
            self.end(job, error, "failed")
            return
        sentence.output = list(output.token_ids)
        stats.add("generation_tokens", len(output.token_ids))
        stats.finish(
            "stop",
            prompt_tokens=len(sentence.token_ids),
            arrived_s=job.arrived_s,
            first_token_s=None,
            now_s=time.monotonic(),
            times=None,
        )
        if output.times is not None:
            queued_s = output.times.started_s - output.times.arrived_s
            stats.histograms["request_queue_time_seconds"].observe(queued_s)
        self.close(sentence, "finished")
        if not job.open_children:
            job.done.set_result(None)

    def _texts(self, documents: list[Document], work: list[_Sentence], target: Language) -> Iterator[str]:
        sentences = iter(work)
        for document in documents:
            tokens = [sentence.output for sentence in itertools.islice(sentences, len(document.sentences))]
            yield finish(document, tokens, self.text.tokenizer, target)
