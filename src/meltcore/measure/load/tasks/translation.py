"""Describes the task translation to measurements: the sentences, with right answers if a file gives them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import LevelResult
from meltcore.measure.documents.values.definitions import Definition
from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.load.config import LoadConfig, parse_range, published_workload, workload_fields
from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.tasks.task import (
    DemoStep,
    MeasuredTask,
    Metric,
    Problem,
    ServedModel,
    Sizes,
    ThroughputUnit,
    task_load,
    work,
)
from meltcore.measure.load.wire.response import COMPLETE, Failure, JsonResponse, decode_json, whole_count
from meltcore.measure.load.workloads.sentences import DEFAULT_WORDS, TEXT_OPTIONS, Texts, make_grader
from meltcore.measure.load.workloads.workload import Clip, Prompt, Workload
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate_phrases

PATH = "/v1/translate"
_PREFERRED = ("kan_Knda", "hin_Deva")
_SMALL_WORDS = "3-8"  # of one sentence


class _Usage(msgspec.Struct):
    prompt_tokens: int | float | None = None
    completion_tokens: int | float | None = None


class _Translations(msgspec.Struct):
    translations: list[str]
    usage: _Usage | None = None


class TranslationResponse(JsonResponse):
    """Reads the answer of POST /v1/translate, which has one translation per sentence of the request.

    If the server reports `usage`, the record gets its counts of source and target tokens.
    """

    __slots__ = ()

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        answer = decode_json(_translations_decoder, data)
        num_sentences = 0 if self.record.work is None else self.record.work.sentences
        if len(answer.translations) != num_sentences:
            return [], ("wrong answer", f"{len(answer.translations)} translations of {num_sentences} sentences")
        prompt_tokens = None if answer.usage is None else whole_count(answer.usage.prompt_tokens)
        if prompt_tokens is not None:
            self.record.prompt_tokens, self.record.saw_usage = prompt_tokens, True
            if self.record.prompt_tokens <= 0:
                return [], ("implausible usage", f"prompt_tokens {self.record.prompt_tokens}")
        target_tokens = None if answer.usage is None else whole_count(answer.usage.completion_tokens)
        if target_tokens is not None and self.record.work is not None:
            self.record.work = msgspec.structs.replace(self.record.work, target_tokens=max(0, target_tokens))
        return answer.translations, COMPLETE


_translations_decoder = msgspec.json.Decoder(_Translations)


def _open(config: LoadConfig, _num_requests: int, _clips: Sequence[Clip]) -> Workload:
    spec = config.workload
    fields = workload_fields(spec, ("src", "tgt", "sentences", *TEXT_OPTIONS))
    if "src" not in fields or "tgt" not in fields:
        raise ConfigError(f"workload {spec}: needs src=LANGUAGE and tgt=LANGUAGE, such as src=eng_Latn,tgt=kan_Knda")
    counts = parse_range(fields.get("sentences", "1"), f"workload {spec}: sentences")
    texts = Texts(spec, fields, fields["src"])
    languages = {"src_lang": fields["src"], "tgt_lang": fields["tgt"]}

    def prompt(index: int) -> Prompt:
        rng = random.Random(f"{config.seed}/{index}")  # noqa: S311 - must repeat for a seed
        num_sentences = rng.randint(*counts)
        # Sentences of a file follow one another: request i has those from i * (the most of a request) on.
        lines = [texts.line(index * counts.high + each, rng) for each in range(num_sentences)]
        sentences = [line.text for line in lines]
        work = TaskWork(sentences=num_sentences, source_chars=sum(map(len, sentences)))
        grade = make_grader([line.answer for line in lines])
        return Prompt(PATH, {**languages, "sentences": sentences}, grade, work)

    return Workload(published_workload(spec), prompt, texts.are_graded, TranslationResponse)


def _default_workload(model: ServedModel, _sizes: Sizes) -> str:
    source, target = _pair(model.card)
    return f"translate:src={source},tgt={target},words={_SMALL_WORDS if model.is_small else DEFAULT_WORDS}"


def _pair(card: Mapping[str, Any]) -> tuple[str, str]:
    """Return a pair of languages that the model translates. Pairs from English come first, then pairs into English."""
    sources, targets = (list(card.get(key) or []) for key in ("source_languages", "target_languages"))
    if not sources or not targets:
        return "eng_Latn", _PREFERRED[0]
    source = next((each for each in ("eng_Latn", *_PREFERRED) if each in sources), sources[0])
    other_targets = [each for each in targets if each != source]
    preferred_targets = _PREFERRED if source == "eng_Latn" else ("eng_Latn", *_PREFERRED)
    return source, next((each for each in preferred_targets if each in other_targets), other_targets[0])


def _details(records: Sequence[RequestRecord], duration_s: float) -> dict[str, Any]:
    """Return the fields of the source rate, in tokens if every answer reports tokens, else in characters."""
    has_token_counts = bool(records) and all(record.saw_usage for record in records)
    source = sum(record.prompt_tokens if has_token_counts else work(record).source_chars for record in records)
    return {
        "source_unit": "token" if has_token_counts else "character",
        "source": source,
        "source_per_s": source / duration_s if duration_s > 0 else 0.0,
    }


def _notes(records: Sequence[RequestRecord], result: LevelResult) -> list[str]:
    num_empty = sum(not record.first_text_s for record in records)
    if not num_empty:
        return []
    return [
        f"{num_empty} of {result.succeeded} answers have an empty translation: such a sentence may have "
        f"cost less than one with text"
    ]


def _facts(level: LevelResult) -> list[tuple[str, str]]:
    load = task_load(level)
    counts = f"{load.work:,.0f} sentences with {load.source or 0:,} {load.source_unit}s"
    text = f"{counts}; {format_number(load.source_per_s)} {load.source_unit}s/s of source"
    return [("Translated", text), ("Answers without text", f"{task_load(level).empty_answers:,}")]


def _source_per_s(level: LevelResult, unit: str) -> float | None:
    return level.task.source_per_s if level.task is not None and level.task.source_unit == unit else None


def phrases(seed: int, num_phrases: int = 200) -> list[Problem]:
    """Return held-out sentences with their translations."""
    sentences = generate_phrases("heldout", num_phrases=num_phrases, seed=seed)
    return [Problem(each.source, each.target) for each in sentences]


def _write_texts(folder: Path, problems: Sequence[Problem]) -> str:
    path = folder / "sentences.tsv"
    path.write_text("".join(f"{problem.given}\t{problem.answer}\n" for problem in problems), encoding="utf-8")
    return f"translate:src={SOURCE_LANGUAGE},tgt={TARGET_LANGUAGE},file={path}"


TASK = MeasuredTask(
    word="translate",
    usage=(
        (
            "translate:src=eng_Latn,tgt=kan_Knda",
            "made sentences (words=8-40; sentences=1 a request; file=PATH: own ones)",
        ),
    ),
    share=15.0,
    demo_share=12.0,
    open=_open,
    default_workload=_default_workload,
    work_of=lambda record: float(work(record).sentences),
    details=_details,
    notes=_notes,
    unit=ThroughputUnit("sentences_per_s", "Sentences per second", "sentences/s", "sent/s"),
    metrics=(
        Metric("source tok/s", lambda level: _source_per_s(level, "token"), "higher"),
        Metric("source char/s", lambda level: _source_per_s(level, "character"), "higher"),
    ),
    definitions=(
        Definition(
            "sentences_per_s",
            "Sentences/s",
            "sentences/s",
            "Translated sentences of succeeded requests, divided by the whole level from release to last answer. A "
            "sentence is one text of a request, which the server may split further.",
        ),
        Definition(
            "source_per_s",
            "Source tokens/s",
            "tokens/s",
            "Tokens of the translated texts over the same time, as the server counts them: `usage.prompt_tokens` of "
            "each answer. Where one answer lacks that count, characters are counted, by the client, and the unit says "
            "so.",
        ),
    ),
    facts=_facts,
    step=DemoStep(32, phrases, _write_texts),
)
