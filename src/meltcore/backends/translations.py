"""The open translations of a model whose engines run on this machine, as one API server process sees them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from meltcore.api.admission import Admission
from meltcore.api.protocol import TranslateRequest
from meltcore.api.stats import ModelStats
from meltcore.api.task_backends import TranslatedTexts
from meltcore.config import ModelConfig
from meltcore.errors import RequestError
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.config_fields import Fields
from meltcore.protocol.engines import ToEngine, shared_stats
from meltcore.protocol.shell import AbortRequests
from meltcore.protocol.translation import Translate, Translated, TranslationOutputs, TranslationReady
from meltcore.text.languages import LANGUAGES, Language
from meltcore.text.translation.document import Document, Sentence, finish, prepare
from meltcore.text.translation.languages import direction_of, find_language, needed_direction
from meltcore.text.translation.tokenizer import SentencePieceTokenizer, SyntheticTokenizer, TranslationTokenizer

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
    open_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _OpenSentence:
    """A sentence that an engine works on."""

    job: _Job
    index: int
    replica: int
    source_tokens: int
    cost: int


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
        self._admission = Admission(
            max_queue=config.max_queue, max_queue_tokens=config.max_queue_tokens, max_num_seqs=engine.slots
        )
        self._open: dict[str, _OpenSentence] = {}
        self._counter = itertools.count()

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
        tokenizer, limit, normalizer = self.text.tokenizer, self.engine.max_source, self._normalizer
        documents = await asyncio.to_thread(
            lambda: [prepare(text, tokenizer, source, target, limit, normalizer) for text in request.sentences]
        )
        sentences = [sentence for document in documents for sentence in document.sentences]
        if not sentences:
            return TranslatedTexts([finish(document, [], tokenizer, target) for document in documents])
        job = self._admit(sentences, request_id, arrived_s)
        try:
            await job.done
        finally:
            self._end(job, RequestError("the request has ended", status=499), "aborted")
        texts = await asyncio.to_thread(lambda: list(self._texts(documents, job, target)))
        num_source_tokens = sum(len(sentence.token_ids) for sentence in sentences)
        return TranslatedTexts(texts, num_source_tokens, sum(map(len, filter(None, job.outputs))))

    def on_step(self, step: TranslationOutputs, replica: int) -> None:
        """Give each request its new translations."""
        self._stats.record_step(shared_stats(step.stats), step.step_ended_s, replica)
        for output in step.outputs:
            sentence = self._open.get(output.request_id)
            if sentence is not None and output.finish_reason is not None:
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
        return source, target

    def _admit(self, sentences: list[Sentence], request_id: str, arrived_s: float) -> _Job:
        """Send the sentences to the engines. Raises RequestError (429)."""
        stats, num_tokens = self._stats, sum(len(sentence.token_ids) for sentence in sentences)
        job = _Job(asyncio.get_running_loop().create_future(), arrived_s, [None] * len(sentences))
        with stats.shared.locked():  # the limits are those of all API servers together
            num_live = len(self._live_replicas())
            try:
                self._admission.check(
                    requests=len(sentences),
                    replicas=num_live,
                    tokens=num_tokens,
                    in_flight=round(stats.total("in_flight")),
                    waiting_tokens=round(stats.total("waiting_prompt_tokens")),
                )
            except RequestError:
                stats.add("rejected_queue_full")
                raise
            for index, sentence in enumerate(sentences):
                self._start(job, index, sentence, f"{request_id}-{next(self._counter)}")
            stats.add("waiting_prompt_tokens", num_tokens)
            stats.add("accepted", len(sentences))
            stats.set_in_flight(len(self._open))
        return job

    def _start(self, job: _Job, index: int, sentence: Sentence, sentence_id: str) -> None:
        replica = min(self._stats.live_replicas(), key=self._stats.open_tokens)
        cost = len(sentence.token_ids) + self.engine.max_new_tokens
        self._stats.assign(replica, cost)
        self._open[sentence_id] = _OpenSentence(job, index, replica, len(sentence.token_ids), cost)
        job.open_ids.add(sentence_id)
        message = Translate(request_id=sentence_id, token_ids=sentence.token_ids, arrived_s=job.arrived_s)
        self._send(message, replica)

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
        stats.add("prompt_tokens", sentence.source_tokens)
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
        for sentence_id in list(job.open_ids):
            ids_by_replica.setdefault(self._open[sentence_id].replica, []).append(sentence_id)
            self._close(sentence_id, outcome)
        for replica, ids in ids_by_replica.items():
            self._send(AbortRequests(ids), replica)
        if not job.done.done():
            job.done.set_exception(error)

    def _close(self, sentence_id: str, outcome: str) -> None:
        sentence = self._open.pop(sentence_id)
        sentence.job.open_ids.discard(sentence_id)
        self._stats.add("waiting_prompt_tokens", -sentence.source_tokens)
        self._stats.unassign(sentence.replica, sentence.cost)
        self._stats.add(outcome)
        self._stats.set("in_flight", len(self._open))

    def _texts(self, documents: list[Document], job: _Job, target: Language) -> Iterator[str]:
        outputs = iter(job.outputs)
        for document in documents:
            tokens = [output for output in itertools.islice(outputs, len(document.sentences)) if output is not None]
            yield finish(document, tokens, self.text.tokenizer, target)
