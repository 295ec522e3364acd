"""Describes the task embedding to measurements: texts to embed, or documents to rerank for a query."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from meltcore.measure.documents.values.definitions import Definition
from meltcore.measure.load.config import LoadConfig, parse_range, published_workload, workload_fields
from meltcore.measure.load.record import TaskWork
from meltcore.measure.load.tasks.task import MeasuredTask, ServedModel, Sizes, ThroughputUnit, work
from meltcore.measure.load.wire.response import COMPLETE, Failure, JsonResponse, decode_json, whole_count
from meltcore.measure.load.workloads.sentences import DEFAULT_WORDS, TEXT_OPTIONS, Texts
from meltcore.measure.load.workloads.workload import Clip, Prompt, Workload

_SMALL_WORDS = "3-8"  # of one text
_DOCUMENTS = 8  # of a request to a reranker


class _Usage(msgspec.Struct):
    prompt_tokens: int | float | None = None


class _Answer(msgspec.Struct):
    """The part of an answer that is checked: `data` of embeddings, `results` of a reranker."""

    data: list[dict[str, Any]] | None = None
    results: list[dict[str, Any]] | None = None
    usage: _Usage | None = None


class EmbeddingResponse(JsonResponse):
    """Reads the answer of POST /v1/embeddings or /v1/rerank, which has one entry per text of the request."""

    __slots__ = ()

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        answer = decode_json(_answer_decoder, data)
        entries = answer.data if answer.results is None else answer.results
        num_texts = work(self.record).sentences
        if entries is None or len(entries) != num_texts:
            return [], ("wrong answer", f"{len(entries or ())} results of {num_texts} texts")
        tokens = None if answer.usage is None else whole_count(answer.usage.prompt_tokens)
        if tokens is not None:
            self.record.prompt_tokens, self.record.saw_usage = tokens, True
        return ["result"] * num_texts, COMPLETE


_answer_decoder = msgspec.json.Decoder(_Answer)


def _open(config: LoadConfig, _num_requests: int, _clips: Sequence[Clip]) -> Workload:
    spec = config.workload
    fields = workload_fields(spec, ("texts", "documents", *TEXT_OPTIONS))
    counts = parse_range(fields.get("documents", fields.get("texts", "1")), f"workload {spec}: texts")
    texts = Texts(spec, fields, "")

    def prompt(index: int) -> Prompt:
        rng = random.Random(f"{config.seed}/{index}")  # noqa: S311 - must repeat for a seed
        num_texts = rng.randint(*counts)
        # Texts of a file follow one another: request i has the texts from i * (the most of a request) on.
        lines = [texts.line(index * counts.high + each, rng).text for each in range(num_texts)]
        work = TaskWork(sentences=num_texts, source_chars=sum(map(len, lines)))
        if "documents" in fields:
            return Prompt("/v1/rerank", {"query": texts.line(index, rng).text, "documents": lines}, None, work)
        return Prompt("/v1/embeddings", {"input": lines, "encoding_format": "base64"}, None, work)

    return Workload(published_workload(spec), prompt, False, EmbeddingResponse)


def _default_workload(model: ServedModel, _sizes: Sizes) -> str:
    words = _SMALL_WORDS if model.is_small else DEFAULT_WORDS
    is_reranker = "dimensions" in model.card and model.card["dimensions"] is None
    return f"embed:documents={_DOCUMENTS},words={words}" if is_reranker else f"embed:words={words}"


TASK = MeasuredTask(
    word="embed",
    usage=(("embed:words=8-40", "made texts (texts=1 a request; documents=8: to a reranker; file=PATH: own ones)"),),
    open=_open,
    default_workload=_default_workload,
    work_of=lambda record: float(work(record).sentences),
    unit=ThroughputUnit("embeddings_per_s", "Embeddings per second", "embeddings/s", "emb/s"),
    definitions=(
        Definition(
            "embeddings_per_s",
            "Embeddings/s",
            "embeddings/s",
            "Embedded texts, or scored documents, of succeeded requests, divided by the whole level.",
        ),
    ),
)
