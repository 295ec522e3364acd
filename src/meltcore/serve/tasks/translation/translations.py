"""The open translations of a model whose engines run on this machine, as one API server process sees them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from meltcore.common.errors import RequestError
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.config_fields import Fields
from meltcore.protocol.engines import ToEngine, shared_stats
from meltcore.protocol.shell import AbortRequests
from meltcore.protocol.translation import Translate, Translated, TranslationOutputs, TranslationReady
from meltcore.serve.requests.admission import CHARS, Admission
from meltcore.serve.requests.fair_queue import Waiting
from meltcore.serve.requests.protocol import TranslateRequest
from meltcore.serve.requests.request_queue import ENGINE_PRIORITY, EQUAL_SHARES, RequestQueue
from meltcore.serve.requests.stats import ModelStats
from meltcore.serve.requests.task_backends import TranslatedTexts
from meltcore.serve.requests.terms import RequestTerms, current_terms
from meltcore.settings.config import ModelConfig
from meltcore.text.languages import LANGUAGES, Language
from meltcore.text.translation.document import Document, Sentence, finish, prepare
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


@dataclass(eq=False)
class _Job:
    """One request: its outputs by sentence, and the future that its last one or an error resolves."""

    done: asyncio.Future[None]
    arrived_s: float
    outputs: list[list[int] | None]
    open_ids: dict[str, None] = field(default_factory=dict)  # in the order of the sentences
    waiting: Waiting | None = None  # from its admission on
    priority: int = 0  # of its messages to the engine
    terms: RequestTerms = field(default_factory=current_terms)
    is_retried: bool = False


@dataclass(eq=False)
class _OpenSentence:
    """A sentence that waits or that an engine works on."""

    job: _Job
    index: int
    token_ids: list[int]
    cost: int
    replica: int | None = None  # once it is started


class Translations:
    """Prepares texts, sends their sentences to the replicas, and puts the translations together."""

    def __init__(
        self,
        config: ModelConfig,
        text: TranslationText,
        engine: TranslationReady,
        stats: ModelStats,
        send: Callable[[ToEngine, int], None],
        live_replicas: Callable[[], list[int]],
        class_shares: Sequence[int] = EQUAL_SHARES,
    ) -> None:
        """Serve a loaded model.

        send(message, replica): sends to one of its engines; live_replicas(): raises RequestError where there is none.
        """
        self.text, self.engine = text, engine
        self._names = config.names
        self._normalizer = config.normalizer
        self._stats = stats
        self._send = send
        self._live_replicas = live_replicas
        self._priority_class = config.priority_class
        self._queue = RequestQueue(
            "translation",
            stats,
            Admission(
                max_queue=config.max_queue, max_units=config.max_queue_chars, max_num_seqs=engine.slots, unit=CHARS
            ),
            slots=engine.slots,
            shares=class_shares,
        )
        self._open: dict[str, _OpenSentence] = {}
        self._counter = itertools.count()
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
        job = self._admit(sentences, request_id, arrived_s, num_chars)
        try:
            await job.done
        finally:
            self._end(job, RequestError("the request has ended", status=499), "aborted")
        texts = await asyncio.to_thread(lambda: list(self._texts(documents, job, target)))
        num_source_tokens = sum(len(sentence.token_ids) for sentence in sentences)
        num_output_tokens = sum(map(len, filter(None, job.outputs)))
        current_terms().charge(num_source_tokens + num_output_tokens)
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

    def on_step(self, step: TranslationOutputs, replica: int) -> None:
        """Give each request its new translations."""
        self._stats.record_step(shared_stats(step.stats), step.step_ended_s, replica)
        for output in step.outputs:
            sentence = self._open.get(output.request_id)
            # What a lost replica sends of a sentence that another one works on is dropped.
            if sentence is not None and sentence.replica == replica and output.finish_reason is not None:
                self._on_output(sentence, output)

    def end_all(self, error: RequestError, outcome: str, replica: int | None = None) -> None:
        """End every request, or those with a sentence at `replica`."""
        jobs = {id(each.job): each.job for each in self._open.values() if replica is None or each.replica == replica}
        for job in jobs.values():
            self._end(job, error, outcome)

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

    def _admit(self, sentences: list[Sentence], request_id: str, arrived_s: float, num_chars: int) -> _Job:
        """Send the sentences to the engines, or let them wait for their turn. Raises RequestError (429)."""
        job = _Job(asyncio.get_running_loop().create_future(), arrived_s, [None] * len(sentences))
        self._live_replicas()
        priority_class = current_terms().class_of(self._priority_class)
        job.priority = ENGINE_PRIORITY[priority_class]

        def accept() -> None:
            for index, sentence in enumerate(sentences):
                sentence_id = f"{request_id}-{next(self._counter)}"
                cost = len(sentence.token_ids) + self.engine.max_new_tokens
                self._open[sentence_id] = _OpenSentence(job, index, sentence.token_ids, cost)
                job.open_ids[sentence_id] = None
            self._stats.add("waiting_prompt_tokens", sum(len(sentence.token_ids) for sentence in sentences))
            self._stats.add("accepted", len(sentences))
            self._stats.set_in_flight(len(self._open))

        job.waiting = Waiting(
            priority_class,
            lambda: self._start(job),
            requests=len(sentences),
            units=num_chars,
            cost=num_chars,
        )
        self._queue.admit(job.waiting, accept)
        return job

    def _start(self, job: _Job) -> None:
        """Send each sentence to the replica with the least to do. Without a living one: see OpenRequests.start."""
        for sentence_id in job.open_ids:
            self._send_to(sentence_id, self._stats.live_replicas() or [0])

    def _send_to(self, sentence_id: str, replicas: Sequence[int]) -> None:
        sentence = self._open[sentence_id]
        job = sentence.job
        sentence.replica = min(replicas, key=self._stats.open_tokens)
        self._stats.assign(sentence.replica, sentence.cost)
        message = Translate(
            request_id=sentence_id, token_ids=sentence.token_ids, priority=job.priority, arrived_s=job.arrived_s
        )
        self._send(message, sentence.replica)

    def retry(self, replica: int, others: Sequence[int]) -> None:
        """Send the sentences of a lost replica to others, once for each request; none has sent anything."""
        jobs = {id(each.job): each.job for each in self._open.values() if each.replica == replica}
        for job in jobs.values():
            if job.is_retried:
                continue
            job.is_retried = True
            job.terms.retries += 1
            ids = [sentence_id for sentence_id in job.open_ids if self._open[sentence_id].replica == replica]
            self._send(AbortRequests(ids), replica)  # it may be out of reach only
            for sentence_id in ids:
                self._stats.unassign(replica, self._open[sentence_id].cost)
                self._stats.add("retried")
                self._send_to(sentence_id, others)

    def _on_output(self, sentence: _OpenSentence, output: Translated) -> None:
        job = sentence.job
        if output.finish_reason != "stop":
            status, code = _ENDED[output.finish_reason or "error"]
            error = RequestError(output.error or "the engine ended the request", status=status, code=code)
            self._end(job, error, "failed")
            return
        job.outputs[sentence.index] = list(output.token_ids)
        stats = self._stats
        stats.add("generation_tokens", len(output.token_ids))
        stats.add("prompt_tokens", len(sentence.token_ids))
        stats.add("success_stop")
        stats.histograms["e2e_request_latency_seconds"].observe(time.monotonic() - job.arrived_s)
        if output.times is not None:
            queued_s = output.times.started_s - output.times.arrived_s
            stats.histograms["request_queue_time_seconds"].observe(queued_s)
        self._close(output.request_id, "finished")
        if not job.open_ids and not job.done.done():
            job.done.set_result(None)

    def _end(self, job: _Job, error: RequestError, outcome: str) -> None:
        """End what is open of a request, with `error`. No effect on one that has ended."""
        ids_by_replica: dict[int, list[str]] = {}
        if job.waiting is not None:
            self._queue.leave(job.waiting)
        for sentence_id in list(job.open_ids):
            replica = self._open[sentence_id].replica
            if replica is not None:
                ids_by_replica.setdefault(replica, []).append(sentence_id)
            self._close(sentence_id, outcome)
        for replica, ids in ids_by_replica.items():
            self._send(AbortRequests(ids), replica)
        if not job.done.done():
            job.done.set_exception(error)

    def _close(self, sentence_id: str, outcome: str) -> None:
        sentence = self._open.pop(sentence_id)
        sentence.job.open_ids.pop(sentence_id, None)
        self._stats.add("waiting_prompt_tokens", -len(sentence.token_ids))
        if sentence.replica is not None:
            self._stats.unassign(sentence.replica, sentence.cost)
        self._stats.add(outcome)
        self._stats.set("in_flight", len(self._open))
        self._queue.ended()

    def _texts(self, documents: list[Document], job: _Job, target: Language) -> Iterator[str]:
        outputs = iter(job.outputs)
        for document in documents:
            tokens = [output for output in itertools.islice(outputs, len(document.sentences)) if output is not None]
            yield finish(document, tokens, self.text.tokenizer, target)
